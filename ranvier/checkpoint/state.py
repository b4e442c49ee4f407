"""State that an engine needs to resume, as pieces of the full model's state: views of live tensors, by kind, name and
box.

    kind         what                                               who writes it
    parameter    as used in computation                              one of the ranks that hold an element
    master       the copy that is updated, if formats differ         the same; with sharded states, its updater
    exp_avg ...  the optimizer's states of each element              the same
    ema          the moving average of parameters                    the same
    row_var ...  its states of a full parameter, in their shape      the rank that writes the parameter's first element
    buffer       a module's buffers that are in its state_dict       the stage's first rank
    random       torch's own generators, for modules that use them   every rank its own
    object       a program's objects with a state_dict              every rank its own (`checkpoint/objects`)

The layout defines which rank holds what, so a reader on any mesh needs only boxes of full tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ranvier.checkpoint.manifest import (
    ITEM_BYTES,
    Manifest,
    OptimizerGroup,
    Saved,
    SavedTensor,
    ScaleState,
    damaged_error,
)
from ranvier.checkpoint.user_optimizer import groups_of, saved_groups, state_on_device, take_settings
from ranvier.errors import CheckpointError, counted
from ranvier.layout import Box, Slice, index_of, whole_box
from ranvier.models.lora import is_adapter
from ranvier.optim.rules import EMA
from ranvier.pipeline.state_dict import set_extra_states

if TYPE_CHECKING:
    from ranvier.pipeline.engine import Engine

OBJECT = "object"
"""The kind of states of a program's objects (`checkpoint/objects`)."""
NO_STATES = ("parameter", "buffer", "random", OBJECT)
"""Kinds that are not optimizer states."""
EXTRA_STATE = "._extra_state"
"""Name suffix of what torch's modules return from `get_extra_state`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A box of a tensor of `shape`. tensor: of the box's shape, a view of the live tensor."""

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    @classmethod
    def from_tensor(cls, kind: str, name: str, tensor: Tensor) -> Piece:
        """A piece that is the full tensor."""
        return cls(kind=kind, name=name, shape=tuple(tensor.shape), box=whole_box(tuple(tensor.shape)), tensor=tensor)


def pieces_to_write(engine: Engine) -> list[Piece]:
    """The pieces that this rank writes: over all ranks, every element of every tensor once. CheckpointError for state
    that cannot be saved in a checkpoint."""
    own: dict[str, list[Slice]] = {}
    for owned in engine.layout.owned_slices(engine.world.rank):
        own.setdefault(owned.parameter, []).append(owned)
    pieces = [*_parameters_to_write(engine, own), *_states_to_write(engine, own), *_buffers(engine, first_only=True),
              *_random(engine)]
    for piece in pieces:
        if dtype_name(piece.tensor) not in ITEM_BYTES:
            raise CheckpointError("has a number format that checkpoints do not support",
                                  code="number-format-not-saved", where=f"{piece.kind} {piece.name}",
                                  value=dtype_name(piece.tensor),
                                  remedy=f"Keep it in one of these: {', '.join(ITEM_BYTES)}.")
    return pieces


def pieces_held(engine: Engine) -> list[Piece]:
    """All state that this rank has, also if other ranks have it, except torch's generators, which stay with their
    process."""
    layout, at = engine.layout, engine.coordinates
    ends = engine.layout.ends_on(engine.coordinates.pipeline_rank)
    pieces = [Piece(kind="parameter", name=layout[key].owner, shape=layout[key].shape,
                    box=layout.box(ends[key], at.position), tensor=parameter.detach())
              for key, parameter in engine.named_parameters().items()]
    for name, start, stop, states in _flat_states(engine):
        for kind, state in states.items():
            if kind != "master" or state.dtype is not engine.named_parameters()[name].dtype:
                pieces += _pieces(engine, kind, name, start, stop, state)
    pieces += _whole_states(engine)
    whole_ones = {name: [Slice(name, whole_box(layout[name].shape))] for name in _trained_here(engine)}
    pieces += _numbers_of_users(engine, whole_ones)
    return [*pieces, *_buffers(engine, first_only=False)]


def dtype_name(tensor: Tensor) -> str:
    """A tensor's number format as a manifest has it."""
    return str(tensor.dtype).removeprefix("torch.")


