"""A model with low-rank adapters, which are trained while the original parameters are frozen.

    model = ranvier.with_adapters(model, ranvier.Lora(rank=8, alpha=16, targets=("query", "value")))

It is a `Model` like any other, so an engine trains it on any mesh. The adapter of the layer NAME has the parameters
NAME.lora.A, NAME.lora.B and, for DoRA, NAME.lora.magnitude_change. A is initialized like torch's nn.Linear, as in PEFT,
B and the magnitude's change with zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from ranvier.arguments import check_arguments
from ranvier.block import (
    Initial,
    Loss,
    Model,
    Modules,
    alike_by_kind,
    as_model,
    existing_blocks,
    initialise,
    meta_device,
)
from ranvier.config.run import Lora
from ranvier.errors import ConfigError, ModelError
from ranvier.tensor.adapters import Adapter, AdapterForm, add_adapter
from ranvier.tensor.layers import Linear, SharedInputLinear
from ranvier.tensor.quantized_weight import BLOCK, check_available
from ranvier.tensor.splittable import ActivationKind, Layer

AUTO_TARGETS = ("query", "value", "qkv")
"""Layers that `targets` auto selects, if a model has them."""
_NAMES_THERE = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "attention.projection",
                "gate_proj": "gate", "up_proj": "up", "down_proj": "fc2", "c_attn": "qkv"}
"""Names in transformers, as used in PEFT's targets -> ours, for models without layers of that name."""
_MOST_TOLD = 12


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A linear layer of a block, or one output of it. path: of its module. part: of `Linear.parts`. units: as in
    `Adapter`."""

    path: str
    in_features: int
    out_features: int
    part: str = ""
    takes: ActivationKind = "whole"
    gives: ActivationKind = "whole"
    units: int | None = None


def with_adapters(model: Model | Modules, lora: Lora, *,
                  loss: Loss | None = None, seed: int = 0) -> Model:
    """`model` with adapters in the linear layers that `lora.targets` names, and everything else frozen, except the
    linear layers of the last block with `lora.train_head`. `lora.adapters` is not read.

    loss: of a model that is a list of blocks. seed: of the adapters' initial values in a model without `initial`, whose
    blocks get them when they are built; other models use the engine's seed.

    ConfigError for a pattern that matches no linear layer; ModelError for a head that is tied to a frozen parameter.
    """
    check_arguments(with_adapters, locals(), but=("model",))
    model = as_model(model, loss)
    if not lora.rank:
        raise ConfigError("must be at least 1", code="lora-rank", where="lora.rank", value=lora.rank,
                          remedy="Set `--lora.rank 8`.")
    kinds: dict[str, dict[str, _Target]] = {}
    for block, build in model.blocks.items():
        if (alike := model.alike.get(block, block)) not in kinds:
            with meta_device():
                kinds[alike] = _linear_layers(build())
    names = [_join_name(block, name) for block in model.blocks for name in kinds[model.alike.get(block, block)]]
    chosen = set(_target_layers(names, lora))
    targets = {block: {name: target for name, target in kinds[model.alike.get(block, block)].items()
                       if _join_name(block, name) in chosen} for block in model.blocks}
    last = list(model.blocks)[-1] if lora.train_head is True else None
    if last is not None:
        _check_head(model, last)
    form = AdapterForm(rank=lora.rank, scale=lora.scale, dropout=lora.dropout,
                       magnitude=lora.method == "dora")
    fan_in = {f"{_join_name(block, name)}.lora.A": target.in_features for block, found in targets.items()
              for name, target in found.items()}
    for block, module in existing_blocks(model).items():  # names in the original module, for `names_in_whole`
        noted = vars(module).get("names_in_whole", {})
        noted |= {f"{name}.lora.{kind}": tuple(f"{one.removesuffix('weight')}lora.{kind}" for one in noted[weight])
                  for name, target in targets[block].items() if (weight := f"{target.path}.weight") in noted
                  for kind in ("A", "B", "magnitude_change")}
    alike_now = alike_by_kind({block: (model.alike.get(block, block), tuple(targets[block]), block == last)
                               for block in model.blocks})
    own = model.initial is None
    blocks = {block: partial(_build_adapted, build, block, targets[block], form, trains=block == last,
                             seed=seed if own else None) for block, build in model.blocks.items()}
    return replace(model, blocks=blocks, alike=alike_now, quantized=_quantized_weights(model, kinds, lora),
                   initial=None if model.initial is None else partial(_initial, model.initial, fan_in))


def _quantized_weights(model: Model, kinds: Mapping[str, Mapping[str, _Target]], lora: Lora) -> dict[str, str]:
    """`Model.quantized`: the weights of all linear layers whose number of inputs is a multiple of a quantization block,
    except those of the last block, which is the head, and tied weights."""
    if lora.base_format == "precision":
        return {}
    check_available(lora.base_format)
    tied = {name for group in model.tied for name in group}
    names = [f"{_join_name(block, target.path)}.weight" for block in list(model.blocks)[:-1]
             for target in kinds[model.alike.get(block, block)].values() if target.in_features % BLOCK == 0]
    found: dict[str, str] = {name: lora.base_format for name in names if name not in tied}
    if not found:
        raise ConfigError(f"applies to no layer: no linear layer before the head has a multiple of {BLOCK} inputs",
                          code="quantization-without-layer", where="lora.base-format", value=lora.base_format,
                          remedy="Leave it out.")
    return found


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return re.search(r"(^|\.)lora\.(A|B|magnitude_change)$", parameter) is not None


def _join_name(block: str, name: str) -> str:
    return f"{block}.{name}" if name else block


def _target_layers(names: Sequence[str], lora: Lora) -> Iterator[str]:
    """The layers that get adapters, among all linear layers of a model."""
    patterns = AUTO_TARGETS if lora.targets == "auto" else lora.targets
    found: set[str] = set()
    for pattern in patterns:
        matched = _matching(pattern, names) or _matching(_NAMES_THERE.get(pattern, pattern), names)
        if not matched and lora.targets != "auto":
            raise _no_match(pattern, names)
        found |= matched
    if not found:
        raise _no_match("auto" if lora.targets == "auto" else "", names)
    yield from (name for name in names if name in found)


def _matching(pattern: str, names: Sequence[str]) -> set[str]:
    return {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}


def _no_match(pattern: str, names: Sequence[str]) -> ConfigError:
    shown = list(dict.fromkeys(re.sub(r"(^|\.)(layer)?\d+(?=\.|$)", r"\1\2*", name) for name in names))
    more = f" and {len(shown) - _MOST_TOLD} more" if len(shown) > _MOST_TOLD else ""
    return ConfigError("matches no linear layer of the model" if pattern else "names no layer",
                       code="lora-targets-without-match", where="lora.targets", value=pattern,
                       remedy=f"Choose among {', '.join(shown[:_MOST_TOLD])}{more}, or ends of these "
                              "names." if shown else "Choose a model with linear layers.")


def _linear_layers(block: nn.Module) -> dict[str, _Target]:
    """Name within the block -> each linear layer that can have an adapter, in the order of the block's modules."""
    found: dict[str, _Target] = {}
    left_out: set[nn.Module] = set()
    for path, module in block.named_modules():
        match module:
            case SharedInputLinear():
                for name, features in module.outputs.items():
                    left_out.add(module.get_submodule(name))
                    found[_join_name(path, name)] = _Target(
                        path=_join_name(path, name), in_features=module.in_features, out_features=features,
                        takes="stream", gives="inner", units=module.units[name])
            case Linear():
                target = _Target(path=path, in_features=module.in_features, out_features=module.out_features,
                                 takes=module.takes, gives=module.gives)
                for part in module.parts:
                    found[_join_name(path, part)] = replace(target, part=part,
                                                            out_features=module.out_features // len(module.parts))
                if not module.parts:
                    found[path] = target
            case nn.MultiheadAttention():  # reads its layer's weight without calling the layer
                left_out.update(module.modules())
            case nn.Linear() if module not in left_out and not isinstance(module, Layer):
                found[path] = _Target(path=path, in_features=module.in_features, out_features=module.out_features)
    return found


def _head_layers(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if isinstance(module, nn.Linear)]


def _check_head(model: Model, last: str) -> None:
    """Raise a ModelError for a head without linear layers, or with a parameter tied to another block."""
    with meta_device():
        block = model.blocks[last]()
    if not _head_layers(block):
        raise ModelError("has no linear layer to train", code="head-without-linear", where=f"block {last}",
                         remedy="Set `--lora.train-head false`.")
    for group in model.tied:
        if tied := next((name for name in group if name.startswith(f"{last}.")), None):
            raise ModelError(f"is tied to {next(name for name in group if name != tied)}, which is frozen",
                             code="head-tied-to-frozen", where=f"parameter {tied}", value="lora.train-head true",
                             remedy="Set `--lora.train-head false`.")


def _build_adapted(build: Callable[[], nn.Module], block: str, targets: Mapping[str, _Target], form: AdapterForm, *,
                   trains: bool, seed: int | None) -> nn.Module:
    """The block with its adapters, which an already built block has already.

    seed: sets the adapters' initial values. trains: whether its linear layers are trained.
    """
    module = build()
    for name, target in targets.items():
        layer = module.get_submodule(target.path)
        if "lora" in module.get_submodule(name)._modules if not target.part else target.part in layer._modules:
            continue
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        adapter = Adapter(weight.detach(), target.in_features, target.out_features, form, takes=target.takes,
                          gives=target.gives, units=target.units)
        if seed is not None and not weight.is_meta:
            with torch.device("cpu"):  # regardless of the device of a builder's context
                for kind, parameter in adapter.named_parameters():
                    full = f"{_join_name(block, name)}.lora.{kind}"
                    initialise(parameter, full, _start(full, target.in_features), seed)
        add_adapter(layer, adapter.train(layer.training), target.part)
    trained = {parameter for layer in _head_layers(module) for parameter in layer.parameters()} if trains else set()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name) or parameter in trained)
    return module


def _initial(before: Callable[[str], Initial], fan_in: Mapping[str, int], name: str) -> Initial:
    return _start(name, fan_in.get(name, 0)) if is_adapter(name) else before(name)


def _start(name: str, fan_in: int) -> Initial:
    """Kaiming uniform initialization with a = sqrt(5) for A, as in PEFT; zeros for the others."""
    return Initial("uniform", fan_in ** -0.5) if name.endswith(".A") else Initial("constant", 0.0)
