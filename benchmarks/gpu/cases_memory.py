"""Cases of `benchmarks.gpu.suite`: memory, offload, overlap, and how far the host runs ahead."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.gpu import memory as sizes_that_fit
from benchmarks.gpu.case import Finding, Findings, Options, attempt, failure, peaks, synchronize
from benchmarks.gpu.device_events import covered_length, device_events
from benchmarks.gpu.programs import Program, batches, engine_of, world_of_one
from ranvier.config.resolve import Facts, resolve
from ranvier.config.run import Batch, Launch, Memory, Optim, Run
from ranvier.cost.device_overhead import with_overhead
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.schedule.spans import StepWindow
from ranvier.system.pinned_memory import pinned_zeros

_350M = Program(layers=24, hidden=1024, heads=16, vocab=50304, sequence=1024, precision="bf16", steps=4, microbatches=2,
                samples=2)
DRY = Program(layers=1, precision="bf16", steps=3)


def pinned(options: Options) -> Findings:
    """Bytes that 20.1 GiB of pinned memory take, by torch's allocator and registered, and the seconds that this
    takes."""
    elements = int(options.sized(20.1, 1e-6) * 2**28)
    found: dict[str, float] = {}
    if not options.dry_run:  # without a driver there is nothing to pin
        began = time.perf_counter()
        registered = pinned_zeros(elements, torch.float32)
        found["registered_seconds"] = time.perf_counter() - began
        found["registered_is_pinned"] = float(registered.is_pinned())
        stream = torch.cuda.Stream(options.device)
        there = torch.empty(min(1 << 26, elements), device=options.device)
        began = time.perf_counter()
        with torch.cuda.stream(stream):
            there.copy_(registered[:len(there)], non_blocking=True)
        found["copy_returned_after_seconds"] = time.perf_counter() - began
        stream.synchronize()
        found["copy_seconds"] = time.perf_counter() - began
        del registered
        began = time.perf_counter()
        torch.zeros(elements, pin_memory=True)
        found["allocator_seconds"] = time.perf_counter() - began
        found["allocator_gib"] = (sizes_that_fit.pinned_bytes() or 0) / 2**30
    yield {**found, "says": f"registered in {found.get('registered_seconds', 0):.1f} s; torch's allocator took "
                             f"{found.get('allocator_gib', 0):.1f} GiB"}


def fits(options: Options, setting: str, layers: int) -> Findings:
    """Whether a GPT of hidden 4096 and sequence 1024 with this many layers trains if every layer is recomputed."""
    asked = sizes_that_fit.parse(options.sized(["--hidden", "4096"],
                                               ["--hidden", "128", "--vocab", "64", "--sequence", "16"]))
    config = sizes_that_fit.config_of(options.sized(layers, 1), asked)
    row = {"setting": setting, "layers": layers, "parameters": sizes_that_fit.count_parameters(config)}
    began = time.monotonic()
    try:
        found = sizes_that_fit.try_ours(config, sizes_that_fit.SETTINGS[setting], options.device)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        yield {**row, **failure(error), **peaks(options.device)}
        return
    yield {**row, "seconds": time.monotonic() - began,
           "pinned": options.sized(sizes_that_fit.pinned_bytes, lambda: None)(), **found, **peaks(options.device)}


def predict(options: Options) -> Findings:
    """Predicted against measured bytes, by offload, recomputation and microbatch."""
    base, device = options.sized(_350M, DRY), options.device

    def measure(offload: str, recompute: int | str, samples: int) -> Finding:
        optim = {"offload": offload, "offload_share": 0.5} if offload == "hybrid" else {"offload": offload}
        program = replace(base, samples=samples, optim=optim, memory={"recompute": recompute})
        run = Run(mesh=Mesh(), model=program.transformer, precision="bf16", optim=Optim(**program.optim),
                  batch=Batch(global_size=samples * program.microbatches, microbatch_size=samples),
                  memory=Memory(**program.memory), launch=Launch(device=device.type))
        (predicted,) = laid_out(resolve(run, Facts(device=device.type)))[1]
        row = {"predicted": predicted.device_bytes, "with_overhead": with_overhead(predicted).device_bytes}
        if device.type == "cuda":
            torch.cuda.init()  # before this, torch 2.11 resets nothing
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        with engine_of(program, world_of_one(device)) as engine:
            for batch in batches(program, Mesh(), 0):
                engine.train_batch(batch)
            synchronize(device)
            if device.type == "cuda":
                free, total = torch.cuda.mem_get_info(device)
                row |= {"allocated": torch.cuda.max_memory_allocated(device),
                        "reserved": torch.cuda.max_memory_reserved(device),
                        "outside": total - free - torch.cuda.memory_reserved(device)}
                row["predicted_over_allocated"] = row["predicted"] / row["allocated"]
        return row

    for offload, recompute, samples in options.sized(
            (("none", "none", 2), ("none", "none", 8), ("none", 1, 2), ("stream", "none", 2), ("hybrid", "none", 2),
             ("host", 1, 8)),
            (("none", "none", 2), ("hybrid", "none", 2))):
        yield {"offload": offload, "recompute": recompute, "samples": samples,
               **attempt(partial(measure, offload, recompute, samples))}


def offload_overlap(options: Options) -> Findings:
    """Share of the copies of streamed states that the update and other copies hide, by the device's own times."""
    program = replace(options.sized(_350M, DRY), optim={"offload": "stream"})
    device = options.device
    with engine_of(program, world_of_one(device)) as engine:
        steps = list(batches(program, Mesh(), 0))
        for batch in steps[:-1]:
            engine.train_batch(batch)
        synchronize(device)
        events = device_events(lambda: engine.train_batch(steps[-1]), device)
    intervals: dict[str, list[tuple[float, float]]] = {"in": [], "out": []}
    for name, start, stop in events:
        way = {"memcpy htod": "in", "memcpy dtoh": "out"}.get(name.lower()[:11])
        if way is not None:
            intervals[way].append((start, stop))
    into, out = (covered_length(intervals[way]) for way in ("in", "out"))
    both = into + out - covered_length(intervals["in"] + intervals["out"])
    share = both / min(into, out) if min(into, out) else 0.0
    yield {"in_ms": into / 1e3, "out_ms": out / 1e3, "share_at_once": share,
            "says": f"copies in {into / 1e3:.1f} ms, out {out / 1e3:.1f} ms, {share:.0%} of the smaller at once"}


def run_ahead(options: Options) -> Findings:
    """The device's spans of a step's actions (the timeline's) against the time the host takes to launch them."""
    program = replace(options.sized(_350M, DRY), microbatches=4)
    with engine_of(program, world_of_one(options.device)) as engine:
        steps = list(batches(program, Mesh(), 0))
        engine.timeline.begin_step()
        launched, windows = [], list[StepWindow]()
        for number, batch in enumerate(steps):
            began = time.perf_counter()
            engine.train_batch(batch)
            launched.append(time.perf_counter() - began)
            windows += engine.timeline.end_step(number)
        windows += engine.timeline.begin_step()  # the last step's, on a device
        spans = windows[-1].spans
    worked = sum(span.seconds for span in spans if span.category in ("forward", "backward", "weight", "optimizer"))
    yield {"launch_seconds": median(launched), "device_seconds": worked,
            "says": f"the host launched a step in {1e3 * median(launched):.1f} ms, the device worked "
                    f"{1e3 * worked:.1f} ms"}
