"""Blocks to stages: what each block costs, and the cut whose dearest stage is cheapest.

Costs are counted on the meta device, so no weight exists and any model fits on a laptop: floating-point operations of
the forward pass, plus the bytes that its operations write, weighed by the machine's balance of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from ranvier.errors import ConfigError, ModelError
from ranvier.models.block import Model, State, named
from ranvier.pipeline.cut import cut

FLOPS_PER_BYTE = {"cpu": 4.0, "cuda": 250.0}
"""Operations that a core, or a GPU, does in the time in which it writes one byte: nominal, for the cut only."""


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """What one microbatch costs in one block, forward pass only; a training step costs three times the flops."""

    name: str
    flops: int
    written_bytes: int
    """Bytes that the block's operations write."""
    allocated_bytes: int
    """Those of them that are written into new memory."""
    kept_bytes: int
    """Bytes of activations that autograd keeps for the backward, parameters aside."""
    input_bytes: int
    """Bytes of the carried state that enters the block."""
    output_bytes: int
    """Bytes of the carried state that leaves the block."""
    num_parameters: int

    def weight(self, device: str = "cpu") -> float:
        """Relative time, in floating-point operations."""
        return self.flops + FLOPS_PER_BYTE.get(device, FLOPS_PER_BYTE["cpu"]) * self.written_bytes


class _WrittenBytes(TorchDispatchMode):
    """Counts the bytes of what operations return, views aside, and those that are not in an argument's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.allocated = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.count += leaf.numel() * leaf.element_size()
                    if leaf.untyped_storage()._cdata not in given:
                        self.allocated += leaf.numel() * leaf.element_size()
        return result


_FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _FusedAttention(TorchFunctionMode):
    """Has attention counted as the fused kernel that devices run: on the meta device torch would take it apart, and
    write and keep matrices of sequence x sequence that no real run has."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and len(args) == 3 and args[0].dim() == 4 \
                and not kwargs.get("dropout_p") and not kwargs.get("enable_gqa"):
            options = {name: value for name, value in kwargs.items() if name in ("attn_mask", "scale")}
            return _FUSED_ATTENTION(*args, 0.0, kwargs.get("is_causal", False), **options)[0]
        return func(*args, **kwargs)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *rest, **options) -> int:
    """Two products; a causal one is counted in full."""
    *batch, length, width = query
    return 2 * prod(batch) * length * key[-2] * (width + value[-1])


def _added_product_flops(out: Sequence[int], first: Sequence[int], second: Sequence[int], *rest, **options) -> int:
    return 2 * first[0] * first[1] * second[1]


class KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves, each storage once, without those of `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.count = 0
        self._seen = {parameter.untyped_storage()._cdata: parameter.untyped_storage() for parameter in parameters}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.count += storage.nbytes()
        return tensor


def build_on_meta(model: Model) -> dict[str, nn.Module]:
    """All blocks; lazily built ones have no storage, ready-made modules are what they are."""
    with torch.device("meta"):
        return {name: build() for name, build in model.blocks.items()}


def _to_meta(value):
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, value)


def block_costs(model: Model, inputs: State, targets: object = None,
                dtype: torch.dtype = torch.float32) -> list[BlockCost]:
    """Cost of every block for a microbatch like `inputs`, whose values do not matter.

    This runs the whole chain once without data, and is also the check of the model contract: ModelError names the
    first block that does not take what the block before it returns, or the loss.
    """
    state, costs, before, trains = _to_meta(inputs), [], "the inputs", False
    known: dict[object, tuple[BlockCost, State]] = {}
    counted = {_FUSED_ATTENTION: _attention_flops, torch.ops.aten.addmm_: _added_product_flops}
    for name, module in build_on_meta(model).items():
        tensors = {key: value.detach().to("meta", dtype if value.is_floating_point() else value.dtype)
                   .requires_grad_(value.requires_grad) for key, value in
                   (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))}
        alike = (model.alike.get(name, name), trains, _shapes(state), tuple(
            tensor.requires_grad for tensor in tensors.values()))
        if alike in known:
            cost, state = known[alike]
            costs.append(replace(cost, name=name))
            trains |= any(tensor.requires_grad for tensor in tensors.values())
            before = f"what block {name} returns"
            continue
        written, kept, entered = _WrittenBytes(), KeptBytes(tensors.values()), _state_bytes(state)
        state = _as_leaves(state, trains)
        trains |= any(tensor.requires_grad for tensor in tensors.values())
        try:
            with torch.enable_grad(), FlopCounterMode(display=False, custom_mapping=counted) as counter, kept, \
                    written, _FusedAttention():
                state = functional_call(module, tensors, (state,), tie_weights=False)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"does not take {before}: {type(error).__name__}: {error}",
                             where=f"block {name}",
                             remedy="Make its forward take and return the carried state.") from error
        outputs = named(state, f"block {name}")
        costs.append(BlockCost(name=name, flops=counter.get_total_flops(), written_bytes=written.count,
                               allocated_bytes=written.allocated,
                               kept_bytes=kept.count, input_bytes=entered, output_bytes=_state_bytes(outputs),
                               num_parameters=sum(p.numel() for p in module.parameters())))
        known[alike] = costs[-1], state
        before = f"what block {name} returns"
    if targets is not None:
        check_loss(model, state, _to_meta(targets))
    return costs


def _shapes(state: State) -> tuple:
    leaves, spec = tree_flatten(state)
    return str(spec), tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


def _state_bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(state) if isinstance(tensor, Tensor))


def _as_leaves(state: State, trains: bool) -> State:
    """The carried state as it enters a stage: leaves that want gradients, where something before them trains."""
    return tree_map(lambda leaf: leaf.detach().requires_grad_(trains and leaf.is_floating_point())
                    if isinstance(leaf, Tensor) else leaf, state)


def check_loss(model: Model, state: State, targets: object) -> None:
    """ModelError when the loss does not take the last block's state, or does not return (sum, weight)."""
    try:
        with torch.no_grad():
            result = model.loss(state, targets)
    except Exception as error:
        raise ModelError(f"does not take what the last block returns: {type(error).__name__}: {error}", where="loss",
                         remedy="Its arguments are (output of the last block, targets of the microbatch).") from error
    loss_parts(result)


def loss_parts(result: object) -> tuple[Tensor, Tensor | float | int]:
    """A loss's (sum, weight). ModelError when it returned something else."""
    fits = (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].numel() == 1
            and (isinstance(result[1], (int, float)) or (isinstance(result[1], Tensor) and result[1].numel() == 1)))
    if not fits:
        shown = (f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__)
        raise ModelError("must return (sum of losses, number of valid targets)", where="loss", value=shown,
                         remedy="Use reduction='sum' and return the count beside it, "
                                "so that microbatches of different sizes add up to the same gradients.")
    return result


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First block of each stage after the first, such that the dearest stage is as cheap as any cut allows.

    As `cut`, with the sum of its blocks' costs for a stage. ConfigError when there are more stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigError(f"is more than the model's {num_blocks} blocks", where="mesh.pipe", value=num_stages,
                          remedy=f"Set --mesh.pipe {num_blocks} or less, or use a deeper model.")
    sums = list(accumulate(costs, initial=0.0))
    return cut(num_blocks, num_stages, lambda stage, start, stop: sums[stop] - sums[start])


def uniform(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """The cut into equal numbers of blocks, the first stages taking one more where it does not divide."""
    return partition([1.0] * num_blocks, num_stages) if num_stages > num_blocks else tuple(
        stage * (num_blocks // num_stages) + min(stage, num_blocks % num_stages) for stage in range(1, num_stages))


def check_boundaries(boundaries: Sequence[int], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Boundaries given by hand, if they cut `num_blocks` into `num_stages` non-empty stages. ConfigError otherwise."""
    boundaries = tuple(boundaries)
    remedy = (f"Give {num_stages - 1} rising block numbers between 1 and {num_blocks - 1}, "
              f"the first block of each stage after the first.")
    if len(boundaries) != num_stages - 1:
        raise ConfigError(f"has {len(boundaries)} numbers for {num_stages} stages", where="pipeline.boundaries",
                          value=boundaries, remedy=remedy)
    edges = (0, *boundaries, num_blocks)
    if any(first >= second for first, second in pairwise(edges)):
        raise ConfigError("does not rise, or leaves a stage without blocks", where="pipeline.boundaries",
                          value=boundaries, remedy=remedy)
    return boundaries
