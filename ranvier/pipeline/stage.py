"""The blocks of one stage and what its actions compute.

    forward   runs the blocks in order and keeps, per microbatch, the leaves that entered and the edges of the graph
              that left: the outputs themselves are given to the next stage and not kept
    backward  runs autograd from those edges to those leaves
    weight    runs one deferred product

What requires a gradient depends on what arrives and on the stage's own parameters, microbatch by microbatch: a frozen
prefix keeps no graph, and a stage without trainable parameters passes gradients through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from ranvier import keyed_random
from ranvier.block import Loss, State, as_named_tensors, from_named_tensors, wrapping_hint
from ranvier.errors import ModelError, RanvierError
from ranvier.originals.read_attributes import read_attributes_of
from ranvier.pipeline import carried_tensors
from ranvier.pipeline.autocast import casting
from ranvier.pipeline.held_parameters import ParameterChangeCheck
from ranvier.pipeline.left_values import LeftValues
from ranvier.pipeline.mean_loss import warn_of_mean
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.outside_leaves import LeafCheck
from ranvier.pipeline.result import LastOutputs
from ranvier.pipeline.segment import ChangedInPlace, Segment, hook_of_all_modules
from ranvier.pipeline.trained_elsewhere import OthersParameters
from ranvier.plan.block_costs import loss_parts
from ranvier.plan.recomputation import runs_of
from ranvier.precision import is_half
from ranvier.schedule.schedule import Product
from ranvier.sent_values import place_of
from ranvier.tensor.autograd import Function, apply_outside_transforms
from ranvier.tensor.boundaries import detached_names, with_layouts
from ranvier.tensor.columns import plain
from ranvier.tensor.columns.tensor import mapped
from ranvier.tensor.deferred_linear import DeferringForwards
from ranvier.tensor.fused import Fused, use_calls
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import WeightUse
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.weight_gradients import WeightGradients, root_of

if TYPE_CHECKING:
    from ranvier.tensor.compiled import CompiledBlocks


class Outcome(NamedTuple):
    """Result of a forward: the state for the next stage, the names of its tensors that require gradients, and what a
    backward will need."""

    tensors: dict[str, Tensor]
    requires_grad: frozenset[str]
    expects_backward: bool
    deferrable_bytes: int


class _Graph(NamedTuple):
    """One microbatch between its forward and its backward."""

    leaves: dict[str, Tensor]
    roots: dict[str, GradientEdge]
    loss_dtype: torch.dtype | None


class _Enter(Function):
    """Passes a leaf to a stage's blocks: the same values, which may be changed in place as within a stage.

    always: whether a backward that returns None gives zeros, so that rows, whose samples differ, run the same layers.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, always: bool) -> Tensor:
        ctx.set_materialize_grads(always)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


_enter = apply_outside_transforms(_Enter)
_AS_THEY_ARE = nullcontext()
_IN_CACHE = "state"
"""Prefix of names of a state in a cache: the name of a single tensor or of a packed value is not allowed in a dict."""
_WATCHED_BATCHES = 2
"""Number of training batches in which each forward is checked."""
_NO_SAMPLES = torch.zeros(0, dtype=torch.int64, device="cpu")

Blocks = Sequence[tuple[int, str, nn.Module]]
"""Blocks of a stage: (number in the model, name, module)."""


