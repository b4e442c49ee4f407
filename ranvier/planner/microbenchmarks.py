"""Microbenchmarks of a GPU, one for each kind of kernel: products by shape, attention forward and backward, passes over
memory, sums over rows, and launches. The rate of products and the start of a tile are fitted to all shapes with
`whole_waves_flops`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranvier.cost.hardware import Device, Format, Rate
from ranvier.cost.kernels import ATTENTION_BACKWARD, whole_waves_flops
from ranvier.cost.published_peaks import published_peak
from ranvier.precision import DTYPES
from ranvier.tensor import float8

CLOCK_SECONDS = 1e-9
"""Resolution of the clock: no call took less."""
LEAST_SHARE = 1e-6
"""Least share that a cluster file may have; a lesser measurement was interrupted."""
_CALLS_FLOPS = 2e12
"""Operations of calls that are timed together, so that they run back to back on the device."""
_LAUNCHES = 200
_MESSAGE_MULTIPROCESSORS = 16
"""Not measured: the usual number of NCCL's channels."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the timed kernels. products: (m, n, k). attention: sequences, heads, positions, width of a head.
    elements: number of elements of a pass over memory."""

    products: Sequence[tuple[int, int, int]]
    attention: tuple[int, int, int, int]
    elements: int
    seconds: float = 0.15
    """Seconds for which each kernel is timed."""


GPU = Sizes(products=((8192, 8192, 8192), (16384, 2048, 8192), (4096, 4096, 16384), (16384, 8192, 512),
                      (2048, 2048, 2048), (512, 4096, 4096)), attention=(4, 16, 4096, 128), elements=1 << 28)


def time_call(call: Callable[[], object], seconds: float = 0.15,
              average: Callable[[Sequence[float]], float] = median, calls: int = 1) -> float:
    """Average seconds of one call, over as many calls as `seconds` allow, at least five, `calls` of them at a time."""
    def sync() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(0)

    call()
    sync()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        sync()
        times.append((time.perf_counter() - start) / calls)
    return max(average(times), CLOCK_SECONDS)


def measured_device(name: str, formats: Sequence[Format], *, memory_bytes: int, multiprocessors: int,
                    update_bandwidth: float, sizes: Sizes, tile: int = 128) -> Device:
    """The current torch device as a cluster's device. formats: in which it computes; the first is that of
    `tile_start`."""
    few, many = torch.zeros(64), torch.randn(sizes.elements, dtype=DTYPES["bf16"])
    launch = time_call(lambda: few.add_(1.0), sizes.seconds, calls=_LAUNCHES)
    bandwidth = 2 * many.nbytes / max(time_call(lambda: functional.gelu(many), sizes.seconds) - launch, CLOCK_SECONDS)
    rows = many.view(-1, min(4096, many.numel()))
    reducing = 2 * many.nbytes / max(time_call(lambda: functional.layer_norm(rows, rows.shape[1:]),
                                               sizes.seconds) - launch,
                                     CLOCK_SECONDS)
    rates, starts = dict[Format, Rate](), list[float]()
    for number_format in formats:
        seconds = {(1, *shape): time_call(call, sizes.seconds, calls=_calls(2 * prod(shape))) - launch
                   for shape, call in ((shape, _product(shape, number_format)) for shape in sizes.products)}
        reached, start = tile_rate(seconds, multiprocessors, tile)
        starts.append(start)
        peak = max(reached, 0.0 if number_format == "fp8" else published_peak(name, number_format) or 0.0)
        forward, backward = (None, None) if number_format == "fp8" else (
            min(1.0, max(LEAST_SHARE, flops / peak))
            for flops in _attention_flops(sizes, number_format, 2 / reducing + 3 / bandwidth))
        rates[number_format] = Rate(peak_flops=peak, share=reached / peak, attention_share=forward,
                                    attention_backward_share=backward)
    return Device(name=name, memory_bytes=memory_bytes, reserved_bytes=1_500_000_000, rates=rates,
                  memory_bandwidth=bandwidth, memory_share=1.0, update_bandwidth=update_bandwidth,
                  reduction_share=min(1.0, max(LEAST_SHARE, reducing / bandwidth)),
                  operation_seconds=launch, multiprocessors=multiprocessors, tile=tile, tile_start=starts[0],
                  message_multiprocessors=min(_MESSAGE_MULTIPROCESSORS, multiprocessors))


def tile_rate(seconds: Mapping[tuple[int, int, int, int], float], multiprocessors: int, tile: int
              ) -> tuple[float, float]:
    """(FLOP/s, start of a tile), fitted to these products by least squares of relative errors. seconds: by (batch, m,
    n, k)."""
    rows = []
    for shape, each in seconds.items():
        bare, started = (whole_waves_flops(shape, multiprocessors, tile, start) for start in (0.0, 1.0))
        rows.append((bare / max(each, CLOCK_SECONDS), (started - bare) / max(each, CLOCK_SECONDS)))
    terms = np.array(rows)
    scale = np.linalg.norm(terms, axis=0)
    flop, start = np.linalg.lstsq(terms / scale, np.ones(len(rows)), rcond=None)[0] / scale
    if start < 0 or flop <= 0:
        flop, start = float(terms[:, 0].sum() / np.square(terms[:, 0]).sum()), 0.0
    return 1.0 / float(flop), float(start / flop)


def _calls(flops: float) -> int:
    return max(1, min(_LAUNCHES, int(_CALLS_FLOPS / flops)))


def _product(shape: tuple[int, int, int], number_format: Format) -> Callable[[], Tensor]:
    """A product [m, k] [k, n] in this format, with operands rounded in advance."""
    m, n, k = shape
    if number_format != "fp8":
        return partial(torch.mm, *(torch.randn(size).to(DTYPES[number_format]) for size in ((m, k), (k, n))))
    (first, first_scale), (second, second_scale) = (
        float8.quantize(torch.randn(rows, k), float8.VALUES) for rows in (m, n))
    tensor_wise = functional.ScalingType.TensorWise
    return partial(functional.scaled_mm, first, second.t(), first_scale, tensor_wise, second_scale, tensor_wise,
                   output_dtype=torch.bfloat16)


def _attention_flops(sizes: Sizes, number_format: Format, beside: float) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward. beside: seconds of the passes in addition to the backward's
    products (`Device.attention_backward_overhead_seconds`), per byte of the queries."""
    sequences, heads, positions, width = sizes.attention
    query, key, value = (torch.randn(sizes.attention).to(DTYPES[number_format]).requires_grad_() for _ in range(3))
    attention = partial(functional.scaled_dot_product_attention, query, key, value, is_causal=True)
    flops = 2 * sequences * heads * positions * (positions + 1) * width
    with torch.no_grad():
        forward = time_call(attention, sizes.seconds, calls=_calls(flops))
    out = attention()
    backward = time_call(partial(torch.autograd.grad, out, (query, key, value), torch.ones_like(out),
                                 retain_graph=True),
                         sizes.seconds, calls=_calls(flops))
    return flops / forward, ATTENTION_BACKWARD * flops / max(backward - beside * query.nbytes, CLOCK_SECONDS)
