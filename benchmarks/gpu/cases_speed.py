"""Cases of `benchmarks.gpu.suite`: the device's rates, and the share of them that a step reaches."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.case import Finding, Findings, Options, interleaved, peaks, synchronize, timed
from benchmarks.gpu.device_events import covered_length, device_events, kernel_class
from benchmarks.gpu.layers import PlainLayer
from benchmarks.gpu.memory import measure_link, model_on
from benchmarks.gpu.programs import Program, batches, world_of_one
from benchmarks.tensor.stem import Stem
from ranvier.config.run import Guard, Memory, Optim
from ranvier.cost.published_peaks import published_peak
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.system.machine import available_memory_bytes
from ranvier.train.metrics import matrix_product_rate

How = Literal["eager", "compiled"]

_1B = Program(layers=24, hidden=2048, heads=16, vocab=50304, sequence=2048, precision="bf16", steps=5, microbatches=4,
              samples=8, optim={"offload": "none"})
_3B = replace(_1B, layers=32, hidden=2560, heads=20)
_4B = replace(_1B, layers=17, hidden=4096, heads=32)
_7B = replace(_4B, layers=32)
_HALF = {"offload": "none", "accumulate": "half"}
SHAPES: dict[str, Program] = {
    "1.3B-2": replace(_1B, samples=2), "1.3B-4": replace(_1B, samples=4), "1.3B-8": _1B,
    "1.3B-8-dropout": replace(_1B, dropout=0.1), "1.3B-8-vocab-50257": replace(_1B, vocab=50257),
    "2.7B-2": replace(_3B, samples=2), "2.7B-4": replace(_3B, samples=4), "3.6B-1": replace(_4B, samples=1),
    "3.6B-2-half": replace(_4B, samples=2, optim=_HALF),
    "3.6B-2-half-float8": replace(_4B, samples=2, optim=_HALF, float8=True),
    "3.6B-8-recompute": replace(_4B, layers=16, memory={"recompute": 1}, optim=_HALF)}
"""Billions of parameters and samples in a microbatch: shapes that fit 80 GB."""
LARGE_SHAPES: dict[str, Program] = {
    "1.3B-16": replace(_1B, samples=16), "6.7B-1": replace(_7B, samples=1), "6.7B-2": replace(_7B, samples=2),
    "6.7B-8-recompute": replace(_7B, memory={"recompute": 1})}
"""Shapes that need 141 GB."""
DRY = Program(layers=1, precision="bf16", steps=3, microbatches=2, optim={"offload": "none"})


def shape_named(name: str, options: Options) -> Program:
    """One of the shapes, changed to fit the device."""
    program: Program = options.sized((SHAPES | LARGE_SHAPES)[name], DRY)
    return program


def peak_of(options: Options) -> float:
    """The published rate in bf16; a made-up one in a dry run."""
    if options.dry_run:
        return 1e12
    return published_peak(torch.cuda.get_device_name(options.device), "bf16") or 1e15


def facts(options: Options) -> Findings:
    """The machine and its device, the link to the host, and products of the real shapes on random data."""
    device, dtype = options.device, torch.bfloat16
    found: Finding = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
                      "available_gib": available_memory_bytes() / 2**30}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "gib": properties.total_memory / 2**30,
                  "free_gib": torch.cuda.mem_get_info(device)[0] / 2**30,
                  "nccl": ".".join(map(str, torch.cuda.nccl.version())), "link": measure_link(device)}
        if (program := shutil.which("nvidia-smi")) is not None:
            said = subprocess.run([program, "-q", "-d", "CLOCK,POWER"], capture_output=True, text=True, check=False)
            found["nvidia_smi"] = said.stdout.splitlines()[:60]
    yield found
    yield {"kind": "product", "shape": "square",
           "tflops": matrix_product_rate(device, dtype, options.sized(0.5, 0.01)) / 1e12}
    for m, k, n in options.sized(((8192, 8192, 8192), (16384, 2048, 6144), (16384, 2048, 8192), (4096, 4096, 16384)),
                                 ((16, 32, 64),)):
        a, b = (torch.randn(*size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
        seconds = timed(lambda a=a, b=b: a @ b, device)
        yield {"kind": "product", "shape": [m, k, n], "tflops": 2 * m * k * n / seconds / 1e12}


@contextmanager
def _engine(program: Program, device: torch.device, **changed: Any) -> Iterator[Engine]:
    """An engine whose weights are drawn on the device, which is fast."""
    model = model_on(program.transformer, torch.bfloat16, device)
    engine = Engine(model, world_of_one(device), mesh=Mesh(), optim=Optim(**{**program.optim, **changed}),
                    learning_rate=1e-4, dtype=torch.bfloat16, guard=Guard(), memory=Memory(**program.memory),
                    nominal_weight=float(program.microbatches * program.samples * program.sequence),
                    compile=program.compile, float8=program.float8)
    yield engine
    engine.close()


def step_seconds(program: Program, device: torch.device, **changed: Any) -> float:
    """Median seconds of a step, after two warm-up steps."""
    with _engine(program, device, **changed) as engine:
        steps = iter(list(batches(program, engine.mesh, 0)))
        return timed(lambda: engine.train_batch(next(steps)), device, warm=min(2, program.steps - 1),
                     times=max(1, program.steps - 2))


def utilisation(program: Program, seconds: float, peak: float) -> dict[str, float]:
    """Utilisation of the published peak, with attention counted in full and with its causal half."""
    tokens = program.microbatches * program.samples * program.sequence
    full = program.flops_per_token * tokens / seconds / peak
    attention = 12 * program.layers * program.hidden * program.sequence * tokens / seconds / peak
    return {"mfu": full, "mfu_causal": full - attention / 2, "step_seconds": seconds,
            "tokens_per_second": tokens / seconds}


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _steps(train: Callable[[Any], object], given: list[Any], device: torch.device) -> tuple[float, list[float]]:
    """Seconds until the first step has ended, and seconds of the steps after the second."""
    began = time.monotonic()
    train(given[0])
    synchronize(device)
    first = time.monotonic() - began
    train(given[1])
    return first, [timed(lambda batch=batch: train(batch), device, warm=0, times=1) for batch in given[2:]]


def mfu(options: Options, shape: str, how: How = "eager", **changed: Any) -> Findings:
    """Utilisation of the published peak. changed: settings of the optimizer."""
    program, device = shape_named(shape, options), options.device
    program = replace(program, compile=options.sized(how == "compiled", False))
    with _engine(program, device, **changed) as engine:
        first, times = _steps(engine.train_batch, list(batches(program, engine.mesh, 0)), device)
    yield {"shape": shape, "how": how, "until_first_step_ended": first, "times": times, "changed": changed,
           **utilisation(program, _median(times), peak_of(options)), **peaks(device)}


class _PlainGPT(nn.Module):
    """The peer: the same shapes in torch's own layers."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        stem = Stem(num_layers=program.layers, hidden=program.hidden, heads=program.heads, sequence=program.sequence,
                    dtype="bfloat16")
        self.token = nn.Embedding(program.vocab, program.hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(PlainLayer(stem) for _ in range(program.layers))
        self.norm = nn.LayerNorm(program.hidden, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def peer(options: Options, shape: str, how: How = "eager", states: Literal["fp32", "bf16"] = "fp32") -> Findings:
    """Plain torch on the same shape with its fused AdamW: fp32 parameters, gradients and moments under autocast, or all
    in bf16, which rounds updates away."""
    program, device = shape_named(shape, options), options.device
    with torch.device(device):
        model = _PlainGPT(program)
    if states == "fp32":
        model = model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run: Any = torch.compile(model) if options.sized(how == "compiled", False) else model

    def step(given: Any) -> None:
        for batch in given:
            with torch.autocast(device.type, torch.bfloat16, enabled=states == "fp32"):
                loss = run(batch.inputs.to(device), batch.targets.to(device))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    first, times = _steps(step, list(batches(program, Mesh(), 0)), device)
    yield {"shape": shape, "how": how, "states": states, "until_first_step_ended": first, "times": times,
           "bytes_a_parameter": 16 if states == "fp32" else 8,
           **utilisation(program, _median(times), peak_of(options)), **peaks(device)}


def profile_step(options: Options, shape: str, how: How = "eager") -> Findings:
    """The device's time in one step by class of kernel, and the time in which it is idle."""
    program, device = shape_named(shape, options), options.device
    program = replace(program, steps=3, compile=options.sized(how == "compiled", False))
    with _engine(program, device) as engine:
        steps = list(batches(program, engine.mesh, 0))
        for batch in steps[:-1]:
            engine.train_batch(batch)
        synchronize(device)
        events = device_events(lambda: engine.train_batch(steps[-1]), device)
    classes: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for name, start, stop in events:
        milliseconds = (stop - start) / 1e3
        classes[kernel_class(name)] = classes.get(kernel_class(name), 0.0) + milliseconds
        count, total = kernels.get(name, [0, 0.0])
        kernels[name] = [count + 1, total + milliseconds]
    whole = (max(stop for _, _, stop in events) - events[0][1]) / 1e3
    idle = whole - covered_length([(start, stop) for _, start, stop in events]) / 1e3
    yield {"shape": shape, "how": how, "step_ms": whole, "idle_ms": idle, "launches": len(events),
           "milliseconds": dict(sorted(classes.items(), key=lambda one: -one[1])),
           "top": [[name[:90], *found] for name, found in sorted(kernels.items(), key=lambda one: -one[1][1])[:25]]}


def variants(options: Options, shape: str = "1.3B-8") -> Findings:
    """Settings that may be faster, in turns with the usual settings."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    program, device = shape_named(shape, options), options.device
    ways: dict[str, tuple[dict[str, Any], Any]] = {
        "usual": ({}, nullcontext), "bucket size 2^28": ({"bucket_size": 1 << 28}, nullcontext),
        "accumulate half": ({"accumulate": "half"}, nullcontext)}
    if device.type == "cuda":
        ways["cuDNN attention"] = ({}, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))

    def seconds(name: str) -> float:
        changed, context = ways[name]
        with context():
            return step_seconds(program, device, **changed)

    medians = interleaved([lambda name=name: seconds(name) for name in ways], options.sized(2, 1))
    for name, value in zip(ways, medians, strict=True):
        yield {"shape": shape, "way": name, **utilisation(program, value, peak_of(options))}


class _Windows:
    """Samples of random tokens, with the interface of a task's data set."""

    def __init__(self, program: Program) -> None:
        self._tokens = torch.randint(program.vocab, (64, program.sequence + 1)).numpy()

    def __len__(self) -> int:
        return len(self._tokens)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray) -> torch.Tensor:
        """[b, s] token numbers."""
        return torch.from_numpy(self._tokens[samples, :-1])

    def targets(self, samples: np.ndarray) -> torch.Tensor:
        """[b, s] token numbers."""
        return torch.from_numpy(self._tokens[samples, 1:])


def batches_ahead(options: Options) -> Findings:
    """A step whose batch is read and copied ahead, on a separate stream, and a step without that, in turns."""
    program, device = shape_named("1.3B-8", options), options.device
    data = _Windows(program)
    loader = Loader(data, Sampler(len(data), 0), global_size=program.microbatches * program.samples,
                    microbatch_size=program.samples, device=device)
    with _engine(program, device) as engine:
        def seconds(ahead: bool) -> float:
            def step() -> None:
                engine.train_batch(loader.microbatches(engine.steps))
                if ahead:
                    loader.prefetch(engine.steps)
            return timed(step, device, warm=options.sized(2, 1), times=options.sized(4, 1))

        ahead, plain = interleaved([lambda: seconds(True), lambda: seconds(False)], options.sized(3, 1))
    yield {"ahead_seconds": ahead, "plain_seconds": plain, "says": f"{ahead / plain:.3f} of a step without"}
