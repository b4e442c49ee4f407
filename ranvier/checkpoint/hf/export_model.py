"""Export of a checkpoint to a folder in Hugging Face's format, which transformers loads; tensor by tensor, in one
process.

The folder gets its name when the files have been read again and give the same logits as the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ranvier.checkpoint.files import check_free, new_folder
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf import image_files, logits, tokenizer_files
from ranvier.checkpoint.hf.forms import check_head, form_of
from ranvier.checkpoint.hf.peft import AdapterFolder, Adapters, modules_of
from ranvier.checkpoint.hf.peft import write as write_adapters
from ranvier.checkpoint.hf.pretrained import PretrainedConfig
from ranvier.checkpoint.manifest import Saved, SavedTensor, find, run_folders
from ranvier.config.named_object import is_object_name
from ranvier.config.run import Lora, Run, Transformer
from ranvier.data.cache import CacheOnly, NotInCache, Progress, user_cache_folder
from ranvier.data.offline import hub_model
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.errors import CheckpointError, RanvierError
from ranvier.models import families
from ranvier.models.lora import is_adapter
from ranvier.optim.rules import EMA
from ranvier.precision import DTYPES
from ranvier.system.tensor_file import STORED, Slot, write_model

SHARD_BYTES = 1_000_000_000
_PARAMETERS_OF_LAYER = 9
"""Smallest number of parameters of a layer."""
_run = TypeAdapter(Run)


def export(run: Path, out: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES,
           tokenizer: Path | None = None, tell: Progress = print, ema: bool = False) -> None:
    """Write the newest complete checkpoint of `run` (a run's folder, a folder of checkpoints, or a checkpoint) to
    `out`. Adapters are merged into the weights.

    Args:
        dtype: number format of the files, by its name in a run; by default that of the checkpoint's fp32 master copies,
            or of its parameters if it has none.
        shard_bytes: size of the largest file of tensors, unless one tensor is larger.
        tokenizer: a tokenizer.json; by default the one in the run's folder.
        tell: takes one line about what was done.
        ema: export the moving average of the parameters (optim.ema) instead.

    CheckpointError or DataError if that is not possible; then nothing is left at `out`.
    """
    check_free(out)
    with closing(newest_whole(run, tell)) as saved:
        source = TrainedSource(saved, dtype, ema=ema)
        slots = source.slots()
        with new_folder(out, sum(slot.size_bytes for slot in slots)) as folder:
            found = tokenizer or (tokenizer_of(run, source) if source.config.family != "vit" else None)
            named = {} if found is None else tokenizer_files.export_tokenizer(folder, found, source.config)
            ends = {"bos_token_id": None, "eos_token_id": None, **named} if source.head == "tokens" else {}
            if source.config.family == "transformers" and found is None:
                ends = {}  # config.json has them
            beside = found.parent if found else next((place for place in run_folders(run, saved.folder) if (
                place / tokenizer_files.GENERATION).is_file()), None)
            if source.config.family not in ("bert", "vit") and beside is not None:
                ends |= tokenizer_files.export_files_beside(folder, beside, tell) | (
                    tokenizer_files.padding_of(folder) if source.head != "tokens" and found else {})
            if source.config.family == "vit":
                image_files.export_processor(folder, source.run, saved.manifest.step, run_folders(run, saved.folder))
            _write_config(folder, source, ends)
            files = write_model(folder, slots, source.tensors(), shard_bytes)
            comparison = logits.compare(source.config, source.value, folder, head=source.head)
            logits.check(comparison, out)
            _report(tell, source, files, found, comparison)


def export_adapters(run: Path, out: Path, *, dtype: str | None = None, tell: Progress = print, ema: bool = False
                    ) -> None:
    """Write the adapters of the newest complete checkpoint of `run`, and its head if it was trained, to `out` in PEFT's
    format. dtype, tell, ema: as of `export`.

    CheckpointError if it has none; then nothing is left at `out`.
    """
    check_free(out)
    with closing(newest_whole(run, tell)) as saved:
        source = TrainedSource(saved, dtype, ema=ema)
        adapters = source.adapters
        if adapters is None:
            raise CheckpointError("has no adapters", code="checkpoint-without-adapters",
                                  where=f"checkpoint {saved.folder}",
                                  remedy="Leave `--adapters` out to export the model.")
        if source.config.family != "transformers":
            _check_base(source.run.model.pretrained, tell)
        frozen = set(saved.manifest.frozen)
        trained = [name for name in source.places if name.startswith("head.") and name not in frozen]
        size = sum(prod(saved.tensor("parameter", name).shape) for name in (*trained, *(
            name for name in saved.manifest.tensors["parameter"] if is_adapter(name))))
        with new_folder(out, size * source.dtype.itemsize) as folder:
            write_adapters(folder, adapters, source.base, dtype=source.dtype, base=source.run.model.pretrained,
                           trained=trained)
            AdapterFolder(folder).places(source.config, source.head)  # reads it again
        tell(f"{saved.folder}, step {saved.manifest.step}: {len(adapters.names)} adapters of rank {adapters.lora.rank}"
             + (f", and {', '.join(trained)}" if trained else ""))


def _check_base(base: str | None, tell: Progress) -> None:
    """CheckpointError if the modules of the adapters' base model have names there that we do not write. Nothing is
    fetched for the check, since a checkpoint may name any model: a line reports a model that is not here."""
    if base is None:
        return
    is_on_hub = hub_model.is_name(base) and not Path(os.path.expanduser(base)).is_dir()
    try:
        form = PretrainedConfig(hub_model.fetch_config(base, from_cache=True) if is_on_hub else
                                folder_of(base, user_cache_folder(), CacheOnly())).form
    except (NotInCache, RanvierError):
        tell(f"{base} is not on this machine: whether its layers have the names that these adapters give them is not "
             "checked")
        return
    if form.write is None:
        raise CheckpointError(f"is a {form.title}, whose linear layers have other names than the adapters would get",
                              code="adapters-of-import-only-base", where="base model of the adapters", value=base,
                              remedy="Leave `--adapters` out: the export then has the adapters merged.")


def tokenizer_of(run: Path, source: TrainedSource) -> Path | None:
    """The tokenizer.json with which the checkpoint of `source` at `run` was trained, if it still exists."""
    about = source.saved.manifest.about
    named = source.named_tokenizer
    imported = None if named in ("bpe", "gpt2") else Path(os.path.expanduser(named))
    return tokenizer_files.tokenizer_beside(run, source.saved.folder, imported, about.get("tokenizer"))


def newest_whole(path: Path, tell: Progress) -> Saved:
    """The newest undamaged checkpoint at `path`. CheckpointError if there is none."""
    problems: list[CheckpointError] = []
    for folder in find(path):
        try:
            saved = Saved(folder)
            for damage in saved.damage():
                raise damage
        except CheckpointError as error:
            problems.append(error)
            continue
        for problem in problems:
            tell(f"left out: {problem.where}: {problem.what}")
        return saved
    adapters = (" `ranvier evaluate MODEL --lora.adapters` takes this folder of adapters; `ranvier export` of their "
                "run merges them into the model." if (path / "adapter_config.json").is_file() else "")
    raise problems[0] if problems else CheckpointError(
        "has no checkpoint" if path.exists() else "does not exist", code="folder-without-checkpoint", where=str(path),
        remedy=f"Name a run's folder, its folder of checkpoints, or one of them.{adapters}")


def averages_in(saved: Saved) -> Mapping[str, SavedTensor]:
    """The moving averages of parameters by name; frozen parameters are their own averages. CheckpointError if the run
    keeps none."""
    found = saved.manifest.tensors.get(EMA)
    if not found:
        raise CheckpointError("has no moving average of the parameters", code="checkpoint-without-ema",
                              where=f"checkpoint {saved.folder}",
                              remedy="Train with `--optim.ema`, or leave `--ema` out.")
    return found


class TrainedSource:
    """The parameters of a checkpoint of `ranvier train`, in the number format of the export.

    config: the model's settings; head: of the model; form: its names and layout in Hugging Face's format; dtype: of the
    export. ema: use the moving averages. CheckpointError if the model has no such form, or the checkpoint has no
    averages.
    """

    def __init__(self, saved: Saved, dtype: str | None, *, ema: bool = False) -> None:
        self.saved = saved
        self.run = run_of(saved)
        self.config, self.head, self.named_tokenizer = model_of(saved)
        check_head(self.config, self.head)
        self.form = form_of(self.config)
        kinds = saved.manifest.tensors
        parameters, masters = kinds.get("parameter", {}), kinds.get("master", {})
        if min(_PARAMETERS_OF_LAYER, self.form.per_layer) * self.config.num_layers > len(parameters):
            raise _other_model_error("export-too-few-parameters", saved,
                                     f"has too few parameters for {self.config.num_layers} layers", len(parameters))
        self.places = self.form.places(self.config, self.head)
        adapters = {name for name in parameters if is_adapter(name)}
        for name in sorted(self.places.keys() ^ (parameters.keys() - adapters)):
            raise _other_model_error("export-parameters-differ", saved,
                                     f"{'lacks the' if name in self.places else 'has a'} parameter {name}")
        averages = averages_in(saved) if ema else {}
        self._kind = {name: EMA if name in averages else "master" if name in masters else "parameter"
                      for name in self.places}
        formats = set()
        for name, kind in self._kind.items():
            tensor = saved.tensor(kind, name)
            if tensor.shape != (wanted := self.places[name].shape):
                raise _other_model_error("export-parameter-shape", saved,
                                         f"has a {kind} {name} of another shape than {wanted}", tensor.shape)
            if getattr(torch, tensor.dtype) not in STORED:
                raise _other_model_error("export-number-format", saved, f"has a {kind} {name} in {tensor.dtype}")
            formats.add(getattr(torch, tensor.dtype))
        self.adapters = self._adapters(adapters, masters, averages) if adapters else None
        """Adapters of the checkpoint, which `exact` and `value` merge into the weights."""
        self.dtype = DTYPES[dtype] if dtype else max(formats, key=lambda dtype: (dtype.itemsize, str(dtype)))
        self.rounds = bool(formats - {self.dtype, *_WITHIN.get(self.dtype, ())})
        """Whether values are rounded."""

    @property
    def has_masters(self) -> bool:
        return "master" in self._kind.values()

    def slots(self) -> list[Slot]:
        """The tensors of the export, in order."""
        return [Slot(name=name, dtype=self.dtype, shape=shape) for place in self.places.values()
                for name, shape in zip(place.names, place.shapes, strict=True)]

    def tensors(self) -> Iterator[Tensor]:
        """The values of these tensors."""
        for name, place in self.places.items():
            yield from hf.tensors_there(place, self.value(name))

    def _adapters(self, names: set[str], masters: Mapping[str, object], averages: Mapping[str, object]) -> Adapters:
        """The adapters of the checkpoint. CheckpointError if they belong to no layer of the model, or do not match its
        settings."""
        lora, targets = self.run.lora, {name.rpartition(".lora.")[0] for name in names}
        kinds = ("A", "B", *(["magnitude_change"] if lora.method == "dora" else []))
        known = modules_of(self.config, self.head)
        if not lora.rank or not targets <= known.keys() or names != {
                f"{target}.lora.{kind}" for target in targets for kind in kinds}:
            raise _other_model_error("export-adapters-undescribed", self.saved,
                                     "has adapters that its settings do not describe", min(names))
        for target in targets:
            rank = self.saved.tensor("parameter", f"{target}.lora.A").shape[0]
            if rank != lora.rank:
                raise _other_model_error("export-adapter-rank", self.saved,
                                         f"has adapters of another rank than {lora.rank}", rank)
        return Adapters(config=self.config, head=self.head, lora=lora, names=frozenset(targets),
                        read=lambda name: self.saved.read(
                            EMA if name in averages else "master" if name in masters else "parameter", name))

    def exact(self, ours: str) -> Tensor:
        """A parameter in the number format of the checkpoint; with adapters merged into it in fp32 or wider."""
        found = self.base(ours)
        return found if self.adapters is None else self.adapters.merged(ours, found)

    def base(self, ours: str) -> Tensor:
        """A parameter in the number format of the checkpoint, without adapters."""
        return self.saved.read(self._kind[ours], ours)

    def value(self, ours: str) -> Tensor:
        """A parameter in the number format of the export. CheckpointError if a value is NaN or infinite there."""
        return hf.finite(self.exact(ours).to(self.dtype), ours, self.saved.folder)


_WITHIN = {torch.float32: (torch.bfloat16, torch.float16),
           torch.float64: (torch.bfloat16, torch.float16, torch.float32)}
"""Number formats that a wider one contains."""


def run_of(saved: Saved) -> Run:
    """The settings of model, adapters and data in the manifest. CheckpointError if they are missing or invalid."""
    run = saved.manifest.about.get("run")
    try:
        found = _run.validate_json(json.dumps({key: run[key] for key in ("model", "lora", "data") if key in run}
                                              if isinstance(run, dict) and "model" in run else None), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, ("about", "run", *(first["loc"] or ("model",)))))
        raise _other_model_error("export-model-unknown", saved,
                                 f"does not say which model it is of: {place}: {first['msg']}") from error
    return found


def model_of(saved: Saved) -> tuple[Transformer, str, str]:
    """The model's settings in the manifest, with its family, the head of its task and the setting of its tokenizer.
    CheckpointError if they are missing or invalid."""
    found = run_of(saved)
    for setting, name in (("model.family", found.model.family), ("data.task", found.data.task)):
        if is_object_name(name):  # importing it would run code that the checkpoint names, not the user
            raise _other_model_error("export-of-own-model", saved,
                                     f"is of a {setting} outside of Ranvier, which has no form there", name)
    for problem in families.problems(replace(found, lora=Lora())):
        raise _other_model_error("export-model-impossible", saved,
                                 f"is of an impossible model: {problem.where} {problem.what}", problem.value)
    config = families.config_of(found)
    parameters = saved.manifest.tensors.get("parameter", {})
    shape = next((parameters[name].shape for name in hf.CLASSIFIERS if name in parameters), ())
    if config.num_classes == "auto" and len(shape) == 2 and shape[0]:
        config = replace(config, num_classes=shape[0])
    if parameters.keys() & form_of(config).tied(config).keys():
        config = families.with_own_head(config)  # freezing has ended the tie
    return config, families.head_of(found), found.data.tokenizer


def _other_model_error(code: str, saved: Saved, what: str, value: object = None) -> CheckpointError:
    return CheckpointError(what, code=code, where=f"checkpoint {saved.folder}", value=value,
                           remedy="Only checkpoints of `ranvier train`, whose models are of a shipped family, can be "
                                  "exported.")


# --- files -----------------------------------------------------------------------------------------------------------


def _write_config(folder: Path, source: TrainedSource, ends: dict[str, object]) -> None:
    """Write config.json. ends: the tokens that begin and end texts."""
    assert source.form.write is not None, "form_of gives forms that can be written"
    settings = source.form.write(source.config, source.head)
    dtype = str(source.dtype).removeprefix("torch.")  # under its old and its new key
    document = {**settings, **_labels(source), **ends, "torch_dtype": dtype, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _labels(source: TrainedSource) -> dict[str, object]:
    """The names of the classes, if the run has written them into its checkpoints."""
    names, classes = source.saved.manifest.about.get("labels"), source.config.num_classes
    if source.head != "classes" or not isinstance(names, (list, tuple)) or len(names) != classes or not all(
            isinstance(name, str) for name in names):
        return {}
    return hf.label_keys(names)


def _report(tell: Progress, source: TrainedSource, files: list[str], tokenizer: Path | None,
            comparison: logits.Comparison) -> None:
    saved, config = source.saved, source.config
    name = next(name for name, dtype in DTYPES.items() if dtype is source.dtype)
    num_parameters = sum(slot.size_bytes for slot in source.slots()) // source.dtype.itemsize
    tell(f"{saved.folder}, step {saved.manifest.step}: {num_parameters:,} parameters in {name}"
         + (", from master copies" if source.has_masters else "")
         + (f", with {len(source.adapters.names)} adapters merged" if source.adapters else "")
         + f", in {len(files)} file{'s' if len(files) > 1 else ''}")
    if config.family != "vit":
        tell(f"tokenizer: {tokenizer}" if tokenizer else
             "without a tokenizer: no tokenizer.json is there; name the run's folder, or one with `--tokenizer`")
    logits.report(comparison, tell)
    if source.rounds:
        inputs = logits.inputs_of(config)
        exact, rounded = (logits.logits(config, read, inputs, source.head) for read in (source.exact, source.value))
        moved = (exact - rounded).abs().max()
        if moved:
            tell(f"rounding to {name} has changed logits by at most {float(moved):.2g}")
