"""A transformers model as blocks, cut at its own list of layers, without a family written for it.

    embedding -> layer0 -> layer1 -> ... -> head

`embedding` runs the model's own forward up to the first layer, and records the arguments of each layer; a layer's block
calls that layer; `head` runs the forward after the last layer. Both ends are the model itself with replacements for
modules that they do not hold, so masks, positions and outputs are made by the model's own code.

The carried state is a dict: hidden states, other tensors that layers are called with (masks, rotary tables), and the
integer inputs, which the end of some models reads.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ranvier.arguments import check_arguments
from ranvier.block import HOOKS, KEPT_IN_FP32, Loss, Model, State, as_model, contents_besides_modules, keep_names
from ranvier.errors import ModelError
from ranvier.models.decoding_cache import WholeTexts
from ranvier.models.stand_ins import REMEDY, Injector, LaterModule, ModuleElsewhere, Recorder, StandIn, shapes_of
from ranvier.originals.stand_in_tensors import StandIns
from ranvier.tensor.split.loss import ClassLoss, NextTokenLoss

TOLERANCE = 1e-4
"""Largest difference of the blocks' output, as a share of the largest output. Both run the same operations."""
_INPUT, _SIZES = "input ", "sizes of "


def from_transformers(model: nn.Module, sample: Mapping[str, Any] | Tensor | None = None, *,
                      loss: Loss | None = None, output: Callable[[Any], State] | None = None) -> Model:
    """The blocks of a Hugging Face decoder, encoder or vision model, cut at its own list of layers
    (such as `model.model.layers`), for data and pipeline parallelism. Parameters stay the model's own.

        model = ranvier.from_transformers(AutoModelForCausalLM.from_pretrained("folder").train())
        engine = ranvier.Engine(model, world, optimizer=...)

    The blocks are run on one sample, and refused if their output differs from the model's.

    Args:
        model: on one device. Blocks train in the modes that its modules are in: `from_pretrained` of transformers
            returns models in evaluation mode, which train without dropout until `model.train()`.
        sample: inputs of two or more samples: the main input, or named inputs as the model's forward takes them. By
            default tokens or images of the sizes in `model.config`. Microbatches have the same names.
        loss: by default that of the next token for ...ForCausalLM and ...LMHeadModel, whose targets are the inputs
            shifted by one token (transformers shifts labels itself: `functional.pad(labels[:, 1:], (0, 1),
            value=-100)`), and cross-entropy for ...ForSequenceClassification and ...ForImageClassification whose
            samples have one class each; targets of -100 do not count.
        output: extracts the carried state for the loss from the model's output; by default its logits, or the dict of
            its start_logits and end_logits, or its last_hidden_state.

    Raises a ModelError that names the module for a model that cannot be cut.
    """
    check_arguments(from_transformers, locals())
    modules = transformer_blocks(model, sample, output=output)
    made = as_model(modules, loss or _loss(model))
    return replace(made, layers=tuple((name,) for name in modules if name.startswith("layer")))


def transformer_blocks(model: nn.Module, sample: Mapping[str, Any] | Tensor | None = None, *,
                       output: Callable[[Any], State] | None = None) -> dict[str, nn.Module]:
    """The blocks of `from_transformers` as modules by name."""
    inputs = _sample(model) if sample is None else (
        {_main_input(model): sample} if isinstance(sample, Tensor) else dict(sample))
    take = output or _output
    with _evaluation_mode(model):
        plan = _plan(model, inputs)
        expected = take(model(**inputs, **plan.options))
        modules = _modules(model, plan, take)
        found = _run(modules, inputs)
    for module in modules.values():
        if isinstance(module, (_ForwardToLayers, _ForwardAfterLayers)):
            module.stand_ins.follow_modes()
            for part in module.modules():
                if isinstance(part, ModuleElsewhere):
                    part.knows = True
    keep_names(model, modules.values())  # after the run, in which stand-ins tie what is read of their modules
    _compare(model, expected, found)
    return modules


