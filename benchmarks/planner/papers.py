"""The planner against every usable number of the papers.

    python -m benchmarks.planner.papers [--output FILE]

AxoNN (Singh and Bhatele, 2022): 12 to 100 billion parameters on 48 to 384 V100 of Summit, with its own configuration:
message-driven, weight gradients not deferred, optimizer streamed from the host, its rule for checkpoints, equal numbers
of blocks on each stage, and PyTorch's autograd and checkpoints (`as_published` of `step_cost`). DeepSpeed and
Megatron-LM stand for their rows of Table II with 1F1B, messages that hold stages up, Megatron's tensor parallelism
inside a stage, and for DeepSpeed sharded optimizer states. Optimus (Xu et al., 2021): 24 layers on 4 to 64 RTX 5000 of
Frontera, its own 2D scheme against Megatron's; four cells of its tables that contradict their own times are left out.
Nothing here is measured: all of it is arithmetic on shipped clusters. Full steps are predicted by `ranvier simulate`;
parts of a step, and searches that compare very many steps, by the cost law.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean, median

from benchmarks.planner.standing import simulated
from benchmarks.record import results_file, write_results
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Batch, Pipeline, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.collectives import place_groups, received_seconds
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.step import Cost, StageCost
from ranvier.mesh import Mesh
from ranvier.pictures.figures import COLOURS, INK, new_figure, remove_frame
from ranvier.planner.count import laid_out
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work

BILLIONS = (12, 24, 50, 100)
AXONN = {12: (8, 6, 8), 24: (4, 12, 8), 50: (4, 24, 8), 100: (2, 48, 8)}
"""Billions of parameters -> microbatch, G_inter, G_data (Table II)."""
OTHERS = {"DeepSpeed": {12: (2, 3, 2, 8), 24: (2, 3, 4, 8), 50: (1, 3, 16, 4), 100: (1, 3, 32, 4)},
          "Megatron-LM": {12: (8, 3, 16, 1), 24: (1, 3, 16, 2), 50: (8, 6, 32, 1), 100: (4, 12, 32, 1)}}
"""Microbatch, G_intra, G_inter, G_data."""
OPTIMUS = (("weak", "Megatron", 4, 60, 2048, 0.0793, 0.2613), ("weak", "Megatron", 16, 60, 4096, 0.2081, 0.5149),
           ("weak", "Megatron", 36, 40, 6120, 0.3379, 0.7955), ("weak", "Megatron", 64, 30, 8192, 0.4638, 1.0963),
           ("weak", "Optimus", 4, 96, 2048, 0.0985, 0.2979), ("weak", "Optimus", 16, 192, 4096, 0.1764, 0.5312),
           ("weak", "Optimus", 36, 288, 6120, 0.1901, 0.5759), ("weak", "Optimus", 64, 384, 8192, 0.2589, 0.7935),
           ("strong", "Megatron", 4, 12, 3072, 0.1225, 0.4749), ("strong", "Megatron", 16, 12, 3072, 0.1143, 0.4293),
           ("strong", "Megatron", 36, 12, 3096, 0.1212, 0.4512), ("strong", "Megatron", 64, 12, 3072, 0.1195, 0.5306),
           ("strong", "Optimus", 4, 24, 3072, 0.1888, 0.5691), ("strong", "Optimus", 16, 24, 3072, 0.1950, 0.5704),
           ("strong", "Optimus", 36, 24, 3072, 0.1625, 0.4764), ("strong", "Optimus", 64, 24, 3072, 0.1253, 0.3716))
"""Tables 2 and 3: scaling, scheme, devices, batch, width, seconds of forward and backward for one sequence."""


SIZES = (1, 2, 4, 8, 16, 32)
"""Microbatches."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number. published: None if the paper gives a range, which is `within`."""

    what: str
    unit: str
    predicted: float
    published: float | None = None
    within: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Relative error; 0 inside a range, and from its nearer end outside it."""
        if self.published is not None:
            return self.predicted / self.published - 1.0
        low, high = self.within
        return self.predicted / low - 1.0 if self.predicted < low else max(0.0, self.predicted / high - 1.0)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One model's row of Table II. Keys are (microbatch, G_inter, G_data). ratio: the published configuration's time
    over that of the predicted best. dropped: faster configurations that do not fit. problem: why the published one
    would not fit."""

    published: tuple[int, int, int]
    predicted: tuple[int, int, int]
    ratio: float
    possible: int
    dropped: dict[tuple[int, int, int], str]
    problem: str | None


