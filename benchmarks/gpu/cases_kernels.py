"""Cases of `benchmarks.gpu.suite`: kernels of a model's layers, each compared with what it replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.case import Findings, Options, synchronize, timed
from benchmarks.gpu.cases_speed import shape_named
from benchmarks.gpu.layers import PlainLayer
from benchmarks.tensor.stem import Stem
from ranvier import keyed_random
from ranvier.block import Initial, initialise
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Run
from ranvier.tensor import keyed_dropout
from ranvier.tensor.deferred_linear import add_gradients, padded_rows_product
from ranvier.tensor.float8 import forward_product, runs_on_cpu
from ranvier.train.attention_kernel import kernel_seconds


def attention_kernels(options: Options) -> Findings:
    """Forward and backward of attention by each kernel, at the lengths where they differ."""
    rows = {}
    usual = shape_named("1.3B-8", options)
    for name, program in options.sized({"2048": usual, "8192": replace(usual, sequence=8192, samples=2)},
                                       {"tiny": usual}).items():
        run = resolve(Run(model=program.transformer, precision="bf16", batch=Batch(microbatch_size=program.samples)))
        rows[name] = kernel_seconds(run, options.device) if options.device.type == "cuda" else {"math": 0.0}
    yield {"times": rows, "says": "; ".join(f"{name}: {min(row, key=lambda kernel: row[kernel])}"
                                               for name, row in rows.items() if row)}


def linear_kernels(options: Options) -> Findings:
    """Products into fp32 gradients, and logits in padded rows, each compared with the plain operations. bf16."""
    device, (tokens, hidden, vocab) = options.device, options.sized((16384, 2048, 50257), (16, 32, 131))
    layer = nn.Linear(hidden, 4 * hidden, bias=False, device=device, dtype=torch.bfloat16)
    x, dy, logits_dy = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
                        for width in (hidden, 4 * hidden, vocab))
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = torch.zeros(4 * hidden, hidden, device=device)
    weight = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16)

    def apart() -> None:
        layer.weight.grad.add_(dy.t().mm(x))

    def padded() -> None:
        y = padded_rows_product(x, weight)
        y.mm(weight)
        y.t().mm(x)

    def plain() -> None:
        x.mm(weight.t())
        logits_dy.mm(weight)
        logits_dy.t().mm(x)

    rows = {name: timed(call, device) for name, call in {
        "gradient, one kernel": lambda: add_gradients(layer.weight, None, x, dy), "gradient, product and sum": apart,
        "logits, padded rows": padded, "logits, plain": plain}.items()}
    yield {"times": rows, "says": ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in rows.items())}


def random_numbers(options: Options) -> Findings:
    """Initial weights drawn on the device, in seconds per billion, and dropout's kernel compared with torch's
    operations."""
    device, side = options.device, options.sized(1 << 14, 64)
    weights = torch.empty(side, side, device=device)
    drawing = timed(lambda: initialise(weights, "a.weight", Initial("normal", 0.02), 0), device, warm=1, times=3)
    part = torch.empty(64, side)
    initialise(part, "a.weight", Initial("normal", 0.02), 0, (side, side), ((0, 64), (0, side)))
    wrong = float((weights[:64].cpu() != part).double().mean())
    x = torch.randn(8, side // 8, side // 8, device=device, dtype=torch.bfloat16)
    masks = []

    def drop(call: Any) -> None:
        with keyed_random.scope(0, 0, torch.arange(8)):
            masks.append(call(x, 0.1, True))

    rows = {"kernel": timed(lambda: drop(keyed_dropout.dropout), device),
            "operations": timed(lambda: drop(keyed_random.dropout), device)}
    synchronize(device)
    billion = drawing / side**2 * 1e9
    yield {"seconds_per_billion_weights": billion, "share_that_differs": wrong, "dropout_seconds": rows,
           "ok": torch.equal(masks[0], masks[-1]),
            "says": f"{billion:.2f} s per billion weights, {wrong:.1e} of them another fp32 number than the CPU's; "
                    f"dropout {1e3 * rows['kernel']:.2f} ms, by operations {1e3 * rows['operations']:.2f} ms"}


def cuda_graphs(options: Options) -> Findings:
    """An experiment: a stage of fixed shape as a CUDA graph, forward and backward, compared with the same stage without
    a graph."""
    device, rows = options.device, {}
    for name, (hidden, samples) in options.sized({"350M": (1024, 1), "1.3B": (2048, 1)}, {"tiny": (32, 1)}).items():
        stem = Stem(num_layers=4, hidden=hidden, heads=hidden // 16, sequence=options.sized(1024, 8), dtype="bfloat16")
        x = torch.randn(samples, stem.sequence, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        with torch.device(device):
            layers: Any = nn.Sequential(*(PlainLayer(stem) for _ in range(4)))
        ways = {"eager": layers}
        if options.sized(True, False):
            ways["graph"] = torch.cuda.make_graphed_callables(layers, (x,))
        rows[name] = {way: timed(lambda call=call, x=x: call(x).backward(x.detach()), device)
                      for way, call in ways.items()}
    yield {"times": rows, "says": "; ".join(
        f"{name}: " + ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in row.items())
        for name, row in rows.items())}


def float8(options: Options) -> Findings:
    """The product of a linear layer in float8 (`--model.float8`) compared with bf16, and its error."""
    device, (tokens, hidden) = options.device, options.sized((16384, 4096), (16, 32))
    if device.type == "cpu" and not runs_on_cpu():
        yield {"says": "not run: this torch has no products in float8 on a CPU"}
        return
    x, weight = (torch.randn(size, hidden, device=device, dtype=torch.bfloat16) for size in (tokens, 4 * hidden))

    def product() -> torch.Tensor:
        return forward_product(x, weight, None)

    compiled = torch.compile(product) if device.type == "cuda" else product
    rows = {"float8, casts included": timed(product, device), "compiled": timed(compiled, device),
            "bf16": timed(lambda: x.mm(weight.t()), device)}
    exact = x.float().mm(weight.t().float())
    error = float((product().float() - exact).norm() / exact.norm())
    yield {"times": rows, "relative_error": error, "says": f"relative error {error:.1e}, " + ", ".join(
        f"{name} {1e3 * seconds:.2f} ms" for name, seconds in rows.items())}
