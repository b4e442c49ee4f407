"""The kernels of one block: the operations and transfers of its forward, and those that follow for the backward.

    kind        what it is                                     its backward
    product     batch x [m, k] [k, n]                          two products with equal operations: dX and, for a trained
                                                               weight, dW, which is added to the gradient
    attention   scores that stay on the chip (flash)           scores again, and four products: 2.5 times the operations
    pointwise   nonlinear operations, norms, reductions        reads the same inputs and dY, writes dX; the gradient of
                                                               a norm's weight takes one more pass over x and dY
    copy        casts, copies, sums                            the same bytes again

A kernel names the storages that it reads and writes, with the bytes of each: views cost nothing, an expanded tensor
counts once, a lookup reads only the rows that it looks up. So chains can be merged as torch.compile merges them
(`fuse_chains`). `ranvier.cost.hardware` computes the time of a kernel. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

_SMALLEST_TILE = 16
"""Rows, or columns, of the narrowest tile of a product."""
Kind = Literal["product", "attention", "pointwise", "copy"]
ATTENTION_BACKWARD = 2.5
"""Ratio of the operations of attention's backward to those of its forward: five products to two (Dao, 2023)."""
REDUCES = 16
"""A kernel is a reduction if it reads this many times the bytes that it writes."""
_PRODUCT_LAUNCHES = 2
"""The product, and the zeros that its tiles count with."""
_ATTENTION_BACKWARD_LAUNCHES = 4
"""Zeros, sums of dY y, the gradients, and the cast of that of the queries."""
_BIAS_LAUNCHES, _NORM_LAUNCHES = 3, 4
"""Launches for the gradient of a bias besides its sum: zeros, a cast, and the addition to the gradient so far; for a
norm's weight and bias: a cast and an addition each. (A profile of one H100 has 72 launches for a GPT layer's
microbatch, of which these rules count 66.)"""
_SCORE_PASSES = 3
"""Kernels between the two products of attention with scores, each of which reads and writes all scores: scale and mask,
softmax, and dropout or a cast."""


class Access(NamedTuple):
    """Bytes of one storage that a kernel reads or writes. size: of the whole storage."""

    storage: int
    bytes: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch of a forward, or of the backward that follows from it."""

    kind: Kind
    flops: int = 0
    """Floating-point operations that it computes: for causal attention those below the diagonal."""
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Sizes: for a product batch, m, n, k; for attention batch x heads, queries, keys, width of a head."""
    weight: Literal["none", "frozen", "trains"] = "none"
    """Whether the second operand of a product, or everything that a copy reads, is a weight, and whether that needs a
    gradient; for pointwise kernels, whether they scale by a norm's weight that needs a gradient."""
    has_bias: bool = False
    is_backward: bool = False
    """Whether it is the backward of attention, which devices compute at a different rate."""
    float8: bool = False
    """Whether a product is computed in float8."""
    is_reduction: bool = False
    """Whether a pointwise kernel sums over a dim of its input, as norms and the gradients of biases do."""
    is_kept: bool = False
    """Whether selective recomputation keeps its output, or the output of the operation that it belongs to."""
    more_launches: int = 0
    """Launches in addition to those of its kind."""

    @property
    def launches(self) -> int:
        """Launches of a GPU that uncompiled code makes for it."""
        own = _PRODUCT_LAUNCHES if self.kind == "product" else _ATTENTION_BACKWARD_LAUNCHES if self.is_backward else 1
        return own + self.more_launches

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(access.bytes for access in self.reads) + sum(access.bytes for access in self.writes)


Kernels = tuple[Kernel, ...]
_Result = TypeVar("_Result")


def map_distinct(kernels: Sequence[Kernel], compute: Callable[[Kernel], _Result]) -> Iterator[_Result]:
    """`compute` of each kernel. Kernels of equal panels are one object, for which it is called once."""
    known: dict[int, _Result] = {}
    for kernel in kernels:
        if id(kernel) not in known:
            known[id(kernel)] = compute(kernel)
        yield known[id(kernel)]