class Stage:
    """A run of consecutive blocks on this rank.

    Args:
        blocks: (number in the model, name, module) of each block.
        loss: the model's loss on the last stage, None elsewhere.
        progress: called at the boundaries between blocks, forward and backward, so that messages and reductions
            progress; None if they progress on their own.
        block_passed: called with a block's number when the last backward of the batch has passed it and all blocks
            after it; with the number after the last block's when that backward begins. None if it is not needed.
        mesh: the tensor mesh, whose columns share activations.
        compile: whether blocks are compiled for training, or on a tensor mesh their chains of elementwise operations:
            False, True, or "auto" with a warning for those that cannot be compiled.
        in_float8: linear layers whose products are in float8 while the stage trains.
        may_wait: whether weight gradients may ever be deferred; else plain nn.Linear layers of a user stay as they are.
        autocast: the format to which torch casts the operands of products in forwards and the loss; None for no casts.
        tables: lookup tables whose gradients are added to row by row.
        segments: runs of blocks (indices into `blocks`) that keep only their inputs, and are recomputed in their
            backward. Their weight gradients are never deferred: their operands have only just been recomputed.
        selective: whether outputs of their expensive operations are kept. Then no block is compiled, since a compiled
        block is a single operation.
        left: checks for values that a forward leaves outside of the carried state; None if there are no such places.
        others: checks for parameters of other stages; None if the stage's code reaches none. A block whose code does is
            not compiled.
    """

    def __init__(self, blocks: Sequence[tuple[int, str, nn.Module]], *, loss: Loss | None, seed: int,
                 device: torch.device, progress: Callable[[], None] | None,
                 block_passed: Callable[[int], None] | None, weight_gradients: WeightGradients,
                 tables: Collection[nn.Parameter] = (), segments: Sequence[range] = (),
                 selective: bool = False,
                 mesh: TensorMesh | None = None, compile: bool | Literal["auto"] = False,
                 in_float8: Collection[nn.Module] = (), may_wait: bool = True,
                 autocast: torch.dtype | None = None, left: LeftValues | None = None,
                 others: OthersParameters | None = None) -> None:
        self._left, self._others = left, others
        self._steady, self._outside = ParameterChangeCheck(blocks), LeafCheck()
        self._looked_at, self._is_watched = 0, False
        self._overlaps = False
        """Whether a forward of this batch has run before an earlier microbatch's backward."""
        self.blocks, self._loss, self._seed, self._device = blocks, loss, seed, device
        self._autocast = autocast
        self.training = self._trains = False
        self._progress, self._block_passed, self._mesh = progress, block_passed, mesh
        self.wanted: LastOutputs | None = None
        """Takes what the last block returns in this batch, if it is wanted."""
        self.loss_factor = 1.0
        """Factor of the loss before the backward."""
        self.looks_at_mean = False
        """Whether this rank warns of a loss that is a mean."""
        self._weights = weight_gradients
        self._graphs: dict[int, _Graph] = {}
        self._uses: dict[str, list[WeightUse]] = {"forward": [], "backward": []}
        self._shared = carried_tensors.SharedMemory()
        self._from_buffers: set[str] = set()
        """Names of tensors that leave the stage and are in the memory of a buffer."""
        self._last_backward = False
        self._open: list[tuple[int, list[SplitLinear]]] = []
        """Blocks that the last backward of the batch has not passed yet, and their layers."""
        self._loss_sum = _zero(device)
        self._weight_sum: Tensor | float = 0.0
        self._last_number = -1
        modules = [module for _, _, module in blocks]
        self._layers_of_blocks = [(number, [layer for layer in module.modules() if isinstance(layer, SplitLinear)])
                                  for number, _, module in blocks]
        self._split_linears = [layer for _, layers in self._layers_of_blocks for layer in layers]
        at_once = {place for segment in segments for place in segment}
        for layer in (layer for place in at_once for layer in self._layers_of_blocks[place][1]):
            layer.recomputed = not selective
        self._segments, self._selective = segments, selective
        self._use_runs(runs_of(len(blocks), segments))
        self._cache: Callable[[Tensor, State, Callable[..., State]], State] | None = None
        self.cached_blocks = 0
        """Blocks that `use_cache` has given to a cache."""
        whole = compile if mesh is None and not selective else False
        self._forwards = DeferringForwards([module for place, module in enumerate(modules) if place not in at_once],
                                            [modules[place] for place in sorted(at_once)], weight_gradients, in_float8,
                                            may_wait=may_wait, tables=tables if whole is False else ())
        self._compiled = _compiled_blocks(whole, weight_gradients, self._forwards,
                                          [modules[place] for place in at_once], () if others is None else others.code)
        self._fused = Fused(False if mesh is None else compile)
        self._has_warned_of_hook = False

    @property
    def loss_and_weight(self) -> Tensor:
        """[2] fp64: sums of loss and weight over the forwards since `begin`."""
        return torch.stack([self._loss_sum, self._weight_sum + _zero(self._device)])

    def check(self) -> None:
        """Raise ModelError if blocks are in a state in which they cannot train."""
        for segment in self._recomputed.values():
            segment.check()
        if self._recomputed and not self._has_warned_of_hook and (name := hook_of_all_modules()) is not None:
            self._has_warned_of_hook = True
            warnings.warn(f"{name}, a hook of all modules (torch.nn.modules.module.register_module_forward_hook), is "
                          "called twice for modules that are recomputed", stacklevel=6)

    def begin(self, training: bool, num_microbatches: int) -> None:
        """Begin a batch."""
        self._loss_sum, self._weight_sum = _zero(self._device), 0.0
        self.training, self._last_number = training, num_microbatches - 1
        self._trains = training and any(
            parameter.requires_grad for _, _, module in self.blocks for parameter in module.parameters())
        self.forget_weights()
        self._is_watched, self._overlaps = training and self._looked_at < _WATCHED_BATCHES, False
        if training:
            self._looked_at += 1
            for segment in self._recomputed.values():
                segment.begin()
            self._forwards.install()

    def end(self) -> None:
        """End a batch, also after an error: the blocks are plain modules again."""
        self._forwards.remove()

    def forget_weights(self) -> None:
        """Release weights that stay gathered: they may have changed, or are no longer needed."""
        for layer in self._split_linears:
            layer.forget()

    def gathered_weights(self) -> list[Tensor]:
        """Weights that stay gathered between microbatches."""
        return [layer.gathered for layer in self._split_linears if layer.gathered is not None]

    def use_cache(self, forward: Callable[[Tensor, State, Callable[..., State]], State] | None,
                  num_blocks: int) -> None:
        """Have `forward` compute the first blocks, which are frozen, in training; None: they compute themselves
        again."""
        self._cache, self.cached_blocks = forward, num_blocks if forward is not None else 0
        rest = [range(max(segment.start, self.cached_blocks), segment.stop) for segment in self._segments]
        self._use_runs([run for run in runs_of(len(self.blocks), [segment for segment in rest if len(segment)])
                        if run[0].start >= self.cached_blocks])

    def _use_runs(self, runs: list[tuple[range, bool]]) -> None:
        self._runs: list[tuple[range, bool]] = []
        """Segments that are recomputed, and the runs between them."""
        for run, recomputed in runs:
            if self._runs and not (recomputed or self._runs[-1][1]):
                run = range(self._runs.pop()[0].start, run.stop)
            self._runs.append((run, recomputed))
        changing = ChangedInPlace(module for _, _, module in self.blocks)
        self._recomputed = {run: Segment([(name, module) for _, name, module in self.blocks[run.start:run.stop]],
                                         selective=self._selective, changing=changing)
                            for run, recomputed in runs if recomputed}

    # ------------------------------------------------------------------ forward

    def forward(self, number: int, step: int, microbatch: Microbatch, inputs: Mapping[str, Tensor],
                requires_grad: frozenset[str]) -> Outcome:
        """Forward of microbatch `number`. `inputs` is what arrived; `requires_grad` names the tensors that need a
        gradient."""
        if self._left is not None:
            self._left.begin(first=number == 0)
        if self._is_watched:
            if self._mesh is not None:
                self._mesh.sums.finish()  # sums of deferred products, which would be added in this forward
            self._steady.note()
        if self._graphs:
            self._overlaps = True
        inputs, notes = carried_tensors.notes_of(inputs)
        keeps_graph = self.training and (bool(requires_grad) or self._trains)
        leaves: dict[str, Tensor] = {}
        entered: dict[str, Tensor] = {}
        self._weights.forward_bytes = 0
        looks = self._is_watched and number == 0 and len(requires_grad) > 1 and self._mesh is None and (
            self._compiled is None)
        with torch.set_grad_enabled(keeps_graph), (
                self._refusing_unused(entered) if looks else self._surroundings("forward")):
            for name, tensor in inputs.items():
                entered[name] = leaf = tensor.detach()
                if self.training and name in requires_grad:
                    leaves[name], entered[name] = leaf, _enter(leaf.requires_grad_(), self._mesh is not None)
            carried_tensors.refuse_partial(entered, leaves, self._weights.in_pass)
            self._shared = carried_tensors.SharedMemory()
            if notes:
                self._shared.watch(entered, notes.get(carried_tensors.SHARED, ()))
                carried_tensors.refuse_outside(entered, notes.get(carried_tensors.HOOKED, ()), self._weights.in_pass)
            state = self._run_blocks(from_named_tensors(with_layouts(entered, self._mesh)), step, microbatch, number)
            if self._loss is not None and self.wanted is not None:
                self.wanted.take(number, state)
            if self._loss is not None and (self.wanted is None or self.wanted.has_loss):
                outputs = {"": self._compute_loss(state, microbatch, number)}
            else:
                outputs = as_named_tensors(state, f"block {self.blocks[-1][1]}")
                outputs = outputs if self._mesh is None else detached_names(outputs)
                if self._is_watched and number == 0:
                    self._from_buffers |= carried_tensors.in_buffers(outputs, (module for _, _, module in self.blocks))
                outputs = carried_tensors.with_notes(outputs, self._shared, self._device, buffers=self._from_buffers)
        self._shared.check()
        for read in read_attributes_of(module for _, _, module in self.blocks) if number == 0 else ():
            read.check_after_forward()
        if self._is_watched:
            self._look_at_parameters(number, outputs)
        if self._left is not None:
            self._left.check(last=number == self._last_number)
        sent: dict[str, Tensor] = {}
        roots: dict[str, GradientEdge] = {}
        for name, tensor in outputs.items():
            sent[name] = one = tensor.detach()
            if self._loss is None and (type(one) is not Tensor or one.layout is not torch.strided or one.is_nested
                                       or vars(tensor)):
                _check_sent(tensor, one, _describe_returned(name, self.blocks[-1][1]))
            if self.training and tensor.requires_grad:  # in an evaluation a parameter does, too
                roots[name] = root_of(tensor)
        if kept := bool(roots or leaves):
            self._graphs[number] = _Graph(leaves, roots, outputs[""].dtype if self._loss is not None else None)
        return Outcome(sent, frozenset(roots), kept, self._weights.forward_bytes)

    def _look_at_parameters(self, number: int, outputs: Mapping[str, Tensor]) -> None:
        """Check parameters after the forward of a microbatch, before its backward."""
        self._steady.check()
        if number == 0:
            self._outside.check(outputs.values(), (one for _, _, module in self.blocks for one in module.parameters()))
        if number == 0 and self._last_number and (self._loss is None or self.blocks[0][0]):
            self._steady.note_values()
        elif self._overlaps:
            under_way = [root.node for graph in self._graphs.values() for root in graph.roots.values()]
            self._steady.increment_versions(
                under_way + [node for tensor in outputs.values() if (node := tensor.grad_fn)])

    def _surroundings(self, way: Literal["forward", "backward"]) -> AbstractContextManager[object]:
        """Contexts in which forwards or backwards run, in addition to a mode of autograd."""
        if self._mesh is not None:
            return self._on_mesh(self._mesh, way)
        if way == "backward":
            return self._others or _AS_THEY_ARE
        return _AS_THEY_ARE if self._autocast is None else casting(self._autocast, self._device)

    @contextmanager
    def _refusing_unused(self, entered: Mapping[str, Tensor]) -> Iterator[None]:
        with self._surroundings("forward"), carried_tensors.RefuseUnused(entered):
            yield

    @contextmanager
    def _on_mesh(self, mesh: TensorMesh, way: Literal["forward", "backward"]) -> Iterator[None]:
        with mesh.one_pass(self._uses[way]), casting(self._autocast if way == "forward" else None, self._device), (
                self._others if way == "backward" and self._others is not None else _AS_THEY_ARE):
            yield

    def _run_blocks(self, state: State, step: int, microbatch: Microbatch, number: int) -> State:
        samples = _NO_SAMPLES if microbatch.samples is None else microbatch.samples
        runs = self._runs if self.training or self._cache is None else [(range(len(self.blocks)), False)]
        if self._cache is not None and self.training:  # whose use may end in this call
            state = self._run_cached(self.cached_blocks, state, step, samples, number)
        for run, recomputed in runs:
            if recomputed and torch.is_grad_enabled():
                part = partial(self._run_some, run, step, samples, number)
                state = self._recomputed[run].run(part, state)
            else:
                state = self._run_some(run, step, samples, number, state, watches=not recomputed)
            if recomputed and run.stop != len(self.blocks):
                self._watch_boundary(state, run[-1], number)
        return state

    def _run_cached(self, num_blocks: int, state: State, step: int, samples: Tensor, number: int) -> State:
        """Return the state after the first blocks, from a cache."""
        def compute(first: int, state: State, rows: Tensor | None, *, other_keys: bool = False) -> State:
            theirs = samples if rows is None else samples[rows]
            state = self._run_some(range(first, num_blocks), -step - 1 if other_keys else step, theirs, number,
                                   self._from_cache(state) if first else state)
            tensors = as_named_tensors(state, f"block {self.blocks[num_blocks - 1][1]}")
            if self._mesh is None:
                return from_named_tensors(tensors)
            return {f"{_IN_CACHE}{name}": tensor for name, tensor in detached_names(tensors).items()}

        assert self._cache is not None
        with torch.no_grad():
            return self._from_cache(self._cache(samples, state, compute))

    def _from_cache(self, state: State) -> State:
        """Convert a state from a cache: on a tensor mesh a dict, whose names say how each tensor is split over the
        columns.
        """
        if self._mesh is None:
            return state
        tensors = {name.removeprefix(_IN_CACHE): tensor
                   for name, tensor in as_named_tensors(state, "the cache").items()}
        return from_named_tensors(with_layouts(tensors, self._mesh))

    def _run_some(self, run: range, step: int, samples: Tensor, number: int, state: State, *, watches: bool = False
                  ) -> State:
        """Run the blocks in `run`; under recomputation again in the backward, with the same randomness.
        watches: whether their boundaries are watched.

        In training autograd is enabled, since a frozen block may compute gradients inside; layers call their fused
        chains.
        """
        if torch.is_grad_enabled() != self.training or (self._fused.compiles and not self._fused.is_current):
            with use_calls(self._fused), torch.set_grad_enabled(self.training):
                return self._run_some(run, step, samples, number, state, watches=watches)
        compiled = self._compiled if self.training else None
        # A gradient inside a forward may recompute a run: its scope must be another one.
        with keyed_random.Scope(self._seed, step, samples) as scope:
            for place in run:
                _, name, module = self.blocks[place]
                scope.block, scope.keys, scope.calls = name, None, 0
                if self._mesh is not None:
                    self._mesh.runs_user_code = True
                try:
                    if self._others is None:  # a context would be a third of the host's time for a block
                        state = module(state) if compiled is None else compiled(module, name, state, scope)
                    else:
                        with self._others.around(name):
                            state = module(state) if compiled is None else compiled(module, name, state, scope)
                except RanvierError:
                    raise
                except (Exception, SystemExit) as error:
                    self._explain(error, f"block {name}, forward of microbatch {number}")
                    if isinstance(error, (AttributeError, TypeError)):
                        _note_state(error, state)
                    raise
                finally:
                    if self._mesh is not None:
                        self._mesh.runs_user_code = False
                is_plain = self._mesh is None and isinstance(state, Tensor) and not state._backward_hooks
                if place == len(self.blocks) - 1:
                    break  # messages move before the next action
                if not is_plain:
                    carried_tensors.refuse_between_blocks(plain(state), self._weights.in_pass)
                if self._progress is not None:
                    self._progress()
                if watches:
                    self._watch_boundary(state, place, number)
        return state

    def _watch_boundary(self, state: State, place: int, number: int) -> None:
        """Watch the state of microbatch `number` after the block at `place`."""
        last = number == self._last_number
        reports = (last and self._block_passed is not None) or self._progress is not None
        if reports or not isinstance(state, Tensor):
            block, name, _ = self.blocks[place]
            tensors = {"": state} if type(state) is Tensor else plain(as_named_tensors(state, f"block {name}"))
            if reports:
                self._report_boundary(tensors, block + 1, last=last)
            if not isinstance(state, Tensor):
                self._shared.watch(tensors, carried_tensors.sharing(tensors))

    def _report_boundary(self, state: Mapping[str, Tensor], block: int, *, last: bool) -> None:
        """Have the backward pass report that it has left `block`: all gradients of the state before it are known. In
        all but the last backward of the batch the report only lets messages progress."""
        watched = [tensor for tensor in state.values() if tensor.requires_grad and tensor.grad_fn is not None]
        missing = len(watched)

        def hook(gradient: Tensor) -> None:
            nonlocal missing
            if not self._weights.in_pass():
                return  # a block or the loss calls autograd for its own purposes
            missing -= 1
            if self._progress is not None:
                self._progress()
            if missing == 0 and self._last_backward:
                self._close(block)
                passed = partial(self._note_passed, block)
                if self._mesh is None:
                    passed()
                else:
                    self._mesh.sums.call_after(passed)

        for tensor in watched:
            tensor.register_hook(hook if last else self._progress_messages)

    def _note_passed(self, block: int) -> None:
        if self._block_passed is not None:
            self._block_passed(block)

    def _progress_messages(self, gradient: Tensor) -> None:
        """Let messages progress: a hook at a block boundary."""
        if self._progress is not None:
            self._progress()

    def _close(self, block: int) -> None:
        """Close layers when the last backward of the batch has passed `block` and all blocks after it."""
        while self._open and self._open[-1][0] >= block:
            for layer in self._open.pop()[1]:
                layer.close()

    def _compute_loss(self, state: State, microbatch: Microbatch, number: int) -> Tensor:
        assert self._loss is not None, "only the last stage has a loss"
        targets = microbatch.targets
        targets = targets.to(self._device) if isinstance(targets, Tensor) else mapped(
            lambda leaf: leaf.to(self._device), targets)
        try:
            with _AS_THEY_ARE if self._others is None else self._others.around("loss"):
                total, weight = loss_parts(self._loss(state, targets))
        except (Exception, SystemExit) as error:
            self._explain(error, f"the loss of microbatch {number}")
            if (hint := wrapping_hint(state)) is not None:
                error.add_note(f"block {self.blocks[-1][1]} returned a {type(state).__name__}. {hint}")
            raise
        if not total.requires_grad and torch.is_grad_enabled() and any(
                leaf.requires_grad for leaf in tree_leaves(state) if isinstance(leaf, Tensor)) and (
                weight and total):  # on a GPU the only wait
            raise ModelError("has no gradient, so nothing would learn from it", code="loss-without-gradient",
                             where="loss", value=f"{total.item():.4g}, of microbatch {number}",
                             remedy="Compute it from the outputs as they are: without detach(), .data, item(), NumPy, "
                                    "and no_grad.")
        if self._is_watched and self.looks_at_mean:
            self.looks_at_mean = not warn_of_mean(total, weight)
        if self.wanted is not None:
            self.wanted.take_loss(total, weight)
        total = total if total.dim() == 0 else total.reshape(())
        self._loss_sum += total.detach()
        self._weight_sum += weight.detach().reshape(()).double() if isinstance(weight, Tensor) else weight
        return total.float() if is_half(total.dtype) else total  # a scaled fp16 loss would overflow

    def _explain(self, error: BaseException, where: str) -> None:
        """Add to an error in a user's code where it arose. Raises ModelError instead for a gradient with respect to a
        tensor that only an earlier stage has used, and for a second derivative of layers on rows and columns."""
        _note(error, where)
        if self.blocks[0][0] and "not have been used in the graph" in str(error):
            raise carried_tensors.partial_gradient(where) from error
        if self._mesh is not None and "@once_differentiable" in str(error):
            raise ModelError("differentiates a gradient of layers on rows or columns, which have a first derivative "
                             "only", code="second-derivative-on-rows", where=where,
                             remedy="Set Mesh(row=1, col=1), or compute the gradient without create_graph.") from error

    # ------------------------------------------------------------------ backward

    def backward(self, number: int, gradients: Mapping[str, Tensor], *, defer: bool,
                 last: bool) -> tuple[dict[str, Tensor], list[Product]]:
        """Run the backward of microbatch `number` from the gradients that returned; on the last stage from the loss.

        Returns the gradients of what arrived (names without one are left out), and the deferred products.
        """
        graph = self._graphs.pop(number)
        if self._left is not None:
            self._left.begin(first=False, backward=True)
        if self._loss is not None:
            gradients = {"": torch.full((), self.loss_factor, dtype=graph.loss_dtype, device=self._device)}
        arrived = {root: gradients[name] for name, root in graph.roots.items() if name in gradients}
        self._last_backward = last
        if last:
            self._open = list(self._layers_of_blocks)
            self._note_passed(self.blocks[-1][0] + 1)
        if watched := self._is_watched and self._overlaps:
            self._steady.note_buffers()
        try:
            with self._surroundings("backward"):
                products = self._weights.backward_pass(number, arrived, arrived.values(), defer, last=last)
                if last:
                    self._close(self.blocks[0][0])
        except (Exception, SystemExit) as error:
            self._explain(error, f"the backward of microbatch {number}")
            if self._overlaps and "modified by an inplace operation" in str(error):
                raise _changed_under_way(number) from error
            if self._recomputed and type(error).__name__ == "CheckpointError":
                raise ModelError("computes other tensors when recomputation runs it again, such as nested tensors "
                                 "created there, or because something has changed since, such as a global variable",
                                 code="recompute-differs", where=f"stage of block {self.blocks[0][1]}, microbatch "
                                                                 f"{number}",
                                 remedy="Set `--memory.recompute none`; the error above this one names the tensors."
                                 ) from error
            raise
        finally:
            self._last_backward = False
        if watched:
            self._steady.check_buffers(backward=True)
        if self._left is not None:
            self._left.check(last=last, backward=True)
        return {name: leaf.grad for name, leaf in graph.leaves.items() if leaf.grad is not None}, products

    def weight(self, number: int, product: int) -> None:
        """Run one deferred product."""
        self._weights.run(number, product)

    def clear(self) -> None:
        """Forget all microbatches: the batch has failed."""
        self._graphs.clear()
        self._weights.clear()
        self.forget_weights()
        if self._mesh is not None:
            self._mesh.sums.clear()
            self._mesh.order.forget()


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _compiled_blocks(setting: bool | Literal["auto"], gradients: WeightGradients, forwards: DeferringForwards,
                     recomputed: Sequence[nn.Module], watched: Collection[str]) -> CompiledBlocks | None:
    if setting is False:
        return None
    from ranvier.tensor.compiled import CompiledBlocks  # imports torch's compiler, which takes seconds

    return CompiledBlocks(setting, gradients, forwards, recomputed, watched)


