"""One case: some contenders on the same work, block by block in turn, over several rounds.

    round 0    A A A A  B B B B  C C C C  ...      each letter a step; the first of each block is not timed
    round 1    ...  C C C C  B B B B  A A A A      backwards, so that a drift of the machine favours none

All ratios are formed within a round. Processes are kept from round to round if memory allows, and sleep between their
turns; otherwise each block starts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import psutil

from benchmarks.pipeline.block_times import BlockTimes, mean_times
from benchmarks.pipeline.bounds import best_cut, bound_seconds
from benchmarks.pipeline.contender import POLICIES, Contender, contenders, ours
from benchmarks.pipeline.team import Block, Stand, Team
from benchmarks.pipeline.workload import Workload

SCENARIOS = ("plain", "delay", "slow-stage", "jitter", "curve")
DELAY_FORWARDS = 0.3
"""Latency of every message in the scenario "delay", in forward times of a stage."""
SLOW_FACTOR, JITTER = 1.5, 0.5
LOSS_TOLERANCE = 1e-4
"""Relative tolerance: fp32 sums in different orders differ by less, a wrong gradient by more from the second step
on."""

_IDLE_BYTES, _ACTIVE_BYTES = 400 << 20, 2 << 30
"""Memory of a process between its turns, and additional memory of the contender whose turn it is."""


class LossesDiffer(RuntimeError):
    """A contender that does not do the work of the others; its times mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A comparison. boundaries: the cut with one stage per rank; None for the best cut by measured block times."""

    workload: Workload
    ranks: int
    scenario: str = "plain"
    boundaries: tuple[int, ...] | None = None
    wanted: Callable[[Contender], bool] = lambda contender: True
    ours_settings: tuple[tuple[str, object], ...] = ()
    """Settings of the engine for all our contenders, in addition to those of the scenario."""


def run_case(case: Case, stand: Stand, *, rounds: int, steps: int, say: Callable[[str], None] = print) -> dict:
    """All measurements, as JSON can represent them. Raises LossesDiffer, or TeamFailed with a rank's output."""
    workload, loops = case.workload, min(case.ranks, stand.cores)
    times_team = Team(Contender(name="times", kind="times", ranks=loops), workload, stand)
    teams: dict[str, Team] = {}
    try:
        times_team.wait_ready()
        times = mean_times(times_team.run(2 * steps).reports)
        chosen = [with_cut(contender, case, times) for contender in _contenders(case, times, stand.cores)
                  if case.wanted(contender)]
        keep = (sum(contender.ranks for contender in chosen) * _IDLE_BYTES + _ACTIVE_BYTES
                < psutil.virtual_memory().available)
        say(f"{case.scenario}, {case.ranks} ranks, {workload.microbatches} microbatches: {len(chosen)} contenders, "
            f"processes {'kept from round to round' if keep else 'started for each block'}")
        found = {contender.name: _Found(contender) for contender in chosen}
        all_times = []
        for number in range(rounds):
            round_times = mean_times(times_team.run(steps).reports)
            all_times.append(round_times)
            for contender in chosen if number % 2 == 0 else chosen[::-1]:
                team = teams.get(contender.name)
                if team is None:
                    team = teams[contender.name] = Team(contender, workload, stand)
                    team.wait_ready()
                    found[contender.name].ready(team)
                    check_losses({name: one.losses for name, one in found.items() if one.losses})
                block = team.run(steps)
                found[contender.name].blocks.append(block)
                found[contender.name].bounds.append(bound_seconds(contender, workload, round_times, stand.cores,
                                                                  found[contender.name].order))
                say(f"  round {number + 1}/{rounds}  {contender.name:28} {1e3 * block.seconds:9.1f} ms/step")
                if not keep:
                    teams.pop(contender.name).stop()
        return {"scenario": case.scenario, "ranks": case.ranks, "workload": asdict(workload), "cores": stand.cores,
                "processes_kept": keep, "pinned": stand.pin and case.ranks <= stand.cores,
                "block_times": [asdict(one) for one in all_times],
                "contenders": [one.as_json() for one in found.values()]}
    except BaseException:
        for team in (times_team, *teams.values()):
            team.kill()
        raise
    finally:
        for team in (times_team, *teams.values()):
            team.stop()