# --- what the model does with a sample -------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Plan:
    """Record of the model's run on the sample.

    path: of the list of layers. count: of layers. calls: the call of each layer. tuples: number of values that each
    layer returned, 0 for a bare tensor. phases: module outside the layers -> "before" or "after" them. outputs: module
    before the layers -> its output. options: arguments of the model that switch its cache off.
    """

    path: str
    count: int
    inputs: dict[str, Tensor]
    options: dict[str, object]
    tuples: list[int]
    phases: dict[str, str]
    outputs: dict[str, object]
    calls: list[_Call] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """The arguments of a layer, with names instead of tensors."""

    leaves: tuple[object, ...]
    spec: TreeSpec

    @property
    def names(self) -> set[str]:
        """Names of the tensors that the layer takes."""
        return {leaf.name for leaf in self.leaves if isinstance(leaf, _Slot)}


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor of the carried state."""

    name: str


def _plan(model: nn.Module, inputs: dict[str, Tensor]) -> _Plan:
    """Run the model once, find its list of layers, and record the modules that run before and after them."""
    arguments = inspect.signature(model.forward).parameters
    takes = "use_cache" in arguments or any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    options: dict[str, object] = {"use_cache": False} if hasattr(_text_config(model), "use_cache") and takes else {}
    lists = {name: len(module) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList) and not contents_besides_modules(module) and len(module)
             and all(any(True for _ in layer.parameters()) for layer in module)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)]
    names = dict.fromkeys(name for path in outer
                          for name in (*_beside(model, path), *(f"{path}.{index}" for index in range(lists[path]))))
    events, outputs = _run_watched(model, inputs, options, names)
    called = {path: [int(name.rpartition(".")[2]) for name, has_ended in events
                     if not has_ended and name.rpartition(".")[0] == path] for path in outer}
    chains = [path for path in outer if called[path]]
    for path in chains:
        if called[path] != list(range(lists[path])):
            raise _refusal("layers-not-in-order", model,
                           f"does not run its layers once each, in order, but {called[path][:8]}", path)
    if len(chains) != 1:
        raise _refusal("no-list-of-layers", model,
                       "has no list of layers" if not chains else f"has {len(chains)} lists of layers "
                       f"({', '.join(chains)}), and a pipeline has one", type(model).__name__)
    path, = chains
    for ancestor in _ancestors(path):
        if any(getattr(model.get_submodule(ancestor), hooks) for hooks in HOOKS):
            raise _refusal("model-with-hooks", model, "has hooks, which would run in two blocks",
                           ancestor or type(model).__name__,
                           "Remove them, or register them on modules that are in one block.")
    returned = [outputs[f"{path}.{index}"] for index in range(lists[path])]
    return _Plan(path=path, count=lists[path], inputs=inputs, options=options, outputs=outputs,
                 tuples=[len(one) if isinstance(one, (tuple, list)) else 0 for one in returned],
                 phases=_phases(model, path, events))


def _run_watched(model: nn.Module, inputs: Mapping[str, Tensor], options: Mapping[str, object],
                 names: Iterable[str]) -> tuple[list[tuple[str, bool]], dict[str, object]]:
    """Run the model, and record when each of the modules `names` begins and ends, in order as (name, has ended), and
    its first output, with shapes instead of tensors."""
    events: list[tuple[str, bool]] = []
    outputs: dict[str, object] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def ended(_module: nn.Module, _args: object, output: object) -> None:
            events.append((name, True))
            outputs.setdefault(name, shapes_of(output))

        handles.append(module.register_forward_pre_hook(lambda *_: events.append((name, False))))
        handles.append(module.register_forward_hook(ended))

    for name in names:
        watch(name, model.get_submodule(name))
    try:
        with torch.no_grad():
            model(**inputs, **options)
    except Exception as error:
        raise _refusal("model-cannot-run-on-sample", model, f"cannot be run on the sample: {error}",
                       "the sample", "Pass inputs that it runs on, from_transformers(model, sample=...), or a list of "
                       "modules to ranvier.Engine (docs/extending.md).") from error
    finally:
        for handle in handles:
            handle.remove()
    return events, outputs


def _phases(model: nn.Module, path: str, events: Sequence[tuple[str, bool]]) -> dict[str, str]:
    """Module outside the layers -> "before" or "after" them; "both" for those without parameters."""
    seen: dict[str, set[str]] = {name: set() for name in _beside(model, path)}
    phase, last = "before", [name for name, _ in events if name.rpartition(".")[0] == path][-1]
    for name, has_ended in events:
        if name.rpartition(".")[0] == path:
            phase = "layers" if not has_ended else "after" if name == last else "between"
        elif name in seen and not has_ended:
            seen[name].add(phase)
    found = {}
    for name, phases in seen.items():
        if not any(True for _ in model.get_submodule(name).parameters()):
            found[name] = "both"
        elif len(phases) > 1 or "between" in phases:
            raise _refusal("module-in-two-blocks", model,
                           f"runs {' and '.join(sorted(phases))} the layers, and a block is in one place", name)
        else:
            found[name], = phases or {"after"}
    return found


def _ancestors(path: str) -> list[str]:
    """Paths of the modules around the list of layers at `path`, from the model itself."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _beside(model: nn.Module, path: str) -> Iterator[str]:
    """The children of the modules around the list of layers at `path`, except those on the path."""
    ancestors = _ancestors(path)
    for ancestor in ancestors:
        for name, _ in model.get_submodule(ancestor).named_children():
            child = f"{ancestor}.{name}" if ancestor else name
            if child != path and child not in ancestors:
                yield child


