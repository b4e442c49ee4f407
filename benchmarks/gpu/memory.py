"""The largest GPT that one CUDA device trains, by placement of the optimizer states, and its cost in time.

    python -m benchmarks.gpu.memory [--minutes 25] [--only stream-half-d3 ...]

Offloading exists for models that do not fit, so its benefit is the size that fits with it. A GPT (hidden 2048,
vocabulary 50304, sequence 1024, one microbatch of one sequence, every layer recomputed in the backward) grows in layers
until two steps no longer run. Each try is a separate process, so that running out of memory leaves nothing behind.

    none             states on the device: 16 bytes a parameter
    stream-half-d1   states streamed, one bucket on the device; gradients add up in bf16: 4 bytes a parameter
    stream-half-d3   the same with three buckets, so that copies in, updates and copies out overlap
    stream-fp32-d3   gradients add up in fp32: 6 bytes
    hybrid           70 % of the states streamed, the others on the device
    host             parameters are updated by the host's cores: 4 bytes
    fsdp2-offload    the peer: fully_shard with CPUOffloadPolicy on one rank

Besides its largest size, every setting is timed at the largest size that fits with `none`, or its own if that is
smaller. The table also has expected figures: `stream` moves 12 bytes a parameter in and 12 out, `host` moves gradients
out and parameters in, at the bandwidths that were measured for pinned memory here. `hidden` is the share of the serial
time of copies and updates that the measured end of a step does not show. `building` is the peak before the first step.
On a machine without CUDA this says so and ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.program import table
from benchmarks.record import results_file, write_results
from ranvier.block import Model
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.run import Memory, Optim, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.optim.rules import rules_of
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.system.machine import available_memory_bytes
from ranvier.world import World

GIB = 2**30
STEPS = 2
"""Timed steps of a try, after one untimed step."""
_DOES_NOT_FIT = 3
_SMALLEST_SECONDS = 60.0
"""A try does not begin with less time left."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How states are stored. optim: settings of our engine; None for the peer. Bytes are per parameter."""

    optim: dict[str, object] | None
    device_bytes: float
    host_bytes: float
    bytes_in: float = 0.0
    """Bytes to the device in each step."""
    bytes_out: float = 0.0
    updated_on: str = "device"


SETTINGS = {
    "none": Setting(optim={"offload": "none", "accumulate": "half"}, device_bytes=16, host_bytes=0),
    "stream-half-d1": Setting(optim={"offload": "stream", "accumulate": "half", "buckets_in_flight": 1},
                              device_bytes=4, host_bytes=12, bytes_in=12, bytes_out=12),
    "stream-half-d3": Setting(optim={"offload": "stream", "accumulate": "half", "buckets_in_flight": 3},
                              device_bytes=4, host_bytes=12, bytes_in=12, bytes_out=12),
    "stream-fp32-d3": Setting(optim={"offload": "stream", "accumulate": "fp32", "buckets_in_flight": 3},
                              device_bytes=6, host_bytes=12, bytes_in=12, bytes_out=12),
    "hybrid": Setting(optim={"offload": "hybrid", "offload_share": 0.7, "accumulate": "half", "buckets_in_flight": 3},
                      device_bytes=7.6, host_bytes=8.4, bytes_in=8.4, bytes_out=8.4),
    "host": Setting(optim={"offload": "host", "accumulate": "half"}, device_bytes=4, host_bytes=12, bytes_in=2,
                    bytes_out=2, updated_on="host"),
    "fsdp2-offload": Setting(optim=None, device_bytes=0, host_bytes=16, bytes_in=4, bytes_out=4, updated_on="host")}


def config_of(layers: int, options: argparse.Namespace) -> Transformer:
    return Transformer(num_layers=layers, hidden=options.hidden, heads=options.hidden // 128, vocab=options.vocab,
               sequence=options.sequence)


def count_parameters(config: Transformer) -> int:
    """Parameters of the tied GPT: 12 h^2 + 13 h for each layer, embeddings, and the last norm."""
    h = config.hidden
    return config.num_layers * (12 * h * h + 13 * h) + (config.vocab + config.sequence) * h + 2 * h


# ---------------------------------------------------------------------- one try, in a separate process


