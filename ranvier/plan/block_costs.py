"""Costs of blocks, counted on the meta device, which also checks the model contract.

No weight exists there, so any model fits on a laptop. Counted are floating-point operations of the forward pass, and
the bytes that its operations move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from ranvier.block import Model, State, as_named_tensors, meta_device, wrapping_hint
from ranvier.cost.blocks import BlockCost
from ranvier.errors import ModelError
from ranvier.optim.optimizer import storage_bytes
from ranvier.originals.object_contents import OF_EVERY_MODULE
from ranvier.plan import kernel_count as kernels
from ranvier.plan.formats import BlockFormats
from ranvier.plan.live_bytes import block_peaks, peaks_of
from ranvier.system.compilation import without_compiler
from ranvier.tensor import float8
from ranvier.tensor.columns import on_local, plain
from ranvier.tensor.deferred_linear import adds_rows
from ranvier.tensor.meta_mesh import like_panels_once
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.split.loss import overwrites_logits, scratch_rows
from ranvier.tensor.splittable import Layer


class FusedAttention(TorchFunctionMode):
    """Counts attention as the fused kernel that devices run: on the meta device torch would decompose it, and write and
    keep matrices of sequence x sequence that no real run has."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            fused = _fused_attention(**dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)), **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                     is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor | None:
    """The fused kernel's output; None if no kernel takes such arguments and torch decomposes the attention."""
    if dropout_p or any(each.dim() != 4 or each.shape[-1] != query.shape[-1] for each in (query, key, value)):
        return None
    if query.shape[1] != key.shape[1] and not (enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0):
        return None
    if attn_mask is not None:
        if attn_mask.requires_grad:
            return None
        if attn_mask.dtype is torch.bool:  # the kernel adds it
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    attended: Tensor = kernels.FUSED_ATTENTION(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return attended


class _Float8Products(TorchFunctionMode):
    """Finds the products of linear layers that float8 supports: (tokens, inputs, outputs), in order, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, int, int], None] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.linear and not any(size % float8.MULTIPLE for size in args[1].shape):
            outputs, inputs = args[1].shape
            self.found[args[0].shape[:-1].numel(), inputs, outputs] = None
        return func(*args, **(kwargs or {}))


class KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """The storages that autograd saves, each once, without those of `parameters`. saved: called for each saved
    tensor."""

    def __init__(self, parameters: Iterable[Tensor], saved: Callable[[], None] = lambda: None) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.masks: list[int] = []
        """Bytes of each boolean storage, such as a dropout mask."""
        self._saved = saved
        self._seen = {parameter.untyped_storage()._cdata: parameter.untyped_storage() for parameter in parameters}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def count(self) -> int:
        """Bytes of all storages."""
        return self.count_without(())

    def count_without(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages that belong to none of these tensors."""
        others = {plain(tensor).untyped_storage()._cdata for tensor in tensors}
        return sum(storage.nbytes() for storage in self.storages if storage._cdata not in others)

    def count_of(self, storages: Collection[int]) -> int:
        """Bytes of those that are among these storages (`_cdata`)."""
        return sum(storage.nbytes() for storage in self.storages if storage._cdata in storages)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved()
        storage = plain(tensor).untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.storages.append(storage)
            if tensor.dtype is torch.bool:
                self.masks.append(storage.nbytes())
        return tensor


def build_on_meta(model: Model) -> Mapping[str, nn.Module]:
    """Build all blocks for inspection; lazily built ones have no storage, ready-made modules are returned as they
    are."""
    def build() -> Mapping[str, nn.Module]:
        with meta_device():
            return {name: builder() for name, builder in model.blocks.items()}

    key: Hashable = None
    with suppress(TypeError):
        key = _recipe(model.blocks)
    return build() if key is None else _known_blocks.get(key, build)


def _tensors_on_meta(module: nn.Module, formats: BlockFormats) -> dict[str, Tensor]:
    """The module's parameters and buffers without data, cast."""
    return {key: value.detach().to("meta", formats.format_of(key, value)).requires_grad_(value.requires_grad)
            for key, value in (*module.named_parameters(remove_duplicate=False),
                               *module.named_buffers(remove_duplicate=False))}


def _to_meta(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, value)


@without_compiler()
def block_costs(model: Model, inputs: State, targets: object = None, dtype: torch.dtype = torch.float32,
                counting: kernels.Counting = kernels.AS_WRITTEN) -> list[BlockCost]:
    """Count the cost of every block for a microbatch like `inputs`, whose values do not matter. counting: what the
    device that runs them fuses.

    This runs the full chain once without data, and is also the check of the model contract: ModelError names the first
    block that does not take what the block before it returns, or the loss (which is not run for CUDA, where its kernels
    are not those of the meta device).
    """
    state, before, trains, costs = _to_meta(inputs), "the inputs", False, list[BlockCost]()
    shapes = _shapes(state)
    known: dict[object, tuple[BlockCost, State, tuple[object, ...]]] = {}
    for name, build in model.blocks.items():
        alike = model.alike.get(name, name), trains, shapes
        if alike not in known:
            with meta_device():
                module = build()
            cost, state = _count_block(model, name, module, state, trains, before, dtype, counting)
            known[alike] = cost, state, _shapes(state)
        cost, state, shapes = known[alike]
        costs.append(replace(cost, name=name))
        trains |= cost.num_trainable > 0
        before = f"what block {name} returns"
    if targets is not None:
        costs[-1] = _with_loss(costs[-1], model, state, trains, _to_meta(targets), dtype, counting)
    if counting.float8:
        in_float8 = {id(cost.kernels): kernels.float8_kernels(cost.kernels, counting) for cost in costs[1:-1]}
        costs[1:-1] = [replace(
            cost, kernels=in_float8[id(cost.kernels)], num_repeated=None if cost.num_repeated is None else len(
                kernels.float8_kernels(cost.kernels[:cost.num_repeated], counting))) for cost in costs[1:-1]]
    return costs


def _count_block(model: Model, name: str, module: nn.Module, state: State, trains: bool, before: str,
                 dtype: torch.dtype, counting: kernels.Counting) -> tuple[BlockCost, State]:
    """The cost of one block, and what it returns. trains: whether a block before it trains. before: description of
    `state`."""
    tensors = _tensors_on_meta(module, BlockFormats.from_block(model, name, module, dtype))
    count, products = _count_of(module, tensors), _Float8Products()
    memory, kept, found = count, KeptBytes(tensors.values(), count.note_saved), count.kept_outputs
    entered = _as_leaves(state, trains)  # which the block may change
    try:
        with (torch.enable_grad(), kept, found.recording(by_caller=True), count, FusedAttention(),
              like_panels_once(module, count),
              products if counting.float8 else nullcontext(), count.chains(counting)):
            returned = functional_call(module, tensors, (entered,), tie_weights=False)
        if counting.has_scores:
            memory, kept = _count_of(module, tensors), KeptBytes(tensors.values())
            with torch.enable_grad(), kept, memory, like_panels_once(module, memory):
                functional_call(module, tensors, (_as_leaves(state, trains),), tie_weights=False)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"does not take {before}: {type(error).__name__}: {error}",
                         code="block-refuses-input", where=f"block {name}",
                         remedy="Make its forward take and return the carried state, or choose sizes that it "
                                "supports." + _hint(entered)) from error
    outputs, entered_bytes = as_named_tensors(returned, f"block {name}"), _state_bytes(state)
    more = numeric_mask_bytes(kept.masks, counting, dtype)
    peaks = None if not counting.is_live else block_peaks(
        module, tensors, _as_leaves(state, trains), counting, dtype,
        nullcontext if counting.has_scores else FusedAttention)
    forward, backward = (memory.allocated,) * 2 if peaks is None else (peak - kept.count for peak in peaks)
    share, defers = _weights_of(module, count)
    tokens = 0 if counting.on_cuda or counting.compiles else entered_bytes // 8
    weight, plain_weight, table = _largest_weights(module, tokens)
    borrowed = {other for group in model.tied for other in group[1:]}
    stored = kernels.kept_bytes(memory, kept.storages, counting) + more
    return BlockCost(
        name=name, flops=count.flops, written_bytes=count.written,
        forward_bytes=forward, backward_bytes=backward,
        kernels=kernels.run_kernels(count, returned, counting, dtype.itemsize), number_bytes=dtype.itemsize,
        num_repeated=kernels.num_repeated(count, counting, dtype.itemsize), kept_bytes=stored,
        operand_bytes=min(stored, kept.count_of(memory.operands())),
        input_bytes=entered_bytes, output_bytes=_state_bytes(outputs), weight_share=share, defers=defers,
        unsaved_input_bytes=entered_bytes - kept.count_of(
            {plain(tensor).untyped_storage()._cdata for tensor in kernels.tensors_in(entered)}),
        weight_elements=weight, plain_elements=plain_weight, table_elements=table,
        float8_products=tuple(products.found),
        repeated=count.recomputed_kernels(
            counting, dtype.itemsize, kept_bytes=storage_bytes(found.tensors),
            inside_bytes=kept.count_without([*found.tensors, *kernels.tensors_in(entered)]) + more),
        num_parameters=sum(p.numel() for p in module.parameters()),
        num_trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
        num_owned=sum(p.numel() for key, p in module.named_parameters()
                      if p.requires_grad and f"{name}.{key}" not in borrowed)), returned