def _as_published(model: Transformer) -> Transformer:
    """The model with unfused attention, and nothing compiled."""
    return replace(model, attention_kernel="math", compile=False)


class Papers:
    """All predictions; blocks are counted once for each model and tensor mesh."""

    def __init__(self, summit: Cluster | None = None, frontera: Cluster | None = None, work: Work | None = None
                 ) -> None:
        self.summit, self.frontera = summit or load_cluster("summit"), frontera or load_cluster("frontera")
        self.work = work or Work()

    # --- AxoNN -------------------------------------------------------------------------------------------------------

    def axonn(self, billions: int, microbatch: int, pipe: int, data: int, batch: int = 16384, **optim: object
              ) -> ResolvedRun:
        run = resolve(read.merge([read.load(f"gpt-{billions}b")[1]]).run)
        blocks = 2 * run.model.num_layers // pipe  # of a stage, without embedding and head
        return replace(run, mesh=Mesh(pipe=pipe, data=data), model=_as_published(run.model),
                       optim=replace(run.optim, **optim),
                       batch=Batch(global_size=batch, microbatch_size=microbatch),
                       pipeline=Pipeline(boundaries=tuple(1 + blocks * stage for stage in range(1, pipe)),
                                         defer_bytes=0),
                       launch=replace(run.launch, device="cuda"))

    def on_summit(self, run: ResolvedRun, *, exact: bool = True) -> Cost:
        return run_cost(run, self.summit, self.work.stages(run), exact=exact, as_published=True)

    def other(self, name: str, billions: int, *, data: int | None = None, batch: int = 16384,
              microbatch: int | None = None, exact: bool = True) -> Cost:
        size, col, pipe, replicas = OTHERS[name][billions]
        run = self.axonn(billions, microbatch or size, pipe, data or replicas, batch, offload="none",
                         shard=name == "DeepSpeed")
        run = replace(run, mesh=run.mesh.resized(col=col), tensor=replace(run.tensor, scheme="megatron"),
                      pipeline=replace(run.pipeline, policy="1f1b"), memory=replace(run.memory, recompute=1))
        return self.on_summit(run, exact=exact)

    def table_two(self, billions: int) -> Choice:
        """The best of every (microbatch, G_inter, G_data) that AxoNN could have had, by time and memory."""
        chosen, ranks = AXONN[billions], prod(AXONN[billions][1:])
        layers = self.axonn(billions, *chosen).model.num_layers
        runs = {(size, pipe, ranks // pipe): self.axonn(billions, size, pipe, ranks // pipe)
                for pipe in range(2, ranks + 1) if not ranks % pipe and not layers % pipe for size in SIZES}
        timed = {key: self.on_summit(run, exact=False).seconds for key, run in runs.items()}
        dropped = {}
        for key in sorted(timed, key=timed.get):
            problem = self._too_large(runs[key])
            if problem is None:
                return Choice(published=chosen, predicted=key, ratio=timed[chosen] / timed[key], dropped=dropped,
                              possible=len(timed), problem=self._too_large(runs[chosen]))
            dropped[key] = problem
        raise AssertionError("nothing fits")

    def _too_large(self, run: ResolvedRun) -> str | None:
        """Why the run does not fit, with the interval of recomputation that needs least memory: with attention scores
        kept, the interval of the paper's rule would not fit in the 12 B model's published mesh (16.9 of 14.6 GiB)."""
        _, memory = laid_out(replace(run, memory=replace(run.memory, recompute="auto")))
        device = self.summit.device
        worst = max(entry.device_bytes for entry in memory)
        room = usable_bytes(device)
        return f"{worst / 2**30:.1f} of {room / 2**30:.1f} GiB" if worst > room else None

    def axonn_rows(self, others: bool = True) -> Iterator[Row]:
        """Rows of AxoNN. others: also those of DeepSpeed and Megatron-LM."""
        for pipe, data, seconds, reducing in ((24, 2, 46.08, 0.62), (6, 8, 34.05, 4.32)):
            found = self.on_summit(self.axonn(12, 1, pipe, data, 2048, chunk_buckets=1 << 20))
            yield Row(what=f"12 B, G_inter {pipe}, batch 2048: pipelining", unit="s", predicted=found.pipeline_seconds,
                      published=seconds)
            yield Row(what=f"12 B, G_inter {pipe}, batch 2048: data-parallel phase", unit="s",
                      predicted=found.reduction_seconds, published=reducing)
        for offload, published in (("none", 520.0), ("stream", 130.24)):
            run = self.axonn(12, 1, 24, 2, 2048, offload=offload, bucket_size=16_000_000)
            yield Row(what=f"12 B, G_inter 24, offload {offload}: memory of all devices", unit="GB",
                      predicted=self.axonn_bytes(run) / 1e9, published=published)
        whole = {}
        for billions in BILLIONS:
            whole[billions] = self.on_summit(self.axonn(billions, *AXONN[billions]))
            yield Row(what=f"{billions} B: share of the peak", unit="%", within=(49.4, 54.78),
                      predicted=100 * whole[billions].hardware_utilisation)
        yield from self.figure_six()
        if not others:
            return
        yield from self.figure_nine(whole)
        for name, limits, ratio in (("DeepSpeed", (39.0, 42.0), 1.18), ("Megatron-LM", (21.0, 41.0), 2.46)):
            for billions in BILLIONS:
                found = self.other(name, billions)
                yield Row(what=f"{billions} B, {name}: share of the peak", unit="%", within=limits,
                          predicted=100 * found.hardware_utilisation)
                if billions == 100:
                    yield Row(what=f"100 B, {name}: time over AxoNN's", unit="x", published=ratio,
                              predicted=found.seconds / whole[100].seconds)
        strong = self.on_summit(self.axonn(12, 8, 6, 64, 32768))
        for name, published in (("DeepSpeed", 1.1147), ("Megatron-LM", 1.1814)):
            data = 8 * OTHERS[name][12][3]
            yield Row(what=f"12 B on 384, batch 32768, {name}: time over AxoNN's", unit="x", published=published,
                      predicted=self.other(name, 12, data=data, batch=32768).seconds / strong.seconds)

    def figure_six(self) -> Iterator[Row]:
        """12 B on 48 with optimizer states on the devices (G_inter 24) and streamed from the host (G_inter 6); the
        all-reduce overlaps with nothing."""
        before, after = (self.on_summit(self.axonn(12, 1, pipe, 48 // pipe, 2048, chunk_buckets=1 << 20, **optim))
                         for pipe, optim in ((24, {"offload": "none"}), (6, {"bucket_size": 16_000_000})))
        yield Row(what="12 B, Figure 6: time of a batch saved by less memory", unit="%", published=13.0,
                  predicted=100 * (1 - after.seconds / before.seconds))
        yield Row(what="12 B, Figure 6: all-reduce over optimizer", unit="x", published=2.5,
                  predicted=after.reduction_seconds / after.update_seconds)

    def figure_nine(self, axonn: Mapping[int, Cost]) -> Iterator[Row]:
        """Days of a training on 3e11 tokens that AxoNN saves against DeepSpeed. axonn: by billions."""
        for billions in BILLIONS:
            saved = self.other("DeepSpeed", billions).days() - axonn[billions].days()
            known = {"published": 22.0} if billions == 100 else {"within": (30.0, 365.0)}
            yield Row(what=f"{billions} B, Figure 9: days saved against DeepSpeed", unit="d", predicted=saved, **known)

    def figure_eleven(self) -> dict[int, dict[str, float]]:
        """Devices -> framework -> days of 12 B by strong scaling: batches of 4,096 on 48 devices to 32,768 on 384."""
        found = {}
        for times in (1, 2, 4, 8):
            pipe, replicas, batch = *AXONN[12][1:], 4096 * times
            costs = {"AxoNN": self.on_summit(self.axonn(12, AXONN[12][0], pipe, replicas * times, batch))} | {
                name: self.other(name, 12, data=OTHERS[name][12][3] * times, batch=batch) for name in OTHERS}
            found[48 * times] = {name: cost.days() for name, cost in costs.items()}
        return found

    def theorem(self) -> dict[int, float]:
        """G_inter -> computation over the bytes that a rank sends between stages, times G_inter, relative to the first
        value: Theorem 5.3 says that it is 1. Without recomputation, which is less with shorter segments."""
        found = {}
        for pipe in (6, 12, 24, 48):
            run = self.axonn(12, 1, pipe, 48 // pipe, 2048)
            cost = self.on_summit(replace(run, memory=replace(run.memory, recompute="none")), exact=False)
            computing = fmean(stage.microbatch_seconds for stage in cost.stages) * 2048 * pipe / 48
            found[pipe] = computing / cost.link_bytes["pipe"] * pipe
        return {pipe: each / found[6] for pipe, each in found.items()}

    def table_two_of_others(self) -> dict[tuple[str, int], tuple[int, int, float]]:
        """(Framework, billions) -> the published microbatch, the fastest one of its mesh, and the time of the first
        over that of the second, regardless of memory."""
        found = {}
        for name, meshes in OTHERS.items():
            for billions, (published, *_, replicas) in meshes.items():
                sizes = [size for size in SIZES if 16384 % (size * replicas) == 0]
                timed = {size: self.other(name, billions, microbatch=size, exact=False).seconds for size in sizes}
                best = min(timed, key=timed.get)
                found[name, billions] = published, best, timed[published] / timed[best]
        return found

    def axonn_bytes(self, run: ResolvedRun) -> int:
        """Bytes on all devices: gradients are summed where they are; without offload there are also fp32 gradients (20
        bytes a parameter)."""
        stages, memory = laid_out(run)
        wide = 4 * sum(row.num_trainable for row in stages.rows) * run.mesh.data if run.optim.offload == "none" else 0
        return wide + sum(entry.ranks * (entry.device_bytes - entry.device["reduction"]) for entry in memory)

    def figure_five(self) -> dict[int, float]:
        """G_inter -> seconds of the pipelining phase, without optimizer states, as in the paper."""
        return {pipe: self.on_summit(self.axonn(12, 1, pipe, 48 // pipe, 2048)).pipeline_seconds
                for pipe in (6, 12, 24, 48)}

    def figure_eight(self) -> dict[int, float]:
        """k -> seconds of all-reduce and optimizer together; k = 0 is without any overlap."""
        found = {}
        for k in (0, 1, 2, 4, 8, 16, 32, 64):
            run = self.axonn(12, 1, 6, 8, 2048, bucket_size=16_000_000, chunk_buckets=k or 1 << 20)
            steady = replace(run, precision="bf16", guard=replace(run.guard, bad_step="none"))
            summit = replace(self.summit, device=replace(self.summit.device, rates={
                "bf16": self.summit.device.rates["fp16"]}))
            found[k] = run_cost(steady, summit, self.work.stages(steady), exact=False,
                                as_published=True).stages[0].after_seconds  # sums begin when the backward is over
        return found

    # --- Optimus -----------------------------------------------------------------------------------------------------

    def optimus_seconds(self, scheme: str, devices: int, batch: int, hidden: int) -> tuple[float, float]:
        """Seconds of forward and backward of the 24 layers for one sequence, without embedding and head."""
        stage = self.optimus_stage(scheme, devices, batch, hidden)
        return stage.forward_seconds / batch, (stage.backward_seconds + stage.weight_seconds) / batch

    def optimus_stage(self, scheme: str, devices: int, batch: int, hidden: int) -> StageCost:
        side = round(devices ** 0.5)
        mesh = Mesh(row=side, col=side, tile=(2, 2)) if scheme == "Optimus" else Mesh(col=devices)
        heads = {"Optimus": side, "Megatron": devices}[scheme]
        run = ResolvedRun(mesh=mesh, batch=Batch(global_size=batch, microbatch_size=batch), precision="fp32",
                  model=_as_published(Transformer(num_layers=24, hidden=hidden, heads=heads, vocab=1024, sequence=512)))
        run = replace(run, memory=replace(run.memory, recompute=1), launch=replace(run.launch, device="cuda"),
                      tensor=replace(run.tensor, scheme="summa" if scheme == "Optimus" else "megatron"))
        stages = self.work.stages(run)
        blocks = [block for block in stages[0] if block.name.startswith("layer")]
        stage = run_cost(run, self.frontera, [blocks], exact=False, as_published=True).stages[0]
        if scheme == "Optimus":
            return stage
        inputs = 24 * blocks[0].input_bytes * (devices - 1) / devices  # are sharded, and gathered for the recomputation
        gathered = received_seconds(inputs, 24 * (devices - 1), place_groups(mesh, "col", 4), self.frontera)
        return replace(stage, backward_seconds=stage.backward_seconds + gathered,
                       exchange_seconds=stage.exchange_seconds + gathered)

    def optimus_rows(self) -> Iterator[Row]:
        for scaling, scheme, devices, batch, hidden, forward, backward in OPTIMUS:
            found = self.optimus_seconds(scheme, devices, batch, hidden)
            for name, predicted, published in zip(("forward", "backward"), found, (forward, backward), strict=True):
                yield Row(what=f"{scaling} scaling, {scheme} on {devices}: {name}", unit="s", predicted=predicted,
                          published=published)

    def rankings(self) -> list[tuple[str, str, str]]:
        """(case, the faster scheme in the paper, in the prediction), for each scaling and number of devices."""
        found = []
        for scaling in ("weak", "strong"):
            for devices in (4, 16, 36, 64):
                rows = {row[1]: row for row in OPTIMUS if row[0] == scaling and row[2] == devices}
                said = {name: row[5] + row[6] for name, row in rows.items()}
                predicted = {name: sum(self.optimus_seconds(name, *row[2:5])) for name, row in rows.items()}
                found.append((f"{scaling} scaling, {devices} devices", min(said, key=said.get),
                              min(predicted, key=predicted.get)))
        return found


    def batch_limit(self, scheme: str, devices: int, hidden: int, heads: int) -> int:
        """Most sequences of 512 that 24 layers fit, forward and backward in fp32: parameters and gradients; each
        layer's input, divided among all devices in both schemes (an option of Megatron-LM's, without which it could
        not have had the published limit); and one layer's activations with their gradients, of which Megatron's
        devices all hold 10 parts of 34 (Korthikanti et al., 2022)."""
        device, sequence, layers = self.frontera.device, 512, 24
        states = 2 * 4 * 12 * layers * hidden ** 2 / devices
        inside = 34 / devices if scheme == "Optimus" else 10 + 24 / devices
        layer = 2 * 2 * (inside * sequence * hidden + 5 * heads * sequence ** 2 / devices)
        room = device.memory_bytes - device.reserved_bytes - states
        return int(room / (layer + 4 * layers * sequence * hidden / devices))

    def batch_rows(self) -> Iterator[Row]:
        limits = {scheme: self.batch_limit(scheme, 64, 8192, 128) for scheme in ("Optimus", "Megatron")}
        yield Row(what="64 devices, width 8192: largest batch of Optimus", unit="sequences", published=480.0,
                  predicted=limits["Optimus"])
        yield Row(what="64 devices, width 8192: largest batch, Optimus over Megatron", unit="x", published=8.0,
                  predicted=limits["Optimus"] / limits["Megatron"])

    def isoefficiency(self, scheme: str, share: float = 0.5) -> dict[int, int]:
        """Devices -> the least width (batch and heads in proportion) at which p devices are `share` of p times as fast
        as one."""
        found = {}
        for side in (4, 8, 16):
            devices, low, high = side * side, 0, 1

            def efficiency(width: int, side=side, devices=devices) -> float:
                hidden = width * devices
                batch = max(1, round(hidden * 96 / 2048 / side)) * side
                many, one = (self.optimus_stage(scheme, count, batch, hidden) for count in (devices, 1))
                return one.microbatch_seconds / devices / many.microbatch_seconds

            while efficiency(high) < share:
                low, high = high, 2 * high
            while high - low > max(1, high // 50):
                middle = (low + high) // 2
                low, high = (low, middle) if efficiency(middle) >= share else (middle, high)
            found[devices] = high * devices
        return found


class ByCommand(Papers):
    """The predictions, with full steps on Summit by `ranvier simulate`."""

    def on_summit(self, run: ResolvedRun, *, exact: bool = True) -> Cost:
        law = super().on_summit(run, exact=False)
        if not exact:
            return law
        with tempfile.TemporaryDirectory() as folder:
            read.write_changes(run, path := Path(folder) / "run.toml", {})
            found = simulated(path, "summit", as_published=True)
        return replace(law, seconds=found["step_seconds"], pipeline_seconds=found["pipeline_seconds"],
                       reduction_seconds=found["predicted"]["reduction_seconds"],
                       update_seconds=found["predicted"]["update_seconds"])


def growth(widths: dict[int, int]) -> float:
    """The power of p with which the problem (width cubed) grows, by least squares of the logarithms."""
    xs, ys = [log(devices) for devices in widths], [3 * log(width) for width in widths.values()]
    middle_x, middle_y = fmean(xs), fmean(ys)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - middle_x) ** 2 for x in xs)


def prod(sizes) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _as_json(choice: Choice) -> dict:
    return {**asdict(choice), "dropped": [[*key, reason] for key, reason in choice.dropped.items()]}


def markdown(rows: list[Row]) -> str:
    lines = ["| | published | predicted | error |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        published = f"{row.published:g}" if row.published is not None else "{:g} to {:g}".format(*row.within)
        lines.append(f"| {row.what}, {row.unit} | {published} | {row.predicted:.4g} | {row.error:+.1%} |")
    return "\n".join(lines) + "\n"


def median_error(rows: Iterable[Row]) -> float:
    """Median error of numbers that a paper gives, without ranges, inside which a prediction would count as exact."""
    return median(abs(row.error) for row in rows if row.published is not None)


def measure(say: Callable[[str], None] = print) -> dict:
    papers = ByCommand()
    rows = [*papers.axonn_rows(), *papers.optimus_rows(), *papers.batch_rows()]
    say(markdown(rows))
    middle, ranges = median_error(rows), [row for row in rows if row.within is not None]
    say(f"median error {middle:.1%} over {len(rows) - len(ranges)} numbers; within "
        f"{sum(row.error == 0 for row in ranges)} of {len(ranges)} ranges")
    choices = {billions: papers.table_two(billions) for billions in BILLIONS}
    for billions, one in choices.items():
        say(f"{billions} B: of {one.possible} (microbatch, G_inter, G_data) {one.predicted} is predicted to be best; "
            f"the paper's {one.published} takes {one.ratio:.3f} of its time"
            + (f" and would not fit: {one.problem}" if one.problem else ""))
    five, eight = papers.figure_five(), papers.figure_eight()
    say(f"Figure 5, s by G_inter: {', '.join(f'{k}: {v:.2f}' for k, v in five.items())}")
    say(f"Figure 8, s by k (0: no overlap): {', '.join(f'{k}: {v:.2f}' for k, v in eight.items())}")
    theorem, eleven, others = papers.theorem(), papers.figure_eleven(), papers.table_two_of_others()
    say(f"Theorem 5.3, 1 by the paper: {', '.join(f'{pipe}: {each:.2f}' for pipe, each in theorem.items())}")
    for devices, days in eleven.items():
        say(f"Figure 11, days on {devices}: {', '.join(f'{name} {each:.1f}' for name, each in days.items())}")
    for (name, billions), (published, best, ratio) in others.items():
        say(f"{name}, {billions} B: microbatch {best} is predicted to be fastest; the paper's {published} takes "
            f"{ratio:.3f} of its time")
    rankings = papers.rankings()
    for what, said, predicted in rankings:
        say(f"{what}: {said} is faster, predicted {predicted}")
    widths = {scheme: papers.isoefficiency(scheme) for scheme in ("Optimus", "Megatron")}
    for scheme, found in widths.items():
        say(f"{scheme}, width at which p devices are p / 2 times as fast as one: {found}; the problem grows with p to "
            f"the power of {growth(found):.2f}")
    return {"isoefficiency": widths, "growth": {scheme: growth(found) for scheme, found in widths.items()},
            "rows": [asdict(row) | {"error": row.error} for row in rows], "median_error": middle,
            "table_two": {key: _as_json(one) for key, one in choices.items()}, "figure_five": five,
            "figure_eight": eight, "rankings": rankings, "theorem": theorem, "figure_eleven": eleven,
            "table_two_of_others": [[*key, *values] for key, values in others.items()]}


def draw(results: dict, path: Path) -> None:
    """Draw predicted over published for every number, the trends of Figures 5 and 8, and isoefficiency."""
    figure = new_figure(13, 11)
    numbers, five, eight, widths = figure.subplot_mosaic(
        [["numbers", "five"], ["numbers", "eight"], ["numbers", "widths"]], width_ratios=[1.3, 1]).values()
    rows = results["rows"]
    for place, row in enumerate(rows):
        is_optimus = "scaling" in row["what"] or row["what"].startswith("64 devices")
        numbers.barh(place, 100 * row["error"], color=COLOURS["forward" if is_optimus else "backward"])
    numbers.axvspan(-15, 15, color="#EDEDED", zorder=0)
    numbers.set_yticks(range(len(rows)), [row["what"] + (" (a range)" if row["within"] else "") for row in rows],
                       fontsize=7)
    numbers.set_ylim(len(rows) - 0.5, -0.5)
    numbers.set_xlabel("predicted against published, %")
    numbers.set_title(f"{len(rows)} numbers of the AxoNN (orange) and Optimus (blue) papers; median error "
                      f"{100 * results['median_error']:.1f} %, ranges left out", fontsize=10, color=INK)
    five.plot(list(map(str, results["figure_five"])), list(results["figure_five"].values()), "o-",
              color=COLOURS["forward"])
    five.set(xlabel="G_inter, 12 B on 48", ylabel="seconds of pipelining", ylim=(0, None))
    eight.plot([str(k) for k in results["figure_eight"]], list(results["figure_eight"].values()), "o-",
               color=COLOURS["forward"])
    eight.set(xlabel="k, buckets a chunk (0: no overlap)", ylabel="s, all-reduce and optimizer", ylim=(0, None))
    for (scheme, found), colour in zip(results["isoefficiency"].items(), (COLOURS["forward"], COLOURS["backward"]),
                                       strict=True):
        widths.plot(list(found), list(found.values()), "o-", color=colour,
                    label=f"{scheme}: problem ~ p^{results['growth'][scheme]:.2f}")
    widths.set(xscale="log", yscale="log", xlabel="devices", ylabel="width for half of the ideal speed")
    widths.set_xticks(list(found), list(map(str, found)))
    widths.minorticks_off()
    widths.legend(fontsize=8)
    for axes in (numbers, five, eight, widths):
        remove_frame(axes)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of results; by default in benchmarks/results/planner")
    options = parser.parse_args()
    results = measure()
    path = options.output or results_file("planner", "papers")
    write_results(path, results)
    draw(results, path.with_suffix(".png"))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
