"""The parameters that an engine has taken from its blocks, and changes to them in the blocks since.

    module.weight.data = x                              the same parameter with other memory
    module.load_state_dict(state, assign=True)          another parameter in its place
    module.weight = nn.Parameter(x)

    model[0] = nn.Linear(8, 8)                          another block in the user's container

Gradients, optimizer states and checkpoints belong to the original parameters. A replacement would never train, so its
value is copied into the original, which takes its place again. A replaced block is refused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ranvier.errors import ModelError
from ranvier.optim.step import refuse_closures
from ranvier.originals.object_contents import tensor_under
from ranvier.originals.same_memory import ViewsOfParameters, extent
from ranvier.originals.stand_in_tensors import StandIns
from ranvier.pipeline.trained_elsewhere import gradient_state
from ranvier.plan.reached_objects import CodeReach, tensors_in

BATCHES_BY_VALUE = 2
_WITH_NORM = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_WIDENED = 1 << 22
"""Number of elements that a norm widens to fp64 at a time, in unpredicted memory."""


class HeldParameters:
    """Checks the parameters of a rank's blocks. blocks: (number in the model, name, module) of each block, when all
    parameters are in place. container: the user's module that contains them; it is not kept alive. replicas: number of
    ranks that compute the same blocks for other samples, and update them together. others: the blocks of other ranks.
    owners: name of a parameter -> that of its tie's owner."""

    def __init__(self, blocks: Sequence[tuple[int, str, nn.Module]], container: nn.Module | None = None, *,
                 replicas: int = 1, others: Sequence[tuple[str, ref[nn.Module]]] = (),
                 owners: Mapping[str, str] | None = None) -> None:
        self._blocks, self._replicas, self._others, self._owners = blocks, replicas, others, owners or {}
        self._container = None if container is None else ref(container)
        self._names = frozenset(() if container is None else container._modules)
        self._given = {name: ref(given) for _, name, _ in blocks
                       if container is not None and (given := container._modules.get(name)) is not None}
        self._places: list[tuple[Mapping[str, object], tuple[tuple[str, object], ...]]] | None = None
        self._held = {(block, name): parameter for block, name, parameter, _ in self._block_parameters()}
        self._versions: list[int] = []
        """Version counters of the held parameters at the last `adopt`; each write in place changes them."""
        self._after_forwards: list[int] = []
        """Version counters after the last forward of the batch."""
        self._trains: list[bool] = []
        """Which of them train, at the last `adopt`."""
        self._norms: list[tuple[Tensor, Tensor]] = []
        """Norms of the held parameters with several replicas, during the first batches: writes through `parameter.data`
        do not change the version counters."""
        self._batches = 0
        self._warned = False
        for _, block, module in blocks if replicas > 1 else ():
            _refuse_renormalised(block, module, replicas)
        self._formats = [(block, name, held, (held.shape, held.dtype, held.device))
                         for (block, name), held in self._held.items()]

    def begin(self) -> None:
        """Begin a training batch, after `adopt`."""
        self._batches += 1
        by_value = self._replicas > 1 and self._batches <= BATCHES_BY_VALUE
        self._norms = with_norms(self._held.values() if by_value else ())

    def _block_parameters(self) -> Iterator[tuple[str, str, nn.Parameter, nn.Module]]:
        """Yield block, name, parameter and the block's module, for every name that a block now has for a parameter."""
        for _, block, module in self._blocks:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield block, name, parameter, module

    def _as_they_were(self) -> bool:
        """Whether all modules and parameters are in the same places as at the last look; a cheap check."""
        if self._places is None:
            return False
        for here, known in self._places:
            if len(here) != len(known):
                return False
            for name, tensor in known:
                if here.get(name) is not tensor:
                    return False
        return True

    def _look(self) -> None:
        """Remember the place of each module and parameter."""
        self._places = [(here, tuple(here.items())) for _, _, block in self._blocks for module in block.modules()
                        for here in (module._parameters, module._modules)]

    def adopt(self) -> None:
        """Take over the values of parameters that have been replaced. Raises ModelError if that is impossible: a
        parameter is gone or new, has another shape, number format or device, or has two new values; and if the model
        has other blocks."""
        container = None if self._container is None else self._container()
        if container is not None:
            for name, given in self._given.items():
                if container._modules.get(name) is not given():
                    raise _changed_error(name, "was replaced in the model, or removed from it,")
            for name in container._modules.keys() - self._names:
                raise _changed_error(name, "was added to the model")
        stand_ins = [found for _, _, block in self._blocks
                     if isinstance(found := vars(block).get("stand_ins"), StandIns)]
        for stand_in in stand_ins:
            stand_in.follow()
        if not self._as_they_were():
            self._adopt_replaced()
            self._look()
        buffers: dict[tuple[nn.Module, str], Tensor] = {}
        for stand_in in stand_ins:
            stand_in.write_back(buffers)
        for block, name, held, known in self._formats:
            if (now := (held.shape, held.dtype, held.device)) != known:
                raise _error("parameter-form-changed", block, name,
                             f"has become {_describe(*now)}; the engine was built with {_describe(*known)}",
                             "Write a value of the same shape, number format and device, or build a new engine.")
        self._versions, self._after_forwards = [held._version for held in self._held.values()], []
        self._trains = [held.requires_grad for held in self._held.values()]

    def _adopt_replaced(self) -> None:
        replaced: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
        names = {parameter: f"{block}.{name}" for block, other in self._others if (module := other()) is not None
                 for name, parameter in module.named_parameters()}  # new ones, too
        names |= {parameter: f"{block}.{name}" for (block, name), parameter in reversed(self._held.items())}
        found = set()
        for block, name, parameter, module in list(self._block_parameters()):
            held = self._held.get((block, name))
            if held is None:
                raise _error("parameter-added", block, name,
                             "was added after the engine was built, and would not train", "Build a new engine.")
            found.add((block, name))
            if parameter is not held:
                known = names.setdefault(parameter, names[held])
                if self._owners.get(known, known) != self._owners.get(names[held], names[held]):
                    raise _error("parameter-tied-late", block, name, f"was replaced by parameter {known}, and the "
                                 "engine trains the two apart",
                                 "Tie parameters before the engine is built, or replace it by a clone.")
                if parameter.shape != held.shape:
                    raise _error("parameter-replaced-by-other-shape", block, name,
                                 f"was replaced by one of shape {tuple(parameter.shape)}, and has {tuple(held.shape)}",
                                 "Give a value of the same shape, or build a new engine.")
                if parameter.is_meta:
                    raise _error("parameter-without-values", block, name, "was replaced by one without values, on the "
                                 "meta device", "Give it values, or build a new engine.")
                other, first = replaced.setdefault(held, (f"{block}.{name}", parameter))
                if first is not parameter and not torch.equal(first.to(parameter.device), parameter):
                    raise _error("tied-parameter-replaced", block, name,
                                 f"is {other} under another name, and both were replaced by different values",
                                 "Give both the same value.")
                with torch.no_grad():
                    held.copy_(parameter)
                held.requires_grad_(parameter.requires_grad)
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, held)  # an nn.LSTM keeps a list of its parameters, too
        for block, name in self._held:
            if (block, name) not in found:
                raise _error("parameter-gone", block, name, "is gone from its block since the engine was built",
                             "Build a new engine.")

    def forwards_ended(self) -> None:
        """Note versions after the last forward of a training batch, before its backward."""
        if self._replicas > 1:
            self._after_forwards = [held._version for held in self._held.values()]

    def check_kept(self) -> None:
        """Raise ModelError if a parameter has been replaced, frozen or unfrozen since `adopt`: during the batch, in a
        forward. With several replicas, also if one was written to."""
        for ((block, name), held), trained in zip(self._held.items(), self._trains, strict=True):
            if held.requires_grad != trained:
                raise _frozen_during_batch(f"{block}.{name}", held)
        if self._replicas > 1:
            self._check_written()
        if self._as_they_were():
            return
        for block, name, parameter, _ in self._block_parameters():
            if self._held.get((block, name)) is not parameter:
                raise _error("parameter-replaced-during-batch", block, name,
                             "was replaced during the batch, so it lacks the batch's gradients",
                             "Replace parameters between batches, or write into them: parameter.data.copy_(value).")

    def _check_written(self) -> None:
        """Raise ModelError if a parameter was written to in a backward, by a hook that has only this replica's
        gradient; warn, once, if it was written to before the backward, as by a forward whose change may depend on the
        parameter alone."""
        rewritten = set(changed_norms(self._norms))
        before_and_after = zip(self._versions, self._after_forwards or self._versions, strict=True)
        for ((block, name), held), (before, after) in zip(self._held.items(), before_and_after, strict=True):
            if held._version != after:
                raise _error("parameter-changed-in-backward", block, name,
                             f"was changed in place in a backward, by each of {self._replicas} replicas separately",
                             "Give the engine the optimizer, which updates from the gradients of all replicas: "
                             "Engine(optimizer=...), or Optim(update_in_backward=True) for its memory.")
            if (before != after or held in rewritten) and not self._warned:
                self._warned = True
                warnings.warn(
                    f"parameter {block}.{name} was changed in place during the batch, by each of {self._replicas} "
                    "replicas separately: they diverge unless the change depends on nothing but the "
                    "parameter, as a clamp does. The guard's compare_every compares them", stacklevel=7)