def whole_waves_flops(shape: tuple[int, int, int, int], multiprocessors: int, tile: int, tile_start: float) -> float:
    """Operations of a product, including those that idle multiprocessors could have computed at the same time.

    Args:
        shape: batch, m, n, k. multiprocessors: number of tiles that are computed at the same time. tile: rows, and
            columns, of a tile; fewer if the product has fewer.
        tile_start: cost of starting a tile, in elements of its sums.
    """
    batch, m, n, k = shape
    if not batch * m * n:
        return 0.0
    rows, columns = (min(tile, max(_SMALLEST_TILE, 1 << (size - 1).bit_length())) for size in (m, n))
    tiles = batch * -(-m // rows) * -(-n // columns)
    # If tiles are few and their sums long, each sum is computed in several parts at the same time (split-K).
    parts = max(1, min(multiprocessors // tiles, k // (4 * tile)))
    waves = -(-tiles * parts // multiprocessors)
    # A tile's time is that of loading both operands: a tile of few rows computes little in that time.
    return waves * multiprocessors * tile * (rows + columns) * (k / parts + tile_start)


def backward_of(kernels: Sequence[Kernel]) -> Kernels:
    """Kernels of the gradients of activations, without weight gradients. If parts of a layer's output are used
    separately, like queries, keys and values, one pass joins their gradients."""
    parts = Counter(access.storage for kernel in kernels for access in kernel.reads if access.bytes < access.size)

    def backward(kernel: Kernel) -> list[Kernel]:
        match kernel.kind:
            case "product":
                batch, m, n, k = kernel.shape
                found = [Kernel(kind="copy", reads=(whole := access._replace(bytes=access.size),), writes=(whole,))
                         for access in kernel.writes if kernel.weight != "none" and access.bytes == access.size
                         and parts[access.storage] > 1]
                return [*found, _product_of(kernel, (batch, m, k, n)),
                        *([_product_of(kernel, (batch, k, n, m))] if kernel.weight == "none" else [])]
            case "attention":
                return [replace(kernel, flops=round(ATTENTION_BACKWARD * kernel.flops), is_backward=True,
                                reads=(*kernel.reads, *kernel.writes, *kernel.writes), writes=kernel.reads)]
            case "pointwise":
                return [replace(kernel, reads=(*kernel.reads, *kernel.writes), writes=kernel.reads)]
            case "copy":
                return [kernel]

    return tuple(chain.from_iterable(map_distinct(kernels, backward)))


def _product_of(kernel: Kernel, shape: tuple[int, int, int, int]) -> Kernel:
    """A product of a backward: it moves the same three matrices."""
    return replace(kernel, shape=shape, has_bias=False)


def weight_gradients_of(kernels: Sequence[Kernel], gradient_bytes: int, product_bytes: int | None = None) -> Kernels:
    """Kernels of the gradients of trained weights, each of which is added to the sum so far.

    gradient_bytes: of an element of a gradient. product_bytes: of an element of a product that is written separately,
    and added by another kernel; None if the product itself adds.
    """
    def gradients(kernel: Kernel) -> list[Kernel]:
        found: list[Kernel] = []
        if kernel.weight == "trains" and kernel.kind == "pointwise":  # sums over all rows are a separate pass
            found.append(Kernel(kind="pointwise", reads=(*kernel.reads[:1], *kernel.writes[:1]), is_reduction=True,
                                more_launches=_NORM_LAUNCHES))
        if kernel.kind != "product" or kernel.weight != "trains":
            return found
        batch, m, n, k = kernel.shape  # of all rows together
        whole = gradient_bytes * n * k
        gradient = Access(-1, whole, whole)
        dy = kernel.writes
        product = replace(kernel, shape=(1, n, k, batch * m), reads=(*kernel.reads[:1], *dy), has_bias=False)
        if product_bytes is None:
            found.append(replace(product, reads=(*product.reads, gradient), writes=(gradient,)))
        else:
            written = Access(-4, size := product_bytes * n * k, size)
            found += [replace(product, writes=(written,)),
                      Kernel(kind="copy", reads=(written, gradient), writes=(gradient,))]
        if kernel.has_bias:
            found.append(Kernel(kind="pointwise", reads=dy, is_reduction=True, more_launches=_BIAS_LAUNCHES))
        return found

    return tuple(chain.from_iterable(map_distinct(kernels, gradients)))


def with_scores(kernels: Iterable[Kernel], element_bytes: int) -> Kernels:
    """The same with attention decomposed: scores of all queries and keys are written and read again, and products also
    compute what a mask hides."""
    found: list[Kernel] = []
    for kernel in kernels:
        if kernel.kind != "attention":
            found.append(kernel)
            continue
        batch, queries, keys, width = kernel.shape
        scores = Access(-2, size := batch * queries * keys * element_bytes, size)
        flops = 2 * batch * queries * keys * width
        first, last = kernel.reads[:2], kernel.reads[2:]  # scores are computed again, and their product with values not
        found.append(Kernel(kind="product", flops=flops, shape=(batch, queries, keys, width), reads=first,
                            writes=(scores,)))
        found += [Kernel(kind="pointwise", reads=(scores,), writes=(scores,))] * _SCORE_PASSES
        found.append(Kernel(kind="product", flops=flops, shape=(batch, queries, width, keys), reads=(scores, *last),
                            writes=kernel.writes, is_kept=kernel.is_kept))
    return tuple(found)


def without_panels(kernels: Iterable[Kernel]) -> Kernels:
    """The same with each product with a weight in one piece, if its rows are multiplied panel by panel."""
    found: list[Kernel] = []
    places: dict[tuple[int, int, int], int] = {}
    for kernel in kernels:
        batch, m, n, k = kernel.shape
        if kernel.kind != "product" or kernel.weight == "none":
            found.append(kernel)
            continue
        whole = replace(kernel, shape=(1, batch * m, n, k))
        place = places.setdefault((kernel.reads[1].storage, n, k), len(found))
        if place == len(found):
            found.append(whole)
            continue
        before = found[place]
        found[place] = replace(whole, flops=before.flops + kernel.flops, shape=(1, before.shape[1] + batch * m, n, k),
                               reads=(_union(before.reads[0], kernel.reads[0]), *before.reads[1:]),
                               writes=(_union(before.writes[0], kernel.writes[0]),))
    return tuple(found)


def without_fused_loss(kernels: Iterable[Kernel]) -> Kernels:
    """The same with a loss that is one pass over half-precision logits without output replaced by two kernels: a cast
    to fp32, and the softmax."""
    found: list[Kernel] = []
    for kernel in kernels:
        if kernel.kind != "pointwise" or kernel.writes:
            found.append(kernel)
            continue
        wide = tuple(access._replace(storage=-5 - access.storage, bytes=2 * access.bytes, size=2 * access.size)
                     for access in kernel.reads)
        found += [replace(kernel, kind="copy", writes=wide), replace(kernel, reads=wide, writes=wide)]
    return tuple(found)


def scaled(kernels: Sequence[Kernel], factor: float) -> Kernels:
    """The same for a microbatch that is `factor` times as large: weights stay the same."""
    def larger(accesses: Iterable[Access]) -> tuple[Access, ...]:
        return tuple(Access(each.storage, round(factor * each.bytes), round(factor * each.size)) for each in accesses)

    def scaled_one(kernel: Kernel) -> Kernel:
        batch, m, n, k = kernel.shape
        if kernel.kind == "copy" and kernel.weight != "none":
            return kernel
        has_weight = kernel.kind == "product" and kernel.weight != "none"
        reads = (*larger(kernel.reads[:1]), *kernel.reads[1:]) if has_weight else larger(kernel.reads)
        return replace(kernel, flops=round(factor * kernel.flops), reads=reads, writes=larger(kernel.writes),
                       shape=(batch, round(factor * m), n, k) if has_weight else (round(factor * batch), m, n, k))

    return tuple(map_distinct(kernels, scaled_one))


def extrapolate(half: Sequence[Kernel], kernels: Sequence[Kernel], further: float) -> Kernels:
    """Kernels of a microbatch that is larger than that of `kernels` by `further` times half of it. half: kernels of
    that half. Sizes that are equal in both do not grow; if the kernels do not correspond, only weights do not grow."""
    def line(less: int, more: int) -> int:
        return more + round(further * (more - less))

    def accesses(less: Sequence[Access], more: Sequence[Access]) -> tuple[Access, ...]:
        sizes = [line(one.size, other.size) for one, other in zip(less, more, strict=True)]
        return tuple(Access(other.storage, min(size, line(one.bytes, other.bytes)), size)  # at most the full table
                     for one, other, size in zip(less, more, sizes, strict=True))

    if [_form(kernel) for kernel in half] != [_form(kernel) for kernel in kernels]:
        return scaled(kernels, 1.0 + further / 2)
    partner = {id(more): less for less, more in zip(half, kernels, strict=True)}

    def grown_one(more: Kernel) -> Kernel:
        less = partner[id(more)]
        batch, m, n, k = map(line, less.shape, more.shape)
        return replace(more, flops=line(less.flops, more.flops), reads=accesses(less.reads, more.reads),
                       writes=accesses(less.writes, more.writes), shape=(batch, m, n, k))

    return tuple(map_distinct(kernels, grown_one))


def _form(kernel: Kernel) -> tuple[object, ...]:
    return kernel.kind, kernel.weight, len(kernel.reads), len(kernel.writes)


def to_float8(kernels: Iterable[Kernel], multiple: int, *, fuses: bool) -> Kernels:
    """The same with the products with weights in float8, whose operands are rounded before.

    multiple: must divide the inputs and outputs of a layer. fuses: whether finding the largest value of an operand is
    one pass, and rounding it another; otherwise every operation is a pass.
    """
    per_element = 5 if fuses else 33  # see ranvier.tensor.float8.quantize: in 16, 32 and 8 bits
    found: list[Kernel] = []
    for kernel in kernels:
        _, m, n, k = kernel.shape
        if kernel.kind != "product" or kernel.weight == "none" or n % multiple or k % multiple:
            found.append(kernel)
            continue
        for elements in (m * k, n * k):
            rounded = Access(-3, per_element * elements, per_element * elements)
            found += [Kernel(kind="copy", reads=(rounded,))] + [Kernel(kind="copy")] * (1 if fuses else 6)
        found.append(replace(kernel, float8=True))
    return tuple(found)


def fuse_chains(kernels: Sequence[Kernel], outputs: Collection[int]) -> Kernels:
    """The same with chains merged as torch.compile merges them: pointwise operations and copies between the same
    products that read each other's output, or the same tensor, are one pass over their joint inputs and outputs.

    outputs: storages that leave the block. Inner values that the backward needs are computed again from the inputs.
    """
    levels: dict[int, int] = {}
    groups: dict[int, list[tuple[int, Kernel]]] = {}
    level_of: list[int] = []
    for place, kernel in enumerate(kernels):
        level = max((levels.get(access.storage, 0) for access in kernel.reads), default=0)
        level_of.append(level)
        is_merged = kernel.kind in ("pointwise", "copy")
        for access in kernel.writes:
            levels[access.storage] = max(levels.get(access.storage, 0), level if is_merged else level + 1)
        if is_merged:
            groups.setdefault(level, []).append((place, kernel))
    merged: dict[int, Kernel] = {}
    dropped: set[int] = set()
    for members in groups.values():
        for group in _connected_groups(members):
            places = {place for place, _ in group}
            outside = {access.storage for place, kernel in enumerate(kernels) if place not in places
                       for access in kernel.reads} | set(outputs)
            merged[group[0][0]] = _merge([kernel for _, kernel in group], outside)
            dropped |= places
    return tuple(merged.get(place, kernel) for place, kernel in enumerate(kernels)
                 if place in merged or place not in dropped)


def kept_by_compiler(chains: Iterable[Kernel], kept: Mapping[int, int], free: Collection[int]) -> int:
    """Bytes that compiled code keeps for the backward, of those that autograd would keep: if that is less, it keeps the
    inputs of a chain, and recomputes the inside. Reductions are not recomputed.

    Args:
        chains: pointwise operations and copies that are compiled, one by one. kept: storage -> bytes that autograd
            keeps. free: storages that exist anyway: weights, and storages kept by products and attention.
    """
    made: dict[int, Kernel] = {}
    sizes = dict(kept)
    for kernel in chains:
        sizes |= {access.storage: access.size for access in kernel.reads if access.storage not in sizes}
        read = {access.storage: access.bytes for access in kernel.reads}
        made |= {access.storage: kernel for access in kernel.writes
                 if access.storage not in read and REDUCES * access.bytes >= max(read.values(), default=0)}
    found = set(kept)
    for storage in sorted((found & made.keys()) - set(free), key=sizes.__getitem__, reverse=True):
        found.remove(storage)
        needed, seen, inside = set[int](), {storage}, [storage]
        while inside:
            for number in {access.storage for access in made[inside.pop()].reads} - seen - found - set(free):
                seen.add(number)
                if number in made:
                    inside.append(number)
                else:
                    needed.add(number)
        is_less = sum(map(sizes.__getitem__, needed)) <= sizes[storage]
        found |= needed if is_less else {storage}
    return sum(map(sizes.__getitem__, found))


def _connected_groups(members: Sequence[tuple[int, Kernel]]) -> list[list[tuple[int, Kernel]]]:
    """Groups of kernels that share a storage."""
    groups: list[tuple[set[int], list[tuple[int, Kernel]]]] = []
    for place, kernel in members:
        storages = {access.storage for access in (*kernel.reads, *kernel.writes)}
        joined, others = [(place, kernel)], []
        for known, group in groups:
            if known & storages:
                storages |= known
                joined = [*group, *joined]
            else:
                others.append((known, group))
        groups = [*others, (storages, joined)]
    return [sorted(group, key=lambda member: member[0]) for _, group in groups]


def _merge(group: Sequence[Kernel], outside: Collection[int]) -> Kernel:
    """One pass for all kernels of the group. outside: storages that others read."""
    reads: dict[int, Access] = {}
    writes: dict[int, Access] = {}
    for kernel in group:
        for access in kernel.reads:
            if access.storage not in writes:
                reads[access.storage] = _union(reads.get(access.storage), access)
        for access in kernel.writes:
            writes[access.storage] = _union(writes.get(access.storage), access)
    kept = tuple(access for access in writes.values() if access.storage in outside)
    kind: Kind = "copy" if all(kernel.kind == "copy" for kernel in group) else "pointwise"
    trains = any(kernel.weight == "trains" and kernel.kind == "pointwise" for kernel in group)
    return Kernel(kind=kind, reads=tuple(reads.values()), writes=kept, weight="trains" if trains else "none",
                  is_reduction=any(kernel.is_reduction for kernel in group))


def _union(known: Access | None, access: Access) -> Access:
    """Union of two accesses of one storage: parts of it add up, at most to the full storage."""
    return access if known is None else access._replace(bytes=min(access.size, known.bytes + access.bytes))