class _Found:
    """Measurements of one contender."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.losses: tuple[float, ...] = ()
        self.order = None
        self.blocks: list[Block] = []
        self.bounds: list[float | None] = []

    def ready(self, team: Team) -> None:
        self.losses, self.order = team.losses, team.reports[0].get("order")

    def as_json(self) -> dict:
        return {"name": self.contender.name, "kind": self.contender.kind, "ranks": self.contender.ranks,
                "launch": self.contender.launch, "settings": dict(self.contender.settings), "losses": self.losses,
                "rounds": [{"step_seconds": block.step_seconds, "seconds": block.seconds, "bound_seconds": bound,
                            "cpu_seconds": block.cpu_seconds, "peak_bytes": block.peak_bytes,
                            "peak_above_imports_bytes": block.peak_above_imports_bytes,
                            "seconds_by_category": [report.get("seconds") for report in block.reports]}
                           for block, bound in zip(self.blocks, self.bounds, strict=True)]}


def check_losses(losses: dict[str, Sequence[float]]) -> None:
    """LossesDiffer unless all contenders have the first one's losses in every warm-up step, to fp32 rounding."""
    (reference, wanted), *others = losses.items()
    for name, got in others:
        if len(got) != len(wanted) or any(abs(a - b) > LOSS_TOLERANCE * abs(a)
                                          for a, b in zip(wanted, got, strict=True)):
            raise LossesDiffer(f"no ratios: {name} does not do the same work. Losses of the first steps:\n"
                               f"  {reference}: {wanted}\n  {name}: {got}")


def with_cut(contender: Contender, case: Case, times: BlockTimes) -> Contender:
    """`contender` with the boundaries of its stages: those of the case, or the best ones if it has more stages."""
    if contender.kind not in ("torch", "ours"):
        return contender
    per_rank = 1
    if contender.kind == "torch":
        from benchmarks.pipeline.torch_schedules import stages_per_rank  # imports torch's compiler

        per_rank = stages_per_rank(contender.settings["schedule"])
    boundaries = case.boundaries if case.boundaries is not None and per_rank == 1 else best_cut(
        times, case.workload, case.ranks, per_rank)
    return replace(contender, settings={**contender.settings, "boundaries": boundaries})


def _contenders(case: Case, times: BlockTimes, cores: int) -> list[Contender]:
    ranks, settings = case.ranks, dict(case.ours_settings)
    everyone = [replace(one, settings={**one.settings, **settings}) if one.kind == "ours" else one
                for one in contenders(ranks, cores)]
    if case.scenario == "plain":
        return everyone
    if case.scenario == "curve":
        anchors = [contender for contender in everyone
                   if contender.name in ("ceiling", "torch-1f1b", "ours-1f1b-mpi", "ours-1f1b-gloo")]
        return anchors + _grid(case, times)
    slow = {"delay": {"latency_seconds": DELAY_FORWARDS * sum(times.forward) / ranks},
            "slow-stage": {"slowness": {"stage": 1, "factor": SLOW_FACTOR}},
            "jitter": {"slowness": {"jitter": JITTER}}}[case.scenario]
    return [ours(policy, transport, ranks, **{**settings, **slow}) for transport in ("mpi", "gloo")
            for policy in POLICIES]


def _grid(case: Case, times: BlockTimes) -> list[Contender]:
    """Message-driven with several in-flight limits (f) and byte budgets (d): multiples of the bytes that the deferred
    products of one microbatch keep alive on an average stage."""
    alive = sum(times.alive_bytes[:-1]) // case.ranks
    return [ours("message-driven", transport, case.ranks, f" f{in_flight} d{share:g}",
                 **{**dict(case.ours_settings), "in_flight": in_flight, "defer_bytes": int(share * alive)})
            for transport in ("mpi", "gloo") for in_flight in (case.ranks, case.ranks + 1, 2 * case.ranks)
            for share in (0.0, 0.5, 1.0, 2.0)]