def _describe_returned(name: str, block: str) -> str:
    return f'tensor "{place_of(name)}" that block {block} returns' if name else f"what block {block} returns"


def _check_sent(tensor: Tensor, sent: Tensor, where: str) -> None:
    """Raise ModelError if a message cannot carry a tensor that a block returns. sent: the same, detached."""
    if type(sent) is not Tensor and type(sent).__torch_function__ != Tensor.__torch_function__:
        raise ModelError("is a tensor subclass, which the next stage would not restore",
                         code="tensor-subclass-sent", where=where, value=type(sent).__name__,
                         remedy="Return a plain tensor, tensor.as_subclass(torch.Tensor), and make another in the next "
                                "block; or cut elsewhere (Pipeline(boundaries=...)).")
    if sent.layout is not torch.strided or sent.is_nested:
        raise ModelError("is sparse or nested, and messages carry only dense tensors", code="sparse-tensor-sent",
                         where=where, value=sent.layout,
                         remedy="Return its to_dense() or its parts, or cut elsewhere (Pipeline(boundaries=...)).")
    own = [name for name in vars(tensor) if not name.startswith("_dynamo")]  # marks of torch's compiler
    if type(tensor) is Tensor and own:
        raise ModelError("has attributes, which the next stage's tensor would not have",
                         code="tensor-attributes-sent", where=where, value=own,
                         remedy="Return what they hold as tensors of the carried state, or delete them.")


def _changed_under_way(number: int) -> ModelError:
    return ModelError("needs a tensor that the forward of a later microbatch has changed in place, perhaps a parameter "
                      "or buffer", code="changed-under-way", where=f"the backward of microbatch {number}",
                      remedy="Put a new tensor in its place (self.x = self.x + y), or compute with a clone of it.")


def _note(error: BaseException, where: str) -> None:
    """Add where a user's code has failed. Raises ModelError if the code exits the program: the other ranks would wait
    for this rank's messages."""
    if isinstance(error, SystemExit):
        raise ModelError("ends the program of this rank while the others wait for it", code="block-exits", where=where,
                         value=f"sys.exit({error.code!r})", remedy="Raise an error that says what is wrong.") from error
    error.add_note(f"in {where}")


def _note_state(error: BaseException, state: State) -> None:
    """Add what a block was given, if it may not fit."""
    if isinstance(state, dict):
        error.add_note(f"the block was given the carried state, a dict of {', '.join(state)}: wrap a module that "
                       "takes tensors in one with the line: def forward(self, state): return self.module(**state)")
    elif (hint := wrapping_hint(state)) is not None:
        error.add_note(f"the block was given a {type(state).__name__}, which the block before it has returned. If that "
                       f"is not your own block: {hint}")