def _with_loss(last: BlockCost, model: Model, state: State, trains: bool, targets: object, dtype: torch.dtype,
               counting: kernels.Counting) -> BlockCost:
    """The cost of the last block, including the loss after it."""
    kept = KeptBytes(())
    with kernels.KernelCount() as count, kept:
        if not counting.on_cuda:
            check_loss(model, state, targets, dtype)
    scratch = loss_scratch_bytes(model.loss, state, counting)
    peaks = None if counting.on_cuda or not counting.is_live else peaks_of(
        lambda state: _loss_result(model, state, targets, dtype)[0], _as_leaves(state, trains), [], counting, dtype)
    loss_bytes = max(last.output_bytes, kept.count)
    forward, backward = (max(0, count.allocated - scratch),) * 2 if peaks is None else (
        max(0, peak - scratch - loss_bytes) for peak in peaks)
    return replace(last, kernels=(*last.kernels, *kernels.loss_kernels(count, state, counting)),
                   loss_bytes=loss_bytes, target_bytes=_state_bytes(targets),
                   loss_forward_bytes=forward, loss_backward_bytes=backward)


def numeric_mask_bytes(masks: Iterable[int], counting: kernels.Counting, dtype: torch.dtype) -> int:
    """Bytes by which dropout masks are larger if they are kept as numbers: on a CPU, uncompiled. masks: bytes of each
    as booleans, as `KeptBytes` finds them."""
    return 0 if counting.on_cuda or counting.compiles else (dtype.itemsize - 1) * sum(masks)