class ParameterChangeCheck:
    """Checks, in the first batches, the parameters and buffers of one stage: a forward must not change a parameter's
    gradient, nor freeze a parameter. While other microbatches are under way, torch notices whatever it changes, and a
    backward must not change a buffer that forwards change.

        call `note` before each forward of a training batch, and `check` when it has ended
    """

    def __init__(self, blocks: Sequence[tuple[int, str, nn.Module]]) -> None:
        self._named = {parameter: f"{block}.{name}" for _, block, module in reversed(blocks)
                       for name, parameter in module.named_parameters()}
        self._places = [(f"{block}.{path}".removesuffix("."), submodule) for _, block, module in blocks
                        for path, submodule in module.named_modules()]
        self._before: list[tuple[bool, int, int]] = []
        self._gradients: list[Tensor | None] = []
        """Kept so that no other tensor gets the identity of one of them."""
        self._buffers: dict[str, tuple[Tensor, int]] = {}
        """Name -> the buffer before the forward or backward, and its version."""
        self._forward_changes: set[str] = set()
        """Names of the buffers that a forward has changed."""
        self._values: list[tuple[Tensor, int, Tensor]] = []
        """Tensors after the first forward of the batch, with version and norm."""
        self._unnoticed: dict[str, Tensor] = {}
        """Buffers that forwards change without a new version, as batch norms of torch do."""
        self._norms: list[tuple[Tensor, Tensor]] = []
        """These buffers with their norms before the forward or backward."""

    def note_values(self) -> None:
        """Note versions and norms after the first forward of a batch."""
        buffers = (buffer for _, module in self._places for buffer in module._buffers.values() if buffer is not None)
        self._values = [(tensor, tensor._version, norm) for tensor, norm in with_norms((*self._named, *buffers))]

    def increment_versions(self, roots: Iterable[Node]) -> None:
        """Increment the version of tensors that another forward, before the first one's backward, has changed without a
        new version, as by a write through their `data`. Torch then refuses backwards that need the old values. roots:
        of the graphs of all forwards under way, including this one."""
        changed = changed_norms([(tensor, norm)
                                 for tensor, version, norm in self._values if tensor._version == version])
        self._values = []
        if changed:
            _leave_out_statistics(roots)
            torch.autograd.graph.increment_version(changed)
            places = {id(buffer): name for name, (buffer, _) in self._buffers_now().items()}
            self._unnoticed.update((places[id(tensor)], tensor) for tensor in changed if id(tensor) in places)

    def note_buffers(self) -> None:
        self._buffers = self._buffers_now()
        self._norms = with_norms(self._unnoticed.values())

    def _buffers_now(self) -> dict[str, tuple[Tensor, int]]:
        return {f"{place}.{name}": (buffer, buffer._version) for place, module in self._places
                for name, buffer in module._buffers.items() if buffer is not None and not buffer.is_inference()}

    def check_buffers(self, *, backward: bool) -> None:
        """Note the buffers that a forward has changed since `note_buffers`; raise ModelError if a backward has changed
        one of them."""
        before, self._buffers = self._buffers, {}
        changed = [name for name, (buffer, version) in self._buffers_now().items() if name in before and (
            before[name][0] is not buffer or before[name][1] != version)]
        if not backward:
            self._forward_changes.update(changed)
            return
        rewritten = set(changed_norms(self._norms))
        changed += [name for name, buffer in self._unnoticed.items() if buffer in rewritten]
        for name in changed:
            if name in self._forward_changes or name in self._unnoticed:
                raise ModelError("is changed by forwards and again by backwards, as torch.utils.checkpoint does, and "
                                 "stages run these in another order than a plain loop",
                                 code="buffer-changed-in-backward", where=f"buffer {name}",
                                 remedy="Recompute by `--memory.recompute 1` instead of torch.utils.checkpoint, or "
                                        "leave what changes the buffer out of the checkpoint.")

    def note(self) -> None:
        self._before, self._gradients = self._snapshot(), [parameter.grad for parameter in self._named]
        self.note_buffers()

    def check(self) -> None:
        self.check_buffers(backward=False)
        now = self._snapshot()
        self._gradients = []
        if now == self._before:
            return
        for (parameter, name), was, found in zip(self._named.items(), self._before, now, strict=True):
            if was[0] != found[0]:
                raise _frozen_during_batch(name, parameter)
            if was != found:
                raise ModelError("has gained or lost a gradient in a forward: by backward() or zero_grad() of a block "
                                 "or the loss, whose part the engine cannot separate from that of the batch",
                                 code="gradient-changed-in-forward", where=f"parameter {name}",
                                 remedy="Compute gradients inside a forward by torch.autograd.grad, and add what is "
                                        "to train to the loss.")

    def _snapshot(self) -> list[tuple[bool, int, int]]:
        return list(map(gradient_state, self._named))


