"""Cases of `benchmarks.gpu.suite`, blocks 1 and 2: what the device can do, and what share of it a step reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.case import Options, interleaved, synchronize, timed
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
from ranvier.train.peak import matrix_product_rate

_1B = Program(layers=24, hidden=2048, heads=16, vocab=50304, sequence=2048, precision="bf16", steps=8, microbatches=4,
              samples=8, optim={"offload": "none"})
_3B = replace(_1B, layers=32, hidden=2560, heads=20, samples=4)
_7B = replace(_1B, layers=32, hidden=4096, heads=32, samples=2)
SHAPES: dict[str, Program] = {
    "1.3B, microbatch 4": replace(_1B, samples=4), "1.3B, microbatch 8": _1B, "1.3B, microbatch 16": replace(
        _1B, samples=16), "2.7B, microbatch 4": _3B, "6.7B, microbatch 1": replace(_7B, samples=1),
    "6.7B, microbatch 2": _7B, "6.7B, recompute, microbatch 8": replace(_7B, samples=8, memory={"recompute": 1}),
    "1.3B, dropout 0.1": replace(_1B, dropout=0.1), "1.3B, vocabulary 50257": replace(_1B, vocab=50257)}
DRY = Program(layers=1, precision="bf16", steps=2, microbatches=2, optim={"offload": "none"})
_CLASSES = (("attention", ("flash", "attention", "fmha", "sdpa")), ("product", ("gemm", "mm", "xmma", "cutlass")),
            ("norm", ("layer_norm", "layernorm")), ("loss", ("softmax", "nll")), ("gelu", ("gelu",)),
            ("optimizer", ("adam",)), ("copy", ("memcpy", "memset", "copy", "fill")), ("reduction", ("reduce", "sum")),
            ("elementwise", ("elementwise", "add", "mul")))


def peak_of(options: Options) -> float:
    """The published rate in bf16; a made-up one in a dry run."""
    if options.dry_run:
        return 1e12
    return published_peak(torch.cuda.get_device_name(options.device), "bf16") or 1e15


def facts(options: Options) -> dict[str, Any]:
    """The device, its link to the host, and products of the real shapes on random data."""
    device, dtype = options.device, torch.bfloat16
    found: dict[str, Any] = {"torch": torch.__version__, "square_product_tflops":
                             matrix_product_rate(device, dtype, options.sized(0.5, 0.01)) / 1e12}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_gib": properties.total_memory / 2**30,
                  "nccl": ".".join(map(str, torch.cuda.nccl.version())), "link_gb_per_second": {
                      way: rate / 1e9 for way, rate in measure_link(device).items()}}
    rates = {}
    for tokens, hidden in options.sized(((4096, 2048), (16384, 2048), (4096, 4096), (16384, 4096)), ((16, 32),)):
        for factor in (3, 4):
            a = torch.randn(tokens, hidden, device=device, dtype=dtype)
            b = torch.randn(hidden, factor * hidden, device=device, dtype=dtype)
            seconds = timed(lambda a=a, b=b: a @ b, device)
            rates[f"{tokens} x {hidden} x {factor * hidden}"] = 2 * tokens * hidden * factor * hidden / seconds / 1e12
    return {**found, "product_tflops": rates,
            "says": f"square product {found['square_product_tflops']:.0f} TFLOP/s, the others "
                    f"{min(rates.values()):.0f} to {max(rates.values()):.0f}"}


@contextmanager
def _engine(program: Program, device: torch.device, **changed: Any) -> Iterator[Engine]:
    """An engine whose weights are drawn on the device, which takes no minutes."""
    model = model_on(program.transformer, torch.bfloat16, device)
    engine = Engine(model, world_of_one(device), mesh=Mesh(), optim=Optim(**{**program.optim, **changed}),
                    learning_rate=1e-4, dtype=torch.bfloat16, guard=Guard(), memory=Memory(**program.memory),
                    nominal_weight=float(program.microbatches * program.samples * program.sequence),
                    compile=program.compile)
    yield engine
    engine.close()


def step_seconds(program: Program, device: torch.device, **changed: Any) -> float:
    """The median of a step, after three."""
    with _engine(program, device, **changed) as engine:
        steps = iter(list(batches(program, engine.mesh, 0)))
        return timed(lambda: engine.train_batch(next(steps)), device, warm=min(3, program.steps - 1),
                     times=max(1, program.steps - 3))


def utilisation(program: Program, seconds: float, peak: float) -> dict[str, float]:
    """Of the published peak, with attention in full and with its causal half."""
    tokens = program.microbatches * program.samples * program.sequence
    full = program.flops_per_token * tokens / seconds / peak
    attention = 12 * program.layers * program.hidden * program.sequence * tokens / seconds / peak
    return {"mfu": full, "mfu_causal": full - attention / 2, "step_seconds": seconds,
            "tokens_per_second": tokens / seconds}


def mfu(options: Options) -> dict[str, Any]:
    """Utilisation of the published peak by shape."""
    rows: dict[str, Any] = {}
    for name, program in options.sized(SHAPES, {"tiny": DRY}).items():
        try:
            rows[name] = utilisation(program, step_seconds(program, options.device), peak_of(options))
        except torch.OutOfMemoryError as error:
            rows[name] = {"error": str(error).splitlines()[0]}
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows, "says": "; ".join(f"{name}: {row['mfu']:.1%}" for name, row in rows.items() if "mfu" in row)}


def profile_step(options: Options) -> dict[str, Any]:
    """Kernel time of one step by class, and the time in which the device is idle."""
    program, device = options.sized(_1B, DRY), options.device
    with _engine(program, device) as engine:
        steps = list(batches(program, engine.mesh, 0))
        for batch in steps[:-1]:
            engine.train_batch(batch)
        synchronize(device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as profiled:
            engine.train_batch(steps[-1])
            synchronize(device)
    classes: Counter[str] = Counter()
    for event in profiled.key_averages():
        micros = getattr(event, f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total", 0.0)
        name = event.key.lower()
        classes[next((kind for kind, parts in _CLASSES if any(part in name for part in parts)), "rest")] += micros
    return {"milliseconds": {name: micros / 1e3 for name, micros in classes.most_common()},
            "says": ", ".join(f"{name} {micros / 1e3:.1f} ms" for name, micros in classes.most_common(5))}


def variants(options: Options) -> dict[str, Any]:
    """Settings that may be faster, in turns with the usual ones."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    program, device = options.sized(_1B, DRY), options.device
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
    rows = {name: utilisation(program, value, peak_of(options))["mfu"]
            for name, value in zip(ways, medians, strict=True)}
    return {"mfu": rows, "says": ", ".join(f"{name} {value:.1%}" for name, value in rows.items())}