def loss_scratch_bytes(loss: object, outputs: State, counting: kernels.Counting) -> int:
    """Bytes by which the scratch of a loss that overwrites its logits is larger on the meta device: there it has all
    rows."""
    if not overwrites_logits(loss):
        return 0
    logits_RV = plain(max(kernels.tensors_in(outputs), key=Tensor.numel)).flatten(0, -2)
    rows, vocab = logits_RV.shape
    left_out = rows - scratch_rows(rows, vocab, "cuda" if counting.on_cuda else "cpu")
    return left_out * vocab * torch.promote_types(logits_RV.dtype, torch.float32).itemsize


def _count_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> kernels.KernelCount:
    """The count of a block with these parameters. A weight gathered with others trains if most of their elements do."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    weights = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return kernels.KernelCount({tensors[name].untyped_storage()._cdata: parameter.requires_grad
                        for name, parameter in parameters.items()},
                       others_train=2 * trained > sum(weight.numel() for weight in weights))


def _hint(state: State) -> str:
    hint = wrapping_hint(state)
    return "" if hint is None else f" If the block before it is not your own: {hint}."


def _weights_of(module: nn.Module, count: kernels.KernelCount) -> tuple[float, bool]:
    """A block's `weight_share` and `defers`. Flops of products are proportional to elements of their weights;
    attention's own products have no weight, and have gradients of two operands whatever is frozen."""
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    total, flops = sum(weight.numel() for weight in weights), count.flops
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    linear = [weight.requires_grad for layer in module.modules() if isinstance(layer, (nn.Linear, SplitLinear))
              for weight in (layer.weights if isinstance(layer, SplitLinear) else (layer._parameters.get("weight"),))
              if weight is not None]  # reading a parametrised weight would evaluate it
    defers = any(linear)
    if trained == total or not flops or not any(parameter.requires_grad for parameter in module.parameters()):
        return 1.0, defers
    return 1.0 - count.weight_flops / flops * (1.0 - trained / total), defers