def _parameters_to_write(engine: Engine, own: Mapping[str, Sequence[Slice]]) -> Iterator[Piece]:
    parameters = engine.named_parameters()
    for name, slices in own.items():
        for piece in slices:
            for box in piece.boxes() or [piece.box]:
                yield Piece(kind="parameter", name=name, shape=engine.layout[name].shape, box=box,
                            tensor=parameters[name].detach()[index_of(box, piece.box)])


def _states_to_write(engine: Engine, own: Mapping[str, Sequence[Slice]]) -> Iterator[Piece]:
    parameters = engine.named_parameters()
    for name, start, stop, states in _flat_states(engine):
        for piece in own.get(name, ()):
            first, last = max(piece.interval[0], start), min(piece.interval[1], stop)
            if first >= last:
                continue
            for kind, state in states.items():
                if kind == "master" and state.dtype is parameters[name].dtype:
                    continue  # the same as the parameter
                yield from _pieces(engine, kind, name, first, last, state.reshape(-1)[first - start:last - start])
    yield from (found for found in _whole_states(engine) if _has_first_element(own.get(found.name, ())))
    yield from _numbers_of_users(engine, own)


def _has_first_element(slices: Sequence[Slice]) -> bool:
    """Whether these slices of a parameter have its first element, which exactly one of the ranks with a part has."""
    return any(piece.interval[0] == 0 and not any(start for start, _ in piece.box) for piece in slices)


def _whole_states(engine: Engine) -> Iterator[Piece]:
    """States with their own shape, which every rank that updates a part of the parameter has in full."""
    for part in engine.flat_optimizer.slices() if engine.flat_optimizer is not None else ():
        for kind, state in part.whole.items():
            yield Piece.from_tensor(kind, part.parameter, state)


def _flat_states(engine: Engine) -> Iterator[tuple[str, int, int, Mapping[str, Tensor]]]:
    """Name, elements [start, stop) of this rank's part of the parameter, row by row, and their states: flat, or, for a
    user's optimizer, in the parameter's shape."""
    if engine.flat_optimizer is not None:
        for part in engine.flat_optimizer.slices():
            yield part.parameter, part.start, part.stop, part.states
    elif engine.optimizer is not None:
        for name, parameter in _trained_here(engine).items():
            updated = engine.updated(parameter)
            found = {kind: state.detach() for kind, state in engine.optimizer.state.get(updated, {}).items()
                     if isinstance(state, Tensor) and state.dim()}
            if updated is not parameter:
                found["master"] = updated.detach()
            for kind, state in found.items():
                if state.shape != parameter.shape:
                    raise CheckpointError("has another shape than its parameter, so it cannot be resharded",
                                          code="state-shape-not-cut", where=f"optimizer state {kind} of {name}",
                                          value=tuple(state.shape),
                                          remedy="Save this optimizer's state_dict yourself, or use optim=.")
            yield name, 0, parameter.numel(), found


def _trained_here(engine: Engine) -> dict[str, nn.Parameter]:
    """The parameters that the user's optimizer updates on this rank."""
    owned = set(engine.parameters())
    return {name: parameter for name, parameter in engine.named_parameters().items() if parameter in owned}


def _numbers_of_users(engine: Engine, own: Mapping[str, Sequence[Slice]]) -> Iterator[Piece]:
    """States of a user's optimizer that are one number for each parameter, such as its count of steps."""
    if engine.optimizer is None:
        return
    for name, parameter in _trained_here(engine).items():
        if _has_first_element(own.get(name, ())):
            for kind, state in engine.optimizer.state.get(engine.updated(parameter), {}).items():
                if isinstance(state, (int, float)) or (isinstance(state, Tensor) and not state.dim()):
                    dtype = torch.float64 if isinstance(state, float) else None
                    yield Piece.from_tensor(kind, name, torch.as_tensor(state, dtype=dtype).detach())


def _buffers(engine: Engine, *, first_only: bool) -> Iterator[Piece]:
    at = engine.coordinates
    if first_only and not at.is_first_on_pipeline_rank:
        return
    for name, buffer in engine.named_buffers().items():
        if not isinstance(buffer, Tensor):
            raise CheckpointError("is not a tensor, so it cannot be saved in a checkpoint", code="state-not-tensor",
                                  where=f"state {name}", value=type(buffer).__name__,
                                  remedy="Keep it in a buffer, or save it yourself.")
        real = buffer.is_complex() and not name.endswith(EXTRA_STATE)
        yield Piece.from_tensor("buffer", name, torch.view_as_real(buffer) if real else buffer)