class _Windows:
    """Samples of random tokens, as a task's data set has them."""

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


def batches_ahead(options: Options) -> dict[str, Any]:
    """A step with its batch read and copied ahead, on a stream of its own, and without, in turns."""
    program, device = options.sized(_1B, DRY), options.device
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
    return {"ahead_seconds": ahead, "plain_seconds": plain, "says": f"{ahead / plain:.3f} of a step without"}


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


def peer(options: Options) -> dict[str, Any]:
    """Plain torch on the same shapes with torch's fused AdamW, eager and compiled."""
    program, device = options.sized(_1B, DRY), options.device
    rows = {}
    for name in options.sized(("eager", "compiled"), ("eager",)):
        with torch.device(device):
            model = _PlainGPT(program)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if name == "compiled" else model
        steps = iter(list(batches(program, Mesh(), 0)))

        def step(run: Any = run, optimizer: torch.optim.Optimizer = optimizer, steps: Any = steps) -> None:
            for batch in next(steps):
                run(batch.inputs.to(device), batch.targets.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()

        rows[name] = utilisation(program, timed(step, device, warm=min(3, program.steps - 1),
                                                times=max(1, program.steps - 3)), peak_of(options))["mfu"]
        del model, optimizer, run
    return {"mfu": rows, "says": ", ".join(f"{name} {value:.1%}" for name, value in rows.items())}