def with_norms(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each plain tensor of real numbers with its norm, for `changed_norms`."""
    return [(tensor, _norm(tensor))
            for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in _WITH_NORM
            and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference())]


def changed_norms(before: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The tensors whose norm has changed. The host waits once for each device."""
    by_device = dict[torch.device, list[tuple[Tensor, Tensor]]]()
    for tensor, norm in before:
        by_device.setdefault(tensor.device, []).append((tensor, norm))
    found = list[Tensor]()
    for noted in by_device.values():
        was, now = torch.stack([norm for _, norm in noted]), torch.stack([_norm(tensor) for tensor, _ in noted])
        differs = ((was != now) & (was == was)).tolist()
        found += [tensor for (tensor, _), yes in zip(noted, differs, strict=True) if yes]
    return found


def _leave_out_statistics(roots: Iterable[Node]) -> None:
    """Exclude running statistics from torch's version check. Torch's batch norms save them, although the backward of a
    training forward does not read them. Torch does not compare versions of saved tensors with hooks."""
    todo = list(roots)
    seen = set(todo)
    while todo:
        node = todo.pop()
        if getattr(node, "_saved_training", False):
            for name in ("_raw_saved_running_mean", "_raw_saved_running_var"):
                if (saved := getattr(node, name, None)) is not None:
                    with suppress(RuntimeError):  # it is None, or has hooks
                        saved.register_hooks(_itself, _itself)
        following = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= following
        todo += following


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _norm(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in tensor.reshape(-1).split(_WIDENED)]
        norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _frozen_during_batch(name: str, parameter: nn.Parameter) -> ModelError:
    done = "unfrozen" if parameter.requires_grad else "frozen"
    return ModelError(f"was {done} by a forward or a backward, while other microbatches are under way",
                      code="parameter-frozen-during-batch", where=f"parameter {name}",
                      value=f"requires_grad={parameter.requires_grad}",
                      remedy="Freeze and unfreeze parameters between batches.")


def _refuse_renormalised(block: str, module: nn.Module, replicas: int) -> None:
    """Refuse embeddings with max_norm: a forward changes the rows of the table that this replica looks up."""
    for path, submodule in module.named_modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.max_norm is not None:
            raise ModelError(f"renormalizes the rows that each of {replicas} replicas looks up separately, so that "
                             "their tables would differ", code="embedding-max-norm",
                             where=f"module {block}.{path}".removesuffix("."), value=f"max_norm={submodule.max_norm}",
                             remedy="Leave max_norm out, and after each step, inside torch.no_grad(), write "
                                    "weight.copy_(weight.renorm(2, 0, max_norm)).")


def refuse_left_behind(views: ViewsOfParameters, blocks: Sequence[tuple[int, str, nn.Module]], loss: object) -> None:
    """Raise ModelError if code of these blocks, or of the loss, has a tensor or a NumPy array that no longer shares its
    parameters' memory: an optimizer has moved them."""
    tensors = {id(one): one for one in (found() for found in views.left) if one is not None}
    if not tensors and not views.has_arrays:
        return
    reach = CodeReach.from_roots([*((block, module) for _, block, module in blocks), ("loss", loss)])
    for name, value, _ in reach.found.values():
        if not isinstance(value, Tensor) and (under := tensor_under(value)) is not None and value.size and (
                not (bounds := extent(under))[0] <= value.ctypes.data < bounds[1]):
            raise ModelError("shares the memory of a parameter, which Ranvier's optimizer moves: the array would keep "
                             "old values", code="array-over-parameter", where=f"array {name}", value=value.shape,
                             remedy="Call parameter.detach().numpy() in the forward, or give the engine a torch "
                                    "optimizer, which leaves parameters where they are: Engine(optimizer=...).")
    for name, tensor in tensors_in(reach.found.values()):
        if id(tensor) in tensors:
            raise ModelError("shares the memory of parameters, but not within one whose elements are in order: "
                             "Ranvier's optimizer, which moves parameters, would leave it with their old values",
                             code="tensor-over-parameters", where=f"tensor {name}", value=tuple(tensor.shape),
                             remedy="Compute it from the parameters in the forward, or give the engine a torch "
                                    "optimizer, which leaves them where they are: Engine(optimizer=...).")


def _describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype} {tuple(shape)} on {device}"


def _changed_error(block: str, what: str) -> ModelError:
    return ModelError(f"{what} after the engine was built, which trains the original blocks", code="block-replaced",
                      where=f"block {block}", remedy="Build a new engine.")


def _error(code: str, block: str, name: str, what: str, remedy: str) -> ModelError:
    return ModelError(what, code=code, where=f"parameter {block}.{name}", remedy=remedy)


# --- the list of a rank's parameters ----------------------------------------------------------------------------------

# The parameters that one rank updates, as a list that refuses optimizers that compute gradients themselves.


class RankParameters(list[nn.Parameter]):
    """A list that refuses an optimizer that computes gradients itself, such as LBFGS."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        caller = sys._getframe(1)
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) == ("torch.optim.optimizer", "__init__"):
            refuse_closures(caller.f_locals["self"])
        return super().__iter__()