def _largest_weights(module: nn.Module, tokens: int) -> tuple[int, int, int]:
    """`weight_elements`, `plain_elements` and `table_elements` of a block. tokens: number of looked-up rows, if
    gradients may be added to these rows alone; else 0."""
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Linear, SplitLinear))]
    own = {parameter for layer in layers for parameter in layer.parameters(recurse=False)} | {
        table.weight for table in module.modules() if isinstance(table, nn.Embedding) and (
            tokens and adds_rows(table.num_embeddings, tokens))}
    weights = {parameter for layer in layers if isinstance(layer, nn.Linear)
               for parameter in layer.parameters(recurse=False)}
    plain_weights = weights.difference(parameter for layer in module.modules() if isinstance(layer, Layer)
                                       for parameter in layer.parameters())
    weight, plain_weight, table = (
        max((one.numel() for one in group if one.requires_grad and one.dim() > 1), default=0)
        for group in (weights, plain_weights, {*module.parameters()} - own))
    return weight, plain_weight, table



def _shapes(state: State) -> tuple[object, ...]:
    leaves, spec = tree_flatten(state)
    return str(spec), tuple((plain(leaf).shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


def _state_bytes(state: object) -> int:
    return sum(map(kernels.tensor_bytes, kernels.tensors_in(state)))


def _as_leaves(state: State, trains: bool) -> State:
    """The carried state as it enters a stage: leaves that need gradients, if something before them trains."""
    def as_leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(trains and (x.is_floating_point() or x.is_complex()))

    leaves: State = tree_map(lambda leaf: on_local(as_leaf, leaf) if isinstance(leaf, Tensor) else leaf, state)
    return leaves


def check_loss(model: Model, state: State, targets: object, dtype: torch.dtype) -> None:
    """Raise ModelError if the loss does not take the last block's state, or does not return (sum, weight)."""
    try:
        with torch.enable_grad():
            result = _loss_result(model, state, targets, dtype)
    except Exception as error:
        raise ModelError(f"does not take what the last block returns: {type(error).__name__}: {error}",
                         code="loss-refuses-output", where="loss",
                         remedy="Its arguments are (output of the last block, targets of the microbatch).") from error
    loss_parts(result)


def _loss_result(model: Model, state: State, targets: object, dtype: torch.dtype) -> Any:
    if isinstance(model.loss, nn.Module):
        tensors = _tensors_on_meta(model.loss, BlockFormats(dtype=dtype))
        return functional_call(model.loss, tensors, (state, targets))
    return model.loss(state, targets)


def loss_parts(result: Any) -> tuple[Tensor, Tensor | float | int]:
    """Return a loss's (sum, weight). Raises ModelError if it returned something else, or a weight with a gradient."""
    fits = (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].numel() == 1
            and (isinstance(result[1], (int, float)) or (isinstance(result[1], Tensor) and result[1].numel() == 1)))
    if not fits:
        shown = f"({', '.join(map(_kind, result))})" if isinstance(result, tuple) else _kind(result)
        raise ModelError("must return (sum of losses, number of valid targets)", code="loss-result", where="loss",
                         value=shown,
                         remedy="Use reduction='sum' and return the count with it, so that microbatches of different "
                                "sizes add up to the same gradients.")
    total, weight = result
    of_tensor = weight if isinstance(weight, Tensor) else None
    if total.dtype.is_complex or (of_tensor is not None and of_tensor.dtype.is_complex):
        raise ModelError("is complex, and cannot be minimised", code="loss-complex", where="loss",
                         value=f"({', '.join(map(_kind, result))})",
                         remedy="Return a real sum of losses, such as outputs.abs().square().sum(), and a real weight.")
    if of_tensor is not None and of_tensor.requires_grad:
        raise ModelError("depends on trainable parameters, but counts as a constant in the gradient",
                         code="loss-weight-trains", where="loss", value=_kind(weight),
                         remedy="Return a number of targets, or weight.detach().")
    return total, weight


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {'complex ' if value.is_complex() else ''}tensor of shape {tuple(value.shape)}"


# --- cached counts ----------------------------------------------------------------------------------------------------

# Cache of counted costs, and of blocks on the meta device, in this process. A rank that checks its memory, freezes
# layers or changes its mesh plans the same model again, and counting takes longer than all else in a plan.
#
# Only models of Ranvier's own blocks are cached: their builders are `functools.partial`s of its classes and immutable
# values. Any other code may build something else each time.


Found = TypeVar("Found")


class Known(Generic[Found]):
    """Cache of results by what they depend on, at most `most` of them. Ranks that are threads need the same result at
    the same time: one of them computes it."""

    def __init__(self, most: int) -> None:
        self._most, self._computing = most, threading.Lock()
        self._found: dict[Hashable, Found] = {}

    def get(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        """Return the result for `key`; that of `compute` if there is none yet, or if `key` has no hash."""
        try:
            hash(key)
        except TypeError:
            return compute()
        with self._computing:
            if key not in self._found:
                found = compute()
                if len(self._found) == self._most:
                    del self._found[next(iter(self._found))]
                self._found[key] = found
            return self._found[key]


_known = Known[tuple[BlockCost, ...]](256)
_known_blocks = Known[Mapping[str, nn.Module]](16)


def known_or_counted(model: Model, sample: object, settings: Hashable, count: Callable[[], Iterable[BlockCost]]
                     ) -> tuple[BlockCost, ...]:
    """The cached result of `count` for a model that computes the same, else a new one. sample: its inputs and targets,
    of which only shapes and formats matter. settings: all else on which the costs depend."""
    key: Hashable = None
    with suppress(TypeError):
        key = (_recipe(model.blocks), _recipe(model.loss), model.tied, _recipe(model.alike), model.keep_fp32,
               _form_of(sample), settings)
    return tuple(count()) if key is None else _known.get(key, lambda: tuple(count()))


def _recipe(value: object) -> Hashable:
    """A key that is equal for builders of equal blocks, and for equal losses. Raises TypeError for what may build
    something else later."""
    match value:
        case None | bool() | int() | float() | str() | Enum() | torch.dtype():
            return type(value), value
        case partial():
            return _recipe(value.func), _recipe(value.args), _recipe(value.keywords)
        case Mapping():
            return tuple((key, _recipe(each)) for key, each in value.items())
        case tuple() | list():
            return tuple(map(_recipe, value))
    code = value if isinstance(value, (type, FunctionType)) else type(value)
    if code.__module__.partition(".")[0] != "ranvier" or getattr(code, "__closure__", None):
        raise TypeError
    if not isinstance(value, nn.Module):  # code, or a dataclass of settings, which has a hash if it is frozen
        return value
    if any(True for _ in (*value.parameters(), *value.buffers())):
        raise TypeError
    own = {name: each for name, each in vars(value).items() if name not in OF_EVERY_MODULE}
    return type(value), _recipe(own), _recipe(value._modules)


def _form_of(sample: object) -> Hashable:
    leaves, spec = tree_flatten(sample)
    return str(spec), tuple((plain(leaf).shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else _recipe(leaf)
                            for leaf in leaves)