def _random(engine: Engine) -> Iterator[Piece]:
    """States of torch's generators; they are not used on a mesh of another shape."""
    for device in {"cpu", engine.world.device.type}:
        state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(engine.world.device)
        yield Piece.from_tensor("random", f"{engine.mesh}, rank {engine.world.rank}, {device}", state)


# --- reading ---------------------------------------------------------------------------------------------------------


def check_fits(engine: Engine, saved: StateSource) -> None:
    """CheckpointError if the checkpoint is of another model; the same on every rank."""
    saved = with_origins(engine, saved)
    parameters = saved.manifest.tensors.get("parameter", {})
    wanted = {parameter.name: parameter.shape for parameter in engine.layout.parameters if parameter.is_owner}
    where = f"checkpoint {saved.folder}"

    def unfit(code: str, what: str, remedy: str, value: object = None) -> CheckpointError:
        return CheckpointError(what, code=code, where=where, value=value, remedy=remedy)

    for name, shape in wanted.items():
        if name not in parameters and is_adapter(name):
            if _is_import_without_adapters(saved):
                continue  # they keep their initial values
            raise unfit("tied-parameter-not-in-checkpoint", "lacks an adapter of the model",
                        "Export the checkpoint, and start with `--model.pretrained` and the exported folder.", name)
        if name not in parameters:
            raise unfit("parameter-not-in-checkpoint", "lacks a parameter of the model", _SAME_MODEL, name)
        if parameters[name].shape != shape:
            raise unfit("checkpoint-shape", f"has {name} with the shape {parameters[name].shape}, the model with "
                        f"{shape}", _SAME_MODEL)
    tied = {parameter.name: parameter.owner for parameter in engine.layout.parameters if not parameter.is_owner}
    for name in parameters:
        if name in tied:
            raise unfit("checkpoint-untied", f"has separate weights for {name}, which this model ties to "
                        f"{tied[name]}: layers were frozen when it was written",
                        "Build the engine with as many frozen layers: Engine(frozen=...).")
        if name not in wanted:
            raise unfit("parameter-not-in-model", "has a parameter that the model lacks", _SAME_MODEL, name)
    steps = saved.manifest.optimizer_steps
    trains = engine.flat_optimizer is not None or engine.optimizer is not None
    if engine.optimizer is not None:
        saved_groups(engine.optimizer, _names_of_updated(engine), saved.manifest.optimizer_groups, where)
    written, used = saved.manifest.optimizer, optimizer_name(engine)
    if steps is None and trains and engine.flat_optimizer is None and None not in (written, used) and written != used:
        raise unfit("checkpoint-of-other-optimizer", f"was written with the optimizer {written}",
                    "Build the engine with the optimizer that it was written with.", used)
    if trains and steps != 0 and (steps is None) != (engine.flat_optimizer is None):
        was, now = ("a torch optimizer", "optim=") if steps is None else ("optim=", "a torch optimizer")
        raise unfit("checkpoint-of-other-kind-of-optimizer", f"was written by an engine with {was}, and this engine "
                    f"has {now}", "Build the engine with the kind of optimizer that it was written with.")


_SAME_MODEL = "Resume with the model settings that it was written with (its manifest.json has them all)."


def _is_import_without_adapters(saved: StateSource) -> bool:
    """Whether the checkpoint is an imported model without adapters, on which nothing has been trained."""
    return saved.manifest.optimizer_steps == 0 and not any(map(is_adapter, saved.manifest.tensors.get("parameter", {})))