def built_on(builder: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """The block, created on `device`, with an embedding small enough for a head that is tied to it."""
    if torch.get_default_device().type == "meta":
        return builder()
    with torch.device(device):
        module = builder()
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight.mul_(0.02)
    return module


def model_on(config: Transformer, dtype: torch.dtype, device: torch.device) -> Model:
    """A GPT whose blocks are created on their device, with torch's initial values, since values do not matter here."""
    model = gpt(config, dtype=dtype)
    blocks = {name: partial(built_on, builder, device) for name, builder in model.blocks.items()}
    return replace(model, blocks=blocks, initial=None)


def tokens(config: Transformer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(config.vocab, (1, config.sequence + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def clock(device: torch.device) -> float:
    """Time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int:
    """The most bytes that were allocated on the device since the last call; 0 if the device is a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def try_ours(config: Transformer, setting: Setting, device: torch.device) -> dict[str, object]:
    store = dist.HashStore()
    backend = TorchBackend(0, 1, store, device, 600.0)
    world = World(backend=backend, store=store, launcher="benchmark", device=device, local_rank=0, local_size=1)
    engine = Engine(model_on(config, torch.bfloat16, device), world, mesh=Mesh(), optim=Optim(**setting.optim),
                    learning_rate=1e-4, nominal_weight=config.sequence, dtype=torch.bfloat16,
                    memory=Memory(recompute=1))
    building = peak_bytes(device)
    whole, ends, losses = [], [], []
    for step in range(STEPS + 1):
        begun = clock(device)
        losses.append(engine.train_batch([Microbatch(*tokens(config, step))]).loss)
        whole.append(clock(device) - begun)
    for step in range(STEPS + 1):
        result = engine.forward_backward([Microbatch(*tokens(config, step))])
        begun = clock(device)
        engine.step(result)
        ends.append(clock(device) - begun)
    memory = engine.memory()
    found = {"step_seconds": median(whole[1:]), "end_seconds": median(ends[1:]), "losses": losses,
             "building_bytes": building, "lasting_bytes": sum(memory["device"].values()),
             "host_bytes": sum(memory["host"].values())}
    engine.close()
    backend.close()
    return found


class Layer(nn.Module):
    """Both blocks of a layer, recomputed in the backward."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


def try_fsdp(config: Transformer, device: torch.device) -> dict[str, object]:
    """fp32 parameters, gradients and states in pinned host memory; bf16 on the device, one layer at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    cuda = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    model = model_on(config, torch.float32, torch.device("cpu"))
    names = iter(model.blocks)
    embedding = model.blocks[next(names)]()
    layers = [Layer(model.blocks[next(names)](), model.blocks[next(names)]()) for _ in range(config.num_layers)]
    head = model.blocks[next(names)]()
    head.projection.weight = embedding.token.weight
    network = nn.Sequential(embedding, *layers, head)
    policy = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
              "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    for layer in layers:
        fully_shard(layer, **policy)
    fully_shard(network, **policy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    building = peak_bytes(device)
    whole, ends, losses = [], [], []
    for step in range(STEPS + 1):
        begun = clock(device)
        inputs, targets = (tensor.to(device) for tensor in tokens(config, step))
        total, weight = model.loss(network(inputs), targets)
        (total / weight).backward()
        middle = clock(device)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / weight))
        done = clock(device)
        whole.append(done - begun)
        ends.append(done - middle)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    found = {"step_seconds": median(whole[1:]), "end_seconds": median(ends[1:]), "losses": losses,
             "building_bytes": building, "lasting_bytes": 0, "host_bytes": 16 * parameters}
    dist.destroy_process_group()
    return found


def pinned_bytes() -> int | None:
    """The most pinned host memory that torch's allocator held, including rounding; None if this torch does not count
    it."""
    try:
        statistics = torch.cuda.host_memory_stats()
    except (AttributeError, RuntimeError):
        return None
    return statistics.get("allocated_bytes.peak", statistics.get("segment_bytes.peak"))


def one_try(name: str, layers: int, options: argparse.Namespace) -> int:
    """Train, and print the findings as one line of JSON; returns _DOES_NOT_FIT if memory ran out."""
    device, setting, config = torch.device("cuda", 0), SETTINGS[name], config_of(layers, options)
    torch.cuda.set_device(device)
    try:
        found = try_fsdp(config, device) if setting.optim is None else try_ours(config, setting, device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return _DOES_NOT_FIT
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        print(str(error).splitlines()[0], file=sys.stderr)
        return _DOES_NOT_FIT
    print(json.dumps({"layers": layers, "parameters": count_parameters(config), **found,
                      "peak_bytes": peak_bytes(device), "pinned_bytes": pinned_bytes()}))
    return 0


# ---------------------------------------------------------------------- what can be expected


def measure_link(device: torch.device, megabytes: int = 256) -> dict[str, float]:
    """Bytes a second from and to pinned host memory, separately and at the same time."""
    host = [torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty_like(tensor, device=device) for tensor in host]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def rate(inwards: bool, outwards: bool) -> float:
        best = 0.0
        for _ in range(6):
            begun = clock(device)
            if inwards:
                with torch.cuda.stream(streams[0]):
                    there[0].copy_(host[0], non_blocking=True)
            if outwards:
                with torch.cuda.stream(streams[1]):
                    host[1].copy_(there[1], non_blocking=True)
            best = max(best, (megabytes << 20) / (clock(device) - begun))
        return best

    return {"in": rate(True, False), "out": rate(False, True), "each_way_at_once": rate(True, True)}


def update_seconds(device: torch.device, elements: int = 1 << 24) -> float:
    """Seconds of AdamW for one parameter with fp32 states on `device`."""
    parameters, gradients, first, second = (torch.zeros(elements, device=device) for _ in range(4))
    rule, best = rules_of(Optim()).elementwise, float("inf")
    for step in range(1, 6):
        begun = clock(device)
        rule.update(parameters, gradients, {"exp_avg": first, "exp_avg_sq": second}, step=step, learning_rate=1e-4,
                    weight_decay=0.01)
        best = min(best, clock(device) - begun)
    return best / elements


def expected(setting: Setting, parameters: int, link: dict[str, float], updates: dict[str, float]) -> dict[str, float]:
    """Seconds of the copies and the update: one after the other, and overlapped."""
    into, out = parameters * setting.bytes_in / link["in"], parameters * setting.bytes_out / link["out"]
    update = parameters * updates[setting.updated_on]
    both = parameters * max(setting.bytes_in, setting.bytes_out) / link["each_way_at_once"]
    return {"in_seconds": into, "out_seconds": out, "update_seconds": update, "serial_seconds": into + out + update,
            "overlapped_seconds": max(both, update)}


# ---------------------------------------------------------------------- the search


class Search:
    """Tries of growing size, within a time limit."""

    def __init__(self, options: argparse.Namespace, deadline: float) -> None:
        self._options, self._deadline, self.tries = options, deadline, []

    def run(self, name: str, layers: int, deadline: float) -> dict | None:
        """The findings of one try; None if it does not fit. TimeoutError when its time is up."""
        parameters = count_parameters(config_of(layers, self._options))
        host = SETTINGS[name].host_bytes * parameters
        if host > 0.9 * available_memory_bytes():
            return self._told(name, layers, None, f"needs {host / GIB:.0f} GiB of host memory")
        seconds = min(deadline, self._deadline) - time.monotonic()
        if seconds < _SMALLEST_SECONDS:
            raise TimeoutError
        command = [sys.executable, "-m", "benchmarks.gpu.memory", "--one-try", name, str(layers), "--hidden",
                   str(self._options.hidden), "--vocab", str(self._options.vocab), "--sequence",
                   str(self._options.sequence)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False,
                                  cwd=Path(__file__).parents[2])
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        if done.returncode == 0:
            return self._told(name, layers, json.loads(done.stdout.splitlines()[-1]), "fits")
        said = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        if done.returncode not in (_DOES_NOT_FIT, -9, 137):
            raise RuntimeError(f"{name} with {layers} layers failed:\n{done.stderr}")
        return self._told(name, layers, None, said)

    def _told(self, name: str, layers: int, found: dict | None, why: str) -> dict | None:
        print(f"{name:16} {layers:4} layers: {why}", flush=True)
        self.tries.append({"setting": name, "layers": layers, "fits": found is not None, "why": why})
        return found

    def largest(self, name: str, seconds: float) -> tuple[dict | None, dict[int, dict], str]:
        """The largest size that fits, to within an eighth; all sizes that fit, by layers; and what limits the size."""
        deadline, fits, fails = time.monotonic() + seconds, {}, None
        layers, bound = self._options.start_layers, "time"
        try:
            while fails is None or fails - max(fits, default=0) > max(1, fails // 8):
                found = self.run(name, layers, deadline)
                if found is None:
                    fails, bound = layers, self.tries[-1]["why"]
                else:
                    fits[layers] = found
                if fails is not None and fails <= 1:
                    break
                layers = 2 * layers if fails is None else (max(fits, default=0) + fails) // 2
        except TimeoutError:
            bound = "time"
        return fits[max(fits)] if fits else None, fits, bound


def measure(options: argparse.Namespace) -> list[dict]:
    """Search for the largest size of each setting, print and write the findings, and return the rows."""
    device, started = torch.device("cuda", 0), time.monotonic()
    link = measure_link(device)
    updates = {"device": update_seconds(device), "host": update_seconds(torch.device("cpu"))}
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name(0)}: {link['in'] / 1e9:.1f} GB/s in, {link['out'] / 1e9:.1f} out, "
          f"{link['each_way_at_once'] / 1e9:.1f} each way at once; AdamW {1e9 * updates['device']:.3f} ns a parameter "
          f"on the device, {1e9 * updates['host']:.3f} on the host")
    search, rows, common = Search(options, started + 60.0 * options.minutes), [], None
    for place, name in enumerate(options.only):
        left = started + 60.0 * options.minutes - time.monotonic()
        try:
            best, fits, bound = search.largest(name, left / (len(options.only) - place))
            if best is None:
                print(f"{name}: nothing fits ({bound})")
                continue
            common = common or best["layers"]
            smaller = min(common, best["layers"])
            same = fits.get(smaller) or search.run(name, smaller, float("inf"))
        except TimeoutError:
            same = None
        except RuntimeError as error:
            print(error, file=sys.stderr)
            rows.append({"setting": name, "failed": str(error).splitlines()[-1]})
            continue
        rows.append(row_of(name, best, same, bound, link, updates))
    print(table(("setting", "largest layers", "10^9 parameters", "peak GiB", "building GiB", "bytes/parameter",
                 "expected", "host GiB", "pinned GiB", "s/step", "same size: s/step", "end s", "overlapped s",
                 "serial s", "hidden"),
                [shown(row) for row in rows if "failed" not in row]))
    path = options.output or results_file("gpu", "memory")
    write_results(path, {"hidden": options.hidden, "vocab": options.vocab, "sequence": options.sequence, "link": link,
                         "update_seconds_per_parameter": updates, "common_layers": common, "rows": rows,
                         "settings": {name: asdict(setting) for name, setting in SETTINGS.items()},
                         "tries": search.tries})
    print(f"wrote {path}")
    return rows


def row_of(name: str, best: dict, same: dict | None, bound: str, link: dict[str, float], updates: dict[str, float]
           ) -> dict:
    """The row of one setting: its largest model, and its time at the size at which all were timed."""
    row = {"setting": name, "largest": best, "bound": bound, "same_size": same}
    if same is not None:
        row["expected"] = wanted = expected(SETTINGS[name], same["parameters"], link, updates)
        serial, end = wanted["serial_seconds"], same["end_seconds"]
        row["hidden"] = max(0.0, 1.0 - end / serial) if SETTINGS[name].bytes_in and same["lasting_bytes"] else None
    return row


def shown(row: dict) -> tuple[str, ...]:
    best, same, setting = row["largest"], row["same_size"], SETTINGS[row["setting"]]
    pinned = best["pinned_bytes"]
    times = ("-",) * 5
    if same is not None:
        wanted, hidden = row["expected"], row["hidden"]
        times = (f"{same['step_seconds']:.3f}", f"{same['end_seconds']:.3f}", f"{wanted['overlapped_seconds']:.3f}",
                 f"{wanted['serial_seconds']:.3f}", "-" if hidden is None else f"{hidden:.2f}")
    return (row["setting"], str(best["layers"]), f"{best['parameters'] / 1e9:.2f}", f"{best['peak_bytes'] / GIB:.1f}",
            f"{best['building_bytes'] / GIB:.1f}", f"{best['lasting_bytes'] / best['parameters']:.2f}",
            f"{setting.device_bytes:.0f}", f"{best['host_bytes'] / GIB:.1f}",
            "-" if pinned is None else f"{pinned / GIB:.1f}", f"{best['step_seconds']:.3f}", *times)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=25.0, help="for all settings together")
    made.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--vocab", type=int, default=50304)
    made.add_argument("--sequence", type=int, default=1024)
    made.add_argument("--start-layers", type=int, default=16, help="the first size that is tried")
    made.add_argument("--output", type=Path, help="the file of results; by default benchmarks/results/gpu/memory-DATE")
    made.add_argument("--one-try", nargs=2, metavar=("SETTING", "LAYERS"), help="one size, in this process")
    return made.parse_args(arguments)


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("benchmarks.gpu.memory: this machine has no CUDA device, so there is nothing to measure")
        return 0
    if options.one_try:
        return one_try(options.one_try[0], int(options.one_try[1]), options)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