# --- blocks ----------------------------------------------------------------------------------------------------------


def _modules(model: nn.Module, plan: _Plan, take: Callable[[Any], State]) -> dict[str, nn.Module]:
    """All blocks. The first one is run here, to record the arguments of layers."""
    first = _ForwardToLayers(model, plan)
    with torch.no_grad(), _running_alone("embedding"):
        first.learn()
    layers = list(model.get_submodule(plan.path).children())
    modules: dict[str, nn.Module] = {"embedding": first}
    kept = {name: getattr(model, name, None) for name in KEPT_IN_FP32}
    for index, layer in enumerate(layers):
        later = set().union(*(call.names for call in plan.calls[index + 1:]))
        modules[f"layer{index}"] = _Layer(layer, plan.calls[index], later, kept)
    modules["head"] = _ForwardAfterLayers(model, plan, take)
    return modules


class _LastLayerReached(Exception):
    """The forward has called the last layer."""


class _ForwardToLayers(WholeTexts):
    """The model's forward up to its layers: named inputs, or the main one, to the carried state."""

    def __init__(self, model: nn.Module, plan: _Plan) -> None:
        super().__init__()
        self.main_input = _main_input(model)
        self._calls, self._inputs, self._options = plan.calls, plan.inputs, plan.options
        self.num_layers = plan.count
        layers = model.get_submodule(plan.path).children()
        recorders = [Recorder(layer, f"{plan.path}.{number}", self.record, plan.tuples[number])
                     for number, layer in enumerate(layers)]
        self.model = _copy_around_layers(model, plan, {name: LaterModule(model.get_submodule(name), name)
                                                       for name, phase in plan.phases.items() if phase == "after"},
                                         recorders, has_parameters=True)
        self.stand_ins = _stand_ins(model, plan, self.model)
        self._called: list[tuple[tuple[object, ...], TreeSpec]] = []
        self._hidden: Tensor | None = None

    def learn(self) -> None:
        """Record the arguments of each layer for the sample."""
        self._forward(self._inputs)
        names: dict[int, str] = {id(self._hidden): "hidden"}
        for leaves, spec in self._called:
            slots: list[object] = []
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    slots.append(_Slot(names.setdefault(id(leaf), f"argument {len(names) - 1}")))
                else:
                    slots.append(leaf)
            self._calls.append(_Call(leaves=tuple(slots), spec=spec))
        self._called, self._hidden = [], None

    def record(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
        """Record the arguments of a call of the next layer, and return the hidden states; `_LastLayerReached` at the
        last one."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or (self._hidden is not None and hidden is not self._hidden):
            raise ModelError("changes its hidden states between two layers",
                             code="hidden-states-changed-between-layers", where=f"layer {len(self._called)}",
                             remedy=REMEDY)
        self._hidden = hidden
        leaves, spec = tree_flatten((args, kwargs))
        self._called.append((tuple(leaves), spec))
        if len(self._called) == self.num_layers:
            raise _LastLayerReached
        return hidden

    def _forward(self, inputs: dict[str, Tensor]) -> None:
        self._called, self._hidden = [], None
        try:
            with _conditions(next(iter(inputs.values()))), _making_masks("attention_mask" in inputs):
                self.model(**inputs, **self._options)
        except _LastLayerReached:
            return
        raise ModelError("did not call its layers", code="layers-not-called", where="embedding", remedy=REMEDY)

    def forward(self, inputs: State) -> dict[str, Tensor]:
        named = {self.main_input: inputs} if isinstance(inputs, Tensor) else dict(inputs)
        self._forward(named)
        state: dict[str, Tensor] = {}
        for index, (call, (leaves, spec)) in enumerate(zip(self._calls, self._called, strict=True)):
            if spec != call.spec:
                raise _other_call("layer-arguments-differ", index, "is called with other arguments than for the sample")
            for slot, leaf in zip(call.leaves, leaves, strict=True):
                if isinstance(slot, _Slot) != isinstance(leaf, Tensor):
                    raise _other_call("layer-tensors-differ", index, "is called with other tensors than for the sample",
                                      **({"remedy": _OF_WINDOWS} if slot is None or leaf is None else {}))
                if isinstance(slot, _Slot) and isinstance(leaf, Tensor):
                    if state.setdefault(slot.name, leaf) is not leaf:
                        raise _other_call("layer-tensors-one-for-sample", index, "is called with two tensors, which "
                                          "were the same tensor for the sample", slot.name,
                                          "Give from_transformers a sample for which they differ.")
                elif leaf is not slot and leaf != slot:
                    raise _other_call("layer-value-differs", index, "is called with a different value than for the "
                                      "sample, which its block has stored", f"{leaf!r}, and {slot!r} for the sample",
                                      "Set model.config.use_cache = False; its forward has no argument for it."
                                      if "Cache" in type(leaf).__name__ else
                                      "Give microbatches for which it is the same, such as of the sample's length, or "
                                      "write the model's blocks by hand (docs/extending.md).")
        self._called, self._hidden = [], None
        for name, value in named.items():
            if value.is_floating_point():  # the head reads at most its sizes
                state[f"{_SIZES}{name}"] = value.new_empty(len(value), 0, *value.shape[1:])
            else:
                state[f"{_INPUT}{name}"] = value
        return state


_OF_WINDOWS = ('Set "attn_implementation": "eager" in config.json, or in from_pretrained: otherwise transformers makes '
               "the mask of a sliding window for sequences of its length alone. Or give from_transformers a sample "
               "with the inputs that microbatches have.")


def _other_call(code: str, layer: int, what: str, value: str | None = None,
                remedy: str = "Give from_transformers a sample with the inputs that microbatches have.") -> ModelError:
    """The error for a layer that is called differently than for the sample."""
    return ModelError(what, code=code, where=f"layer{layer}", value=value, remedy=remedy)


class _Layer(nn.Module):
    """One layer: replaces the hidden states in the carried state. later: tensors that later layers take. kept: the
    model's attributes `KEPT_IN_FP32`."""

    def __init__(self, layer: nn.Module, call: _Call, later: set[str], kept: Mapping[str, object]) -> None:
        super().__init__()
        self.layer = layer
        self._call, self._later = call, later
        for name in KEPT_IN_FP32:
            setattr(self, name, kept.get(name))

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = [state[leaf.name] if isinstance(leaf, _Slot) else leaf for leaf in self._call.leaves]
        args, kwargs = tree_unflatten(leaves, self._call.spec)
        with _conditions(state["hidden"]):
            output = self.layer(*args, **kwargs)
        kept = {name: value for name, value in state.items()
                if name in self._later or name.startswith((_INPUT, _SIZES))}
        return kept | {"hidden": output[0] if isinstance(output, (tuple, list)) else output}


class _ForwardAfterLayers(nn.Module):
    """The model's forward after its layers: the carried state to the result of `take` for the model's output."""

    def __init__(self, model: nn.Module, plan: _Plan, take: Callable[[Any], State]) -> None:
        super().__init__()
        self._take, self._options = take, plan.options
        self._state: list[Tensor] = []
        stand_ins: dict[str, nn.Module] = {
            name: StandIn(model.get_submodule(name), name, plan.outputs.get(name), plan.outputs[f"{plan.path}.0"],
                          self._state, len(next(iter(plan.inputs.values()))))
            for name, phase in plan.phases.items() if phase == "before"}
        injectors = [Injector(layer, f"{plan.path}.{number}", self._state, plan.tuples[number])
                     for number, layer in enumerate(model.get_submodule(plan.path).children())]
        self.model = _copy_around_layers(model, plan, stand_ins, injectors, has_parameters=False)
        self.stand_ins = _stand_ins(model, plan, self.model)

    def forward(self, state: dict[str, Tensor]) -> State:
        hidden = state["hidden"]
        inputs = {name.removeprefix(_INPUT): value for name, value in state.items() if name.startswith(_INPUT)}
        inputs |= {name.removeprefix(_SIZES): value.new_full((), torch.nan).expand(len(value), *value.shape[2:])
                   for name, value in state.items() if name.startswith(_SIZES)}
        self._state[:] = [hidden]
        try:
            with _conditions(hidden), _running_alone("head",
                                                     AttributeError):  # a parameter that only training reads
                return self._take(self.model(**inputs, **self._options))
        finally:
            self._state.clear()


class _NoValues(TorchFunctionMode):
    """A mode for the meta device, which has no values: conditions on values are true, such as that no sample is padded
    or packed; and products of experts, which torch supports there for bf16 only, accept other dtypes, too."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if getattr(func, "__name__", "").endswith("grouped_mm") and args[0].is_meta:
            halves = [arg.bfloat16() if arg.is_floating_point() else arg for arg in args]
            return func(*halves, **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


_MAKES_MASKS: ContextVar[bool] = ContextVar("_MAKES_MASKS", default=False)


@contextmanager
def _making_masks(makes: bool) -> Iterator[None]:
    """Inside, if `makes`, transformers makes its masks also from padding masks that hide nothing. Otherwise it would
    call the layers of such microbatches without a mask, and those of others with a mask."""
    masks = sys.modules.get("transformers.masking_utils")
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "fast_all") if makes else ():
        hides_nothing = getattr(masks, name, None)
        if hides_nothing is not None and not hasattr(hides_nothing, "__wrapped__"):
            setattr(masks, name, _unless_made(hides_nothing))
    token = _MAKES_MASKS.set(makes)
    try:
        yield
    finally:
        _MAKES_MASKS.reset(token)


def _unless_made(hides_nothing: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hides_nothing)
    def answer(*args: object, **kwargs: object) -> Any:
        return False if _MAKES_MASKS.get() else hides_nothing(*args, **kwargs)

    return answer


def _conditions(tensor: Tensor) -> AbstractContextManager[object]:
    return _NoValues() if tensor.is_meta else nullcontext()


def _copy_around_layers(model: nn.Module, plan: _Plan, others: Mapping[str, nn.Module], layers: Sequence[nn.Module], *,
                        has_parameters: bool) -> nn.Module:
    """A copy of the modules around the layers, with `others` and `layers` in their places. All other submodules are the
    model's own. has_parameters: whether it has the own parameters of these modules."""
    copies: dict[str, nn.Module] = {}
    for ancestor in _ancestors(plan.path):
        copied = copies[ancestor] = copy.copy(model.get_submodule(ancestor))
        copied._modules = dict(copied._modules)
        copied._parameters = dict(copied._parameters) if has_parameters else {}
        copied._buffers = dict(copied._buffers)
    for path in _ancestors(plan.path)[1:]:
        parent, _, name = path.rpartition(".")
        copies[parent]._modules[name] = copies[path]
    for path, other in others.items():
        parent, _, name = path.rpartition(".")
        copies[parent]._modules[name] = other
    parent, _, name = plan.path.rpartition(".")
    copies[parent]._modules[name] = nn.ModuleList(layers)
    return copies[""]


def _stand_ins(model: nn.Module, plan: _Plan, shell: nn.Module) -> StandIns:
    return StandIns((model.get_submodule(path), shell.get_submodule(path)) for path in _ancestors(plan.path))


# --- the sample, the loss, and the comparison ------------------------------------------------------------------------


def _main_input(model: nn.Module) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


def _sample(model: nn.Module) -> dict[str, Tensor]:
    """Two samples with the sizes in the model's configuration."""
    config: Any = getattr(model, "config", None)
    name = _main_input(model)
    parameter = next(model.parameters())
    if name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        shape = (2, getattr(config, "num_channels", 3), height, width)
        values = torch.sin(torch.arange(torch.Size(shape).numel()) * 0.7919 % 100).view(shape)
        return {name: values.to(parameter.device, parameter.dtype)}
    if name == "input_ids" and hasattr(_text_config(model), "vocab_size"):
        return {name: (torch.arange(16) * 7919 % _text_config(model).vocab_size).view(2, 8).to(parameter.device)}
    raise _refusal("no-sample-of-input", model, f"takes {name}, of which no sample can be made", "the sample",
                   "Pass sample= with the inputs of two samples.")


def _text_config(model: nn.Module) -> Any:
    """The configuration of the language model in `model`; its own if it contains none or several."""
    config: Any = getattr(model, "config", None)
    with suppress(ValueError):  # there are several
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    return config


def _output(output: Any) -> State:
    if isinstance(output, Tensor):
        return output
    for names in (("logits",), ("start_logits", "end_logits"), ("last_hidden_state",)):
        if all(name in output for name in names):
            return {name: output[name] for name in names} if len(names) > 1 else output[names[0]]
    raise ModelError("is neither logits nor hidden states", code="model-output-unknown", where="output of the model",
                     value=list(output),
                     remedy="Pass output=f with f(what the model returns) -> a tensor or a dict of tensors.")


def _loss(model: nn.Module) -> Loss | None:
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return NextTokenLoss(int(_text_config(model).vocab_size))
    has_classes = name.endswith(("ForSequenceClassification", "ForImageClassification"))
    return ClassLoss() if has_classes and _kind_of_labels(model) == "single_label_classification" else None


def _kind_of_labels(model: nn.Module) -> str:
    """The configuration's problem_type, or the one that transformers uses for integer labels."""
    config: Any = getattr(model, "config", None)
    found = getattr(config, "problem_type", None)
    return str(found or ("regression" if getattr(config, "num_labels", None) == 1 else "single_label_classification"))


def _run(modules: Mapping[str, nn.Module], inputs: dict[str, Tensor]) -> State:
    state: State = inputs
    with torch.no_grad():
        for name, module in modules.items():
            with _running_alone(name):
                state = module(state)
    return state


@contextmanager
def _running_alone(block: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Inside, a block runs on the sample. Errors of the model's code, which lacks the modules of other blocks, become
    ModelErrors. kind: the class of errors to convert."""
    try:
        yield
    except ModelError:
        raise
    except kind as error:
        raise ModelError(f"cannot run on its own: {type(error).__name__}: {error}", code="block-cannot-run-alone",
                         where=f"block {block}", remedy=REMEDY) from error


def _compare(model: nn.Module, expected: State, output: State) -> None:
    theirs, ours = ({"": one} if isinstance(one, Tensor) else one for one in (expected, output))
    for name, wanted in theirs.items():
        difference = (ours[name].detach().double() - wanted.detach().double()).abs().max()
        epsilon = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
        allowed = max(TOLERANCE, 16 * epsilon) * float(wanted.detach().double().abs().max())
        if not float(difference) <= allowed:
            reads = bool(ours[name].isnan().any() and not wanted.isnan().any())
            raise _refusal("blocks-compute-otherwise", model,
                           "computes something else in blocks than uncut; the largest difference is "
                           f"{float(difference):.2g}, the largest output {float(wanted.detach().abs().max()):.2g}"
                           + ("; its head reads a floating-point input, or a module before the layers" if reads else
                              ""), type(model).__name__,
                           f"Pass labels as targets, and their loss as loss=. Or w{REMEDY[1:]}" if reads else REMEDY)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _refusal(code: str, model: nn.Module, what: str, where: str, remedy: str = REMEDY) -> ModelError:
    return ModelError(what, code=code, where=where, value=type(model).__name__, remedy=remedy)