class StateSource(Protocol):
    """Source of an engine's state: a checkpoint on disk (`Saved`), or other ranks."""

    manifest: Manifest

    @property
    def folder(self) -> Path | str:
        """Location of the source, for errors."""

    def tensor(self, kind: str, name: str) -> SavedTensor:
        """The entry for a tensor. CheckpointError if there is none."""

    def read(self, kind: str, name: str) -> Tensor:
        """All of a tensor, on the CPU."""

    def read_into(self, kind: str, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor to `target`, of the box's shape, immediately or when `elastic.transition` moves it."""


def _origins(engine: Engine) -> dict[str, str]:
    """Parameter that is no longer tied -> the owner of its former tie."""
    return {parameter.name: parameter.origin for parameter in engine.layout.parameters if parameter.origin is not None}


def with_origins(engine: Engine, source: StateSource) -> StateSource:
    """`source` with additional names: parameters that were still tied when it was written also have their own names."""
    saved_parameters = source.manifest.tensors.get("parameter", {})
    origins = {name: origin for name, origin in _origins(engine).items() if name not in saved_parameters
               and origin in saved_parameters}
    return _Untied(source, origins) if origins else source


class _Untied:
    """A source with further names of its parameters and their states. origins: further name -> name in the source."""

    def __init__(self, source: StateSource, origins: Mapping[str, str]) -> None:
        self._source, self._origins = source, origins
        manifest = source.manifest
        self.manifest = replace(
            manifest, frozen=(*manifest.frozen, *(name for name, origin in origins.items()
                                                  if origin in manifest.frozen)),
            tensors={kind: {**tensors, **{name: tensors[origin] for name, origin in origins.items()
                                          if origin in tensors}} for kind, tensors in manifest.tensors.items()})

    @property
    def folder(self) -> Path | str:
        return self._source.folder

    def tensor(self, kind: str, name: str) -> SavedTensor:
        return self._source.tensor(kind, self._origins.get(name, name))

    def read(self, kind: str, name: str) -> Tensor:
        return self._source.read(kind, self._origins.get(name, name))

    def read_into(self, kind: str, name: str, box: Box, target: Tensor) -> None:
        self._source.read_into(kind, self._origins.get(name, name), box, target)


def load(engine: Engine, saved: Saved) -> None:
    """Load this rank's part of the checkpoint. CheckpointError if the checkpoint lacks something."""
    check_fits(engine, saved)
    saved_buffers, buffers = saved.manifest.tensors.get("buffer", {}), engine.named_buffers()
    own_names = {name for name in saved_buffers if _block_of(engine, name) in (None, *engine.blocks)}
    for name in sorted(own_names ^ buffers.keys()):
        what = (f"lacks the model's buffer {name}" if name in buffers
                else f"has the buffer {name}, and the model has none")
        raise CheckpointError(what, code="checkpoint-of-other-buffers", where=f"checkpoint {saved.folder}",
                              remedy=_SAME_MODEL)
    fill(engine, saved)
    stay = [name for name in frozen_parameters(engine) if engine.layout[name].trainable
            and name not in saved.manifest.frozen]
    if stay and engine.coordinates.is_first_on_pipeline_rank:
        warnings.warn(f"{counted(len(stay), 'parameter')} that the checkpoint {saved.folder} was training, such as "
                      f"{stay[0]}, stay frozen: unfreeze them (requires_grad_(True)) to train them on", stacklevel=4)
    set_extra_states(engine, extra_states(engine, saved))
    random = saved.manifest.tensors.get("random", {})
    for piece in _random(engine):
        if piece.name in random:
            _check_shape(saved, piece)
            state = saved.read("random", piece.name)
            try:
                if piece.name.endswith("cpu"):
                    torch.set_rng_state(state)
                else:
                    torch.cuda.set_rng_state(state, engine.world.device)
            except (RuntimeError, TypeError) as error:
                raise damaged_error("generator-state", saved.folder,
                                    f"the state of torch's generator ({piece.name}) is none: {error}") from error
    restore_counters(engine, saved.manifest)


def _block_of(engine: Engine, name: str) -> str | None:
    """The block of the model that has the buffer `name`."""
    return max((block for block in engine.block_names if name.startswith(f"{block}.")), key=len, default=None)


def extra_states(engine: Engine, source: StateSource) -> dict[str, Tensor]:
    """Tensors for the saved extra states of this rank's modules, in their saved shapes and formats, which may have
    changed since. `source` fills them; pass them to `set_extra_states` afterwards."""
    found, saved_buffers = {}, source.manifest.tensors.get("buffer", {})
    for name in (name for name in engine.named_buffers() if name.endswith(EXTRA_STATE) and name in saved_buffers):
        saved = saved_buffers[name]
        found[name] = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        source.read_into("buffer", name, whole_box(saved.shape), found[name])
    return found


def fill(engine: Engine, source: StateSource, *, freezes: bool = True) -> None:
    """Read parameters, states and buffers of this rank from `source`, except the `extra_states`. freezes: freeze the
    parameters that were not being trained there."""
    source = with_origins(engine, source)
    with torch.no_grad():
        _load_parameters(engine, source)
        for key, parameter in engine.named_parameters().items():
            if freezes and engine.layout[key].owner in source.manifest.frozen:
                parameter.requires_grad_(False)
        _load_states(engine, source)
        for piece in _buffers(engine, first_only=False):
            if piece.name in source.manifest.tensors.get("buffer", {}) and not piece.name.endswith(EXTRA_STATE):
                _check_shape(source, piece)
                source.read_into("buffer", piece.name, piece.box, piece.tensor)


def set_parameters(engine: Engine, value: Callable[[str], Tensor | None]) -> None:
    """Set parameters of this rank, and their master copies, to their boxes of full tensors, before the engine's first
    step. value: a parameter's name (of a tied group, its owner's) -> the full tensor; None leaves the parameter
    unchanged."""
    at, layout, ends = engine.coordinates, engine.layout, engine.layout.ends_on(engine.coordinates.pipeline_rank)
    with torch.no_grad():
        for key, parameter in engine.named_parameters().items():
            if (found := value(layout[key].owner)) is not None:
                parameter.copy_(found[index_of(layout.box(ends[key], at.position), whole_box(found.shape))])
        for name, start, stop, states in _flat_states(engine):
            copies = [kind for kind in ("master", EMA) if kind in states]
            if copies and (found := value(layout[name].owner)) is not None:
                for piece in (piece for kind in copies
                              for piece in _pieces(engine, kind, name, start, stop, states[kind])):
                    piece.tensor.copy_(found[index_of(piece.box, whole_box(found.shape))])
    scale = engine.loss_scale
    steps = None if engine.flat_optimizer is None else engine.flat_optimizer.steps
    engine.restore_counters(engine.steps, optimizer_steps=steps, loss_scale=None if scale is None else asdict(scale),
                            last_norm=engine.last_norm, missed_updates=missed_updates(engine))


def restore_counters(engine: Engine, manifest: Manifest) -> None:
    """Set the engine's counts to those of the manifest, after all tensors have been read. Parameters that were frozen
    and had no states start with new states now."""
    scale = manifest.loss_scale
    trained = {parameter.name for parameter in engine.layout.parameters if parameter.trainable}
    has_states = {name for kind, tensors in manifest.tensors.items() if kind not in NO_STATES and kind not in (
        "master", EMA) for name in tensors}
    missed = manifest.missed_updates | {name: manifest.optimizer_steps or 0 for name in manifest.frozen
                                        if name not in has_states}
    saved_parameters = manifest.tensors.get("parameter", {})
    missed |= {name: missed[origin] for name, origin in _origins(engine).items()
               if name not in saved_parameters and origin in missed}
    engine.restore_counters(manifest.step, optimizer_steps=manifest.optimizer_steps, last_norm=manifest.last_norm,
                            loss_scale=None if scale is None else asdict(scale),
                            missed_updates={name: steps for name, steps in missed.items() if steps and name in trained})


def _check_shape(saved: StateSource, piece: Piece) -> None:
    shape = saved.tensor(piece.kind, piece.name).shape
    if shape != piece.shape:
        raise damaged_error("saved-state-shape", saved.folder,
                            f"{piece.kind} {piece.name} should have the shape {piece.shape}", shape)


def _load_parameters(engine: Engine, saved: StateSource) -> None:
    """Load parameters; if they were saved in another number format than this run's, from the master copies, which are
    exact."""
    at, layout = engine.coordinates, engine.layout
    masters = saved.manifest.tensors.get("master", {})
    ends = engine.layout.ends_on(engine.coordinates.pipeline_rank)
    for key, parameter in engine.named_parameters().items():
        name, box = layout[key].owner, layout.box(ends[key], at.position)
        if is_adapter(name) and _is_import_without_adapters(saved):
            continue
        same = saved.tensor("parameter", name).dtype == dtype_name(parameter)
        saved.read_into("master" if name in masters and not same else "parameter", name, box, parameter.detach())


def _load_states(engine: Engine, saved: StateSource) -> None:
    """Load the optimizer's states. A checkpoint from before the first update may have none."""
    tensors, frozen = saved.manifest.tensors, set(saved.manifest.frozen)
    fresh = saved.manifest.optimizer_steps == 0
    _restore_user_optimizer(engine, saved)
    for name, start, stop, states in _flat_states(engine):
        if is_adapter(name) and _is_import_without_adapters(saved):
            continue
        for kind, state in states.items():
            source = kind
            if kind in ("master", EMA) and name not in tensors.get(kind, {}):  # an average starts from the parameters
                source = "master" if name in tensors.get("master", {}) else "parameter"
            if name not in tensors.get(source, {}) and (fresh or name in frozen):
                state.zero_()
                continue
            for piece in _pieces(engine, kind, name, start, stop, state):
                saved.read_into(source, name, piece.box, piece.tensor)
    for piece in _whole_states(engine):
        if piece.name not in tensors.get(piece.kind, {}) and (fresh or piece.name in frozen):
            piece.tensor.zero_()
            continue
        _check_shape(saved, piece)
        saved.read_into(piece.kind, piece.name, piece.box, piece.tensor)


def _names_of_updated(engine: Engine) -> dict[nn.Parameter, str]:
    """Tensor that the user's optimizer updates -> the parameter's name."""
    return {engine.updated(parameter): name for name, parameter in _trained_here(engine).items()}


def optimizer_groups(engine: Engine) -> list[OptimizerGroup]:
    """The groups of a user's optimizer on this rank. CheckpointError for state that cannot be saved in a checkpoint."""
    engine.unsaved.warn()
    return [] if engine.optimizer is None else groups_of(engine.optimizer, _names_of_updated(engine))


def _restore_user_optimizer(engine: Engine, saved: StateSource) -> None:
    """Give a user's optimizer the settings, and tensors for the states, that it had when the checkpoint was written."""
    if engine.optimizer is None:
        return
    numbers: dict[nn.Parameter, Sequence[str]] = {}
    for group, known in saved_groups(engine.optimizer, _names_of_updated(engine), saved.manifest.optimizer_groups,
                                     f"checkpoint {saved.folder}"):
        take_settings(group, known.settings)
        numbers |= dict.fromkeys(group["params"], known.numbers)
    group_of = {parameter: group for group in engine.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in _trained_here(engine).items():
        updated = engine.updated(parameter)
        if not updated.numel():
            continue  # no rank has states for it
        engine.optimizer.state.pop(updated, None)
        usual = saved.manifest.tensors.get("master", {}).get(name, saved.tensor("parameter", name)).dtype
        for kind, tensors in saved.manifest.tensors.items():
            if kind in NO_STATES or kind == "master" or name not in tensors:
                continue
            if tensors[name].shape:
                dtype = tensors[name].dtype
                engine.optimizer.state[updated][kind] = torch.zeros_like(updated, dtype=None if dtype == usual else
                                                                         getattr(torch, dtype))
            else:
                value = saved.read(kind, name)
                engine.optimizer.state[updated][kind] = value.item() if kind in numbers.get(updated, ()) else \
                    state_on_device(kind, value, updated, group_of.get(updated, {}))


def numbers(engine: Engine) -> dict[str, Any]:
    """The manifest's fields about this engine, the same on every rank."""
    scale = engine.loss_scale
    return {"step": engine.steps, "optimizer": optimizer_name(engine),
            "optimizer_steps": engine.flat_optimizer and engine.flat_optimizer.steps, "last_norm": engine.last_norm,
            "loss_scale": None if scale is None else ScaleState(**asdict(scale))}


def optimizer_name(engine: Engine) -> str | None:
    """The class name of a user's optimizer; None if this rank has none, or it is Ranvier's own."""
    return None if engine.optimizer is None else type(engine.optimizer).__name__


def missed_updates(engine: Engine) -> dict[str, int]:
    """Parameters of this rank that have missed updates of Ranvier's optimizer, and how many."""
    return {} if engine.flat_optimizer is None else engine.flat_optimizer.missed_updates


def frozen_parameters(engine: Engine) -> list[str]:
    """The parameters of this rank that are not being trained."""
    return sorted({engine.layout[key].owner for key, parameter in engine.named_parameters().items()
                   if not parameter.requires_grad})


# --- boxes -----------------------------------------------------------------------------------------------------------


def _pieces(engine: Engine, kind: str, name: str, start: int, stop: int, state: Tensor) -> Iterator[Piece]:
    """Elements [start, stop) of this rank's part of a parameter, as boxes of the full parameter, with views of `state`:
    flat, or the full part in its shape."""
    shape, at = engine.layout[name].shape, 0
    held = engine.layout.box(engine.layout[name], engine.coordinates.position)
    for box in Slice(name, held, (start, stop)).boxes():
        sizes = [last - first for first, last in box]
        size = torch.Size(sizes).numel()
        yield Piece(kind=kind, name=name, shape=shape, box=box,
                    tensor=state if list(state.shape) == sizes else state[at:at + size].view(sizes))
        at += size
