"""Blocks to stages: what each block costs, and the cut whose dearest stage is cheapest.

Costs are counted on the meta device, so no weight exists and any model fits on a laptop: floating-point operations of
the forward pass, plus the bytes that its operations write, weighed by the machine's balance of the two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf, prod

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from ranvier.errors import ConfigError, ModelError
from ranvier.models.block import Model, State
from ranvier.models.carried_state import named

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
    moved_bytes: int
    """Bytes that the block's operations read and write, views aside; of the last block the loss's, too."""
    operations: int
    """How many they are."""
    kept_bytes: int
    """Bytes of activations that autograd keeps for the backward, parameters aside."""
    input_bytes: int
    """Bytes of the carried state that enters the block."""
    output_bytes: int
    """Bytes of the carried state that leaves the block."""
    num_parameters: int
    num_trainable: int
    """Of them those that need a gradient."""
    num_owned: int
    """Of these those that are the block's own: of a tied parameter's ends the first one's."""

    def weight(self, device: str = "cpu") -> float:
        """Relative time, in floating-point operations."""
        return self.flops + FLOPS_PER_BYTE.get(device, FLOPS_PER_BYTE["cpu"]) * self.written_bytes


_MOVES_NOTHING = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "scalar_tensor",
                            "promote_types", "lift_fresh"})


class _MovedBytes(TorchDispatchMode):
    """Counts operations, views and bare allocations aside, and the bytes of what they read and write; of the latter
    apart those that are in new memory, bare allocations included."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.read = self.written = self.allocated = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        storages = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        returned = _tensors(result)
        self.allocated += sum(_tensor_bytes(leaf) for leaf in returned
                              if leaf.untyped_storage()._cdata not in storages)
        if func.overloadpacket.__name__ in _MOVES_NOTHING:
            self.written += sum(map(_tensor_bytes, returned))
            return result
        self.operations += 1
        self.written += sum(map(_tensor_bytes, returned))
        self.read += sum(map(_tensor_bytes, _tensors(_read_of(func, args, kwargs or {}))))
        return result


def _read_of(func, args: Sequence, kwargs: Mapping) -> list:
    """The arguments that an operation reads: not those that it only writes."""
    if func.overloadpacket.__name__ == "copy_":
        return list(args[1:])
    names = {argument.name for argument in func._schema.arguments if argument.is_out}
    return [*args, *(value for name, value in kwargs.items() if name not in names)]


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class FusedAttention(TorchFunctionMode):
    """Has attention counted as the fused kernel that devices run: on the meta device torch would take it apart, and
    write and keep matrices of sequence x sequence that no real run has."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            fused = _fused(**dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)), **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor | None:
    """What the fused kernel returns; None where no kernel takes such arguments, and torch takes attention apart."""
    if dropout_p or any(each.dim() != 4 or each.shape[-1] != query.shape[-1] for each in (query, key, value)):
        return None
    if query.shape[1] != key.shape[1] and not (enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0):
        return None
    if attn_mask is not None:
        if attn_mask.requires_grad:
            return None
        if attn_mask.dtype is torch.bool:  # the kernel adds it
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    return _FUSED_ATTENTION(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


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
    borrowed = {name for group in model.tied for name in group[1:]}
    counted = {_FUSED_ATTENTION: _attention_flops, torch.ops.aten.addmm_: _added_product_flops}
    for name, build in model.blocks.items():
        alike = model.alike.get(name, name), trains, _shapes(state)
        if alike in known:
            cost, state = known[alike]
            costs.append(replace(cost, name=name))
            trains |= cost.num_trainable > 0
            before = f"what block {name} returns"
            continue
        with torch.device("meta"):
            module = build()
        tensors = {key: value.detach().to("meta", dtype if value.is_floating_point() else value.dtype)
                   .requires_grad_(value.requires_grad) for key, value in
                   (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))}
        moved, kept, entered = _MovedBytes(), KeptBytes(tensors.values()), _state_bytes(state)
        state = _as_leaves(state, trains)
        trains |= any(tensor.requires_grad for tensor in tensors.values())
        try:
            with torch.enable_grad(), FlopCounterMode(display=False, custom_mapping=counted) as counter, kept, \
                    moved, FusedAttention():
                state = functional_call(module, tensors, (state,), tie_weights=False)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"does not take {before}: {type(error).__name__}: {error}",
                             where=f"block {name}",
                             remedy="Make its forward take and return the carried state.") from error
        outputs = named(state, f"block {name}")
        costs.append(BlockCost(name=name, flops=counter.get_total_flops(), written_bytes=moved.written,
                               allocated_bytes=moved.allocated, moved_bytes=moved.read + moved.written,
                               operations=moved.operations, kept_bytes=kept.count, input_bytes=entered,
                               output_bytes=_state_bytes(outputs),
                               num_parameters=sum(p.numel() for p in module.parameters()),
                               num_trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
                               num_owned=sum(p.numel() for key, p in module.named_parameters()
                                             if p.requires_grad and f"{name}.{key}" not in borrowed)))
        known[alike] = costs[-1], state
        before = f"what block {name} returns"
    if targets is not None:
        targets = _to_meta(targets)
        with _MovedBytes() as moved:
            check_loss(model, state, targets)
        costs[-1] = replace(costs[-1], moved_bytes=costs[-1].moved_bytes + moved.read + moved.written,
                            operations=costs[-1].operations + moved.operations)
    return costs


def _shapes(state: State) -> tuple:
    leaves, spec = tree_flatten(state)
    return str(spec), tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


def _state_bytes(state: State) -> int:
    return sum(map(_tensor_bytes, _tensors(state)))


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

    As `ranvier.pipeline.cut.cut` where a stage costs what its blocks do together, and not below 0: bisection takes
    num_stages x num_blocks x log(num_blocks). ConfigError when there are more stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigError(f"is more than the model's {num_blocks} blocks", where="mesh.pipe", value=num_stages,
                          remedy=f"Set --mesh.pipe {num_blocks} or less, or use a deeper model.")
    sums = list(accumulate(costs, initial=0.0))
    dearest = [sums[-1] - begun for begun in sums]  # of blocks first.. in the stages considered so far, from the back
    chosen: list[list[int]] = []
    for behind in range(1, num_stages):
        longer, starts = [inf] * num_blocks, [0] * num_blocks
        for first in range(num_blocks - behind):
            options, begun = range(first + 1, num_blocks - behind + 1), sums[first]
            # This stage's cost rises with the next one's first block, and the dearest of the others falls.
            crossing = bisect_left(options, True, key=lambda start: sums[start] - begun >= dearest[start])
            longer[first] = min([sums[start] - begun for start in options[crossing:crossing + 1]]
                                + [dearest[start] for start in options[max(0, crossing - 1):crossing]])
            starts[first] = options[bisect_right(options, longer[first], key=lambda start: sums[start] - begun) - 1]
        dearest = longer
        chosen.append(starts)
    edges = [0]
    for starts in reversed(chosen):
        edges.append(starts[edges[-1]])
    return tuple(edges[1:])


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
