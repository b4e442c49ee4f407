"""Adapters in PEFT's format, in both directions, and merged into the weights of their layers.

    adapter_config.json            r, lora_alpha, use_dora, target_modules, ...
    adapter_model.safetensors      base_model.model.MODULE.lora_A.weight, .lora_B.weight, .lora_magnitude_vector, and
                                   the tensors of a trained head

"Here" and "there" are as in `form`. A module there is a linear layer here, or one part of it: BERT's query is a part of
`qkv`. PEFT's magnitude is our magnitude change plus the norm of each row of the weight.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ranvier.checkpoint import state
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf.forms import form_of
from ranvier.config.named_object import is_object_name
from ranvier.config.run import Lora, Run, Transformer
from ranvier.errors import CheckpointError, ConfigError, ModelError
from ranvier.models import families
from ranvier.system.untrusted_file import member, read_json
from ranvier.tensor.adapters import adapters_in, squared_norms

if TYPE_CHECKING:
    from ranvier.pipeline.engine import Engine

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_KINDS = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector": "magnitude_change",
          "lora_magnitude_vector.weight": "magnitude_change"}
_TASKS = {"tokens": "CAUSAL_LM", "score": "SEQ_CLS", "classes": "SEQ_CLS", "span": "QUESTION_ANS"}
_ANY = None
READ = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
"""Keys of adapter_config.json that are read."""
NEUTRAL: Mapping[str, tuple[object, ...] | None] = {
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
                     "inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
                     "modules_to_save", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config",
                     "eva_config"), _ANY),
    "peft_type": ("LORA",), "bias": ("none",), "rank_pattern": ({},), "alpha_pattern": ({},),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"), "loftq_config": ({},),
    "corda_config": (), "lora_ga_config": (), "layer_replication": (), "trainable_token_indices": (),
    "target_parameters": ([],), "use_qalora": (False,), "lora_bias": (False,), "megatron_config": (),
    "alora_invocation_tokens": (), "velora_config": (), "monteclora_config": (), "use_bdlora": (False,),
    "arrow_config": (), "kasa_config": (), "ensure_weight_tying": (False,)}
"""Further keys -> values, in addition to null, that do not change what is computed; _ANY if no value does, since the
names and shapes of the tensors have the same information. Initial values such as pissa, olora and corda, which change
the base weights, are refused: such an adapter is correct only on the changed weights."""
Read = Callable[[str], Tensor]
"""Our parameter's name -> its value."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module there that can have an adapter.

    name: there. weight: our parameter that holds its weight. target: our name of the layer, or of its part. part:
    (number, count) of a part; in each of `units` units, its rows follow those of the previous parts.
    """

    name: str
    weight: str
    target: str
    place: hf.TensorMapping
    part: tuple[int, int] | None = None
    units: int = 1

    def rows(self, weight: Tensor) -> Tensor:
        """The module's rows of our weight."""
        return self._split_units(weight)[:, self.part[0]].flatten(0, 1) if self.part else weight

    def with_rows(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Our weight with other rows of the module."""
        if not self.part:
            return rows
        found = self._split_units(weight).clone()
        found[:, self.part[0]] = rows.unflatten(0, (self.units, -1))
        return found.flatten(0, 2)

    def _split_units(self, weight: Tensor) -> Tensor:
        assert self.part
        found: Tensor = weight.unflatten(0, (self.units, self.part[1], -1))
        return found

    def to_peft(self, kind: str, tensor: Tensor, transposes: bool) -> Tensor:
        """A parameter of an adapter, with its rows in their order."""
        if kind == "A" or not transposes:
            return tensor.contiguous()
        return self.place.part(tensor)[0].t().contiguous()

    def from_peft(self, kind: str, tensor: Tensor, transposes: bool) -> Tensor:
        """The inverse of `to_peft`."""
        if kind == "A" or not transposes:
            return tensor
        return self.place.join([tensor.t()])


def modules_of(config: Transformer, head: str) -> dict[str, Module]:
    """Our name of a layer, or of its part -> the module there, for all modules that can have an adapter."""
    found = {}
    for name, place in form_of(config).places(config, head).items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or len(place.shape) != 2 or not name.startswith("layer"):
            continue
        for number, theirs in enumerate(place.names):
            several = len(place.names) > 1
            target = f"{layer}.{('query', 'key', 'value')[number]}" if several else layer
            found[target] = Module(name=theirs.removesuffix(".weight"), weight=name, target=target, place=place,
                                   part=(number, len(place.names)) if several else None, units=config.heads)
    return found


def _transposes(config: Transformer) -> bool:
    """Whether weights there are [in, out] (transformers' Conv1D)."""
    return form_of(config).family == "gpt"


# --- merging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model on disk. names: our layers, or their parts. read: a parameter's name -> its value."""

    config: Transformer
    head: str
    lora: Lora
    names: frozenset[str]
    read: Read

    def value(self, module: Module, kind: str) -> Tensor:
        return self.read(f"{module.target}.lora.{kind}")

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Our parameter with its adapters merged, in fp32 or wider; unchanged if it has none."""
        for module in _modules_of(self.config, self.head, self.names):
            if module.weight == name:
                wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
                weight = module.with_rows(wide, self._merge_rows(module, module.rows(wide)))
        return weight

    def _merge_rows(self, module: Module, rows: Tensor) -> Tensor:
        a, b = (self.value(module, kind).to(rows.dtype) for kind in ("A", "B"))
        found: Tensor = rows + self.lora.scale * b.mm(a)
        if self.lora.method == "lora":
            return found
        before, after = squared_norms(rows, a, b, self.lora.scale).sqrt()
        change = self.value(module, "magnitude_change").to(rows.dtype)
        turned: Tensor = found * ((before + change) / after)[:, None]
        return turned


def _modules_of(config: Transformer, head: str, names: frozenset[str]) -> Iterator[Module]:
    modules = modules_of(config, head)
    return (modules[name] for name in modules if name in names)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(folder: Path, adapters: Adapters, weight: Read, *, dtype: torch.dtype, base: str | None,
          trained: Sequence[str]) -> None:
    """Write the two files.

    weight: our parameter's value without adapters. dtype: of the files. base: folder or name of the model that they
    belong to. trained: our parameters that were trained in addition to the adapters.
    """
    config, lora, tensors = adapters.config, adapters.lora, {}
    transposes, modules = _transposes(config), list(_modules_of(config, adapters.head, adapters.names))
    for module in modules:
        for theirs, kind in _KINDS.items():
            if kind == "magnitude_change" and (lora.method == "lora" or theirs.endswith(".weight")):
                continue
            value = adapters.value(module, kind)
            if kind == "magnitude_change":
                rows = module.rows(weight(module.weight))
                wide = torch.promote_types(torch.promote_types(value.dtype, rows.dtype), torch.float32)
                value = value.to(wide) + torch.linalg.vector_norm(rows, dim=1, dtype=wide)
            tensors[f"{_PREFIX}{module.name}.{theirs}"] = hf.finite(
                module.to_peft(kind, value.to(dtype), transposes), f"{module.target}.lora.{kind}", folder)
    places = form_of(config).places(config, adapters.head)
    saved = set()
    for name in trained:
        parts = hf.tensors_there(places[name], weight(name).to(dtype))
        for theirs, tensor in zip(places[name].names, parts, strict=True):
            tensors[_PREFIX + theirs] = tensor
            saved.add(theirs.rpartition(".")[0])
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / TENSORS, metadata={"format": "pt"})
    document = {
        "peft_type": "LORA", "task_type": _TASKS.get(adapters.head), "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha, "lora_dropout": lora.dropout,
        "target_modules": _target_modules(modules, config, adapters.head), "fan_in_fan_out": transposes, "bias": "none",
        "use_dora": lora.method == "dora", "use_rslora": False, "modules_to_save": sorted(saved) or None,
        "init_lora_weights": True, "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _target_modules(modules: Sequence[Module], config: Transformer, head: str) -> list[str]:
    """The shortest name suffixes that match these modules and no others."""
    wanted = {module.name for module in modules}
    places = form_of(config).places(config, head).values()
    every = {name.removesuffix(".weight") for place in places for name in place.names if name.endswith(".weight")}
    found: list[str] = []
    for name in (module.name for module in modules):
        words = name.split(".")
        for count in range(1, len(words) + 1):
            end = ".".join(words[-count:])
            if {one for one in every if one == end or one.endswith(f".{end}")} <= wanted:
                found.append(end)
                break
    return list(dict.fromkeys(found))


# --- reading ----------------------------------------------------------------------------------------------------------


class AdapterFolder:
    """A folder in PEFT's format, read as untrusted input. CheckpointError if it is damaged, or has adapters that we do
    not support.

    rank, alpha, method, dropout: its settings; alpha is defined by the scale alpha / rank, also with use_rslora.
    document: the content of adapter_config.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document = document = self._document()
        for key, value in document.items():
            allowed = NEUTRAL.get(key, ())
            if value is not None and key not in READ and allowed is not _ANY and not any(
                    type(value) is type(one) and value == one for one in allowed):
                raise self._error("adapter-setting-not-supported", f"has {key} that is not supported", value)
        rank, alpha, dropout = (document.get(key, default) for key, default in (
            ("r", 8), ("lora_alpha", 8), ("lora_dropout", 0.0)))
        if not _is_number(rank) or int(rank) != rank or rank < 1 or not _is_number(alpha) or alpha <= 0:
            raise self._error("adapter-rank", "has r or lora_alpha that is not a positive number", f"{rank}, {alpha}")
        if not _is_number(dropout) or not 0 <= dropout < 1:
            raise self._error("adapter-dropout", "has lora_dropout that is not a probability", dropout)
        self.rank, self.dropout = int(rank), float(dropout)
        self.alpha = float(alpha) * (self.rank ** 0.5 if document.get("use_rslora") else 1.0)
        self.method: Literal["lora", "dora"] = "dora" if document.get("use_dora") else "lora"
        self._found: dict[str, tuple[int, ...]] = {}
        try:
            with safe_open(str(member(folder, TENSORS)), framework="pt") as file:
                self._found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._error("adapter-file-unreadable",
                              f"has no {TENSORS} that can be read: {str(error).partition(chr(10))[0]}") from error

    def _document(self) -> dict[str, Any]:
        try:
            document = read_json(member(self.folder, CONFIG), _CONFIG_BYTES)
        except (OSError, ValueError) as error:
            raise self._error("adapter-file-unreadable",
                              f"has no {CONFIG} that can be read: {str(error).partition(chr(10))[0]}") from error
        if not isinstance(document, dict):
            raise self._error("adapter-config-not-object", f"has a {CONFIG} that is not an object")
        return document

    def places(self, config: Transformer, head: str) -> tuple[dict[str, tuple[Module, str, str]], dict[str, str]]:
        """Our parameter of an adapter -> (its module, its kind, its name in the file); and our parameter of a head ->
        its name there. CheckpointError for tensors whose name or shape fits no layer, and for missing tensors."""
        modules = {module.name: module for module in modules_of(config, head).values()}
        places = form_of(config).places(config, head)
        heads = {theirs: ours for ours, place in places.items() for theirs in place.names
                 if ours.startswith("head.") and len(place.names) == 1
                 and len(places[f"{ours.rpartition('.')[0]}.weight"].shape) == 2}  # norms are not trained with a head
        found: dict[str, tuple[Module, str, str]] = {}
        others: dict[str, str] = {}
        for name, shape in self._found.items():
            inner = re.sub(r"\.modules_to_save(\.\w+)?(?=\.)", "", name.removeprefix(_PREFIX))
            ending = next((end for end in _KINDS if inner.endswith(f".{end}")), None)
            module = modules.get(inner.removesuffix(f".{ending}")) if ending else None
            if module is None and inner in heads:
                others[heads[inner]] = name
                continue
            if module is None or ending is None:
                raise self._error("adapter-of-unknown-layer", "has a tensor that belongs to no linear layer of the "
                                  "model", name)
            features, width = module.place.shape
            features //= module.part[1] if module.part else 1
            wanted = {"A": (self.rank, width), "B": (features, self.rank)}.get(_KINDS[ending], (features,))
            if shape != wanted:
                raise self._error("adapter-tensor-shape", f"has {name} of another shape than {wanted}", shape)
            found[f"{module.target}.lora.{_KINDS[ending]}"] = module, _KINDS[ending], name
        kinds = {"A", "B"} | ({"magnitude_change"} if self.method == "dora" else set())
        for target in {module.target for module, _, _ in found.values()}:
            for kind in sorted(kinds):
                if f"{target}.lora.{kind}" not in found:
                    raise self._error("adapter-tensor-missing", f"lacks the {kind} of {target}")
        if not found:
            raise self._error("folder-without-adapters", "has no adapters")
        return found, others

    def targets(self, config: Transformer, head: str) -> tuple[str, ...]:
        """Patterns of our layers with adapters: names within a layer if all layers have them, else full names."""
        names = list(dict.fromkeys(module.target for module, _, _ in self.places(config, head)[0].values()))
        within: dict[str, list[str]] = {}
        for name in names:
            within.setdefault(name.partition(".")[2], []).append(name)
        return tuple(pattern for inner, found in within.items()
                     for pattern in ([inner] if len(found) == config.num_layers else found))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the file."""
        return self._found[name]

    def read(self, name: str) -> Tensor:
        """A tensor of the file."""
        with safe_open(str(self.folder / TENSORS), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _error(self, code: str, what: str, value: object = None) -> CheckpointError:
        return CheckpointError(what, code=code, where=f"adapters {self.folder}", value=value,
                               remedy="Name a folder of LoRA or DoRA adapters that PEFT has saved for this model.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9


def with_adapter_settings(run: Run) -> Run:
    """The run with rank, alpha, targets and method of `lora.adapters`; the sizes of its model must be resolved.
    RanvierError if a setting of the run differs, or the folder does not fit the model."""
    if run.lora.adapters is None:
        return run
    if is_object_name(run.model.family) or is_object_name(run.data.task):
        raise ConfigError("cannot be loaded into your own model or task", code="family-without-adapters",
                          where="lora.adapters", value=str(run.lora.adapters),
                          remedy="Leave it out: only shipped families have names in PEFT's format.")
    config, head = families.config_of(run), families.head_of(run)
    folder = AdapterFolder(Path(os.path.expanduser(run.lora.adapters)))
    settings: dict[str, Any] = {"rank": folder.rank, "alpha": folder.alpha, "method": folder.method,
                                "targets": folder.targets(config, head)}
    for name, value in settings.items():
        if getattr(run.lora, name) not in (getattr(Lora, name), value):
            raise ConfigError(f"is not that of {folder.folder}, {value}", code="differs-from-adapters",
                              where=f"lora.{name}", value=getattr(run.lora, name),
                              remedy="Leave it out, or choose another `--lora.adapters`.")
    train_head = True if folder.places(config, head)[1] else run.lora.train_head
    return replace(run, lora=replace(run.lora, **settings, train_head=train_head))


def _value(folder: AdapterFolder, module: Module, kind: str, name: str, transposes: bool,
           norms: Callable[[Module], Tensor]) -> Tensor:
    """Our parameter of an adapter, from its tensor `name`. norms: gives the norms of the rows of a module's weight."""
    tensor = hf.finite(module.from_peft(kind, folder.read(name), transposes), f"{module.target}.lora.{kind}",
                       folder.folder)
    return tensor if kind != "magnitude_change" else tensor - norms(module).cpu().to(tensor.dtype)


def adapters_of(folder: AdapterFolder, config: Transformer, head: str, weight: Read) -> Adapters:
    """The adapters of a folder on weights that `weight` reads, as `load_adapters` sets them."""
    found, transposes = folder.places(config, head)[0], _transposes(config)

    def norms(module: Module) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(module.rows(weight(module.weight).float()), dim=1)
        return found

    return Adapters(config=config, head=head, names=frozenset(module.target for module, _, _ in found.values()),
                    lora=Lora(rank=folder.rank, alpha=folder.alpha, method=folder.method),
                    read=lambda name: _value(folder, *found[name], transposes, norms))


def load_adapters(engine: Engine, folder: AdapterFolder, config: Transformer, head: str) -> list[str]:
    """Set the adapters of this rank, and the parameters of a trained head, to the folder's. Collective; call it before
    the first step, after the model's own weights are loaded. Returns notes for the user, the same on every rank."""
    found, others = folder.places(config, head)
    transposes, places = _transposes(config), form_of(config).places(config, head)
    norms = {f"{block}.{target}": adapter.weight_norms(weight.detach())
             for block, module in engine.blocks.items() for target, adapter, weight in adapters_in(module)
             if adapter.form.magnitude}
    shapes = {parameter.name: parameter.shape for parameter in engine.layout.parameters}
    for name in others:
        if name in shapes and shapes[name] != folder.shape(others[name]):
            raise ModelError(f"has another shape than in {folder.folder}, where it is {folder.shape(others[name])}",
                             code="adapter-shape", where=f"parameter {name}", value=shapes[name],
                             remedy="Give data with the classes of the adapters' head.")

    def value(name: str) -> Tensor | None:
        if name in others:
            return hf.tensor_here(places[name], [folder.read(others[name])])
        return _value(folder, *found[name], transposes, lambda module: norms[module.target]) if name in found else None

    state.set_parameters(engine, value)
    targets = {module.target for module, _, _ in found.values()}
    return [f"{len(targets)} adapters of rank {folder.rank} from {folder.folder}"
            + (f", and {', '.join(others)}" if others else "")]
