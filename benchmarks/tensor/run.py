"""A stack of GPT layers on several ranks: tensor parallelism and its peers, forward and backward, in one run.

    python -m benchmarks.tensor.run [--quick] [--only 'dtensor*' fsdp2] [--base dtensor-sp]

Contenders take turns in blocks of --steps timed steps after one untimed step, --rounds times, alternately forwards and
backwards through the list. If memory allows, their processes stay from round to round and sleep between their turns;
otherwise each block starts its own. Before any time counts, y, dx and all gradients are compared with plain PyTorch's.
Ratios are of speeds, above 1 is faster than the base, formed within each round: median [least, greatest].
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

import psutil
from torch.distributed import TCPStore

from benchmarks.memory.program import MIB, ratios, table
from benchmarks.pipeline.case import LOSS_TOLERANCE
from benchmarks.pipeline.team import ALLOCATORS, Stand, TeamFailed
from benchmarks.record import results_file, write_results
from benchmarks.tensor.contender import Contender, contenders
from benchmarks.tensor.stem import Stem, figures, reference
from benchmarks.tensor.team import PHASES, Block, StackTeam
from ranvier.system.machine import available_cores

_IDLE_BYTES, _ACTIVE_BYTES = 400 << 20, 2 << 30
"""Memory of a process between its turns, without weights; additional memory of the contender whose turn it is."""
_RATIOS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}


class WorkDiffers(RuntimeError):
    """A contender computes something else, so its times mean nothing."""


def measure(stem: Stem, chosen: Sequence[Contender], stand: Stand, *, rounds: int, steps: int,
            say: Callable[[str], None] = print) -> list[dict]:
    """One entry for each contender, as JSON can represent it. Raises WorkDiffers, or TeamFailed with a rank's
    output."""
    y, dx, gradients = reference(stem)
    wanted = figures(y, dx, gradients.items())
    del y, dx, gradients
    keep = (sum(contender.ranks for contender in chosen) * (_IDLE_BYTES + 4 * stem.num_parameters) + _ACTIVE_BYTES
            < psutil.virtual_memory().available)
    say(f"{len(chosen)} contenders, processes {'kept from round to round' if keep else 'started for each block'}")
    teams: dict[str, StackTeam] = {}
    blocks: dict[str, list[Block]] = {contender.name: [] for contender in chosen}
    found: dict[str, dict] = {}
    try:
        for number in range(rounds):
            for contender in chosen if number % 2 == 0 else chosen[::-1]:
                name = contender.name
                if name not in teams:
                    team = teams[name] = StackTeam(contender, stem, stand)
                    team.wait_ready()
                    found[name] = {"work_differs_by": check_work(name, team.losses, wanted),
                                   "saved_bytes": [report["saved_bytes"] for report in team.reports]}
                blocks[name].append(block := teams[name].run(steps))
                times = "  ".join(f"{phase} {1e3 * block.seconds(phase):.1f}" for phase in PHASES)
                say(f"  round {number + 1}/{rounds}  {name:32} {times} ms")
                if not keep:
                    teams.pop(name).stop()
    except BaseException:
        for team in teams.values():
            team.kill()
        raise
    finally:
        for team in teams.values():
            team.stop()
    return [{**asdict(contender), "ranks": contender.ranks, "pinned": stand.pin and contender.ranks <= stand.cores,
             "processes_kept": keep, **found[contender.name],
             "rounds": [asdict(block) for block in blocks[contender.name]],
             "milliseconds": {phase: 1e3 * median(block.seconds(phase) for block in blocks[contender.name])
                              for phase in PHASES}} for contender in chosen]


def check_work(name: str, got: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference; WorkDiffers if it is above that of fp32 sums in different orders."""
    differ_by = [abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]
    if not all(value <= LOSS_TOLERANCE for value in differ_by):  # nan is not
        raise WorkDiffers(f"no ratios: {name} does not compute what plain PyTorch does. Sums over y, dx, gradients:\n"
                          f"  plain PyTorch: {wanted}\n  {name}: {list(got)}")
    return max(differ_by)


def add_ratios(entries: Sequence[dict], base: str) -> None:
    """Add the speed relative to `base`, round by round, to each entry."""
    (against,) = (entry for entry in entries if entry["name"] == base)
    for entry in entries:
        entry["speed_over_base"] = {name: asdict(ratios(_seconds(against, phases), _seconds(entry, phases)))
                                    for name, phases in _RATIOS.items()}


def _seconds(entry: dict, phases: Sequence[str]) -> list[float]:
    """For each round, the median over its steps of the seconds of these phases together."""
    return [median(map(sum, zip(*(one["phase_seconds"][phase] for phase in phases), strict=True)))
            for one in entry["rounds"]]


def shown(entries: Sequence[dict], base: str) -> str:
    """The table."""
    def mib(entry: dict, name: str) -> str:
        return f"{max(max(one[name]) for one in entry['rounds']) / MIB:.0f}"

    lines = []
    for entry in entries:
        over = entry["speed_over_base"]
        lines.append((entry["name"], entry["transport"], "x".join(map(str, entry["mesh"])),
                      *(f"{entry['milliseconds'][phase]:.1f}" for phase in PHASES),
                      *(f"{over[name]['middle']:.3f} [{over[name]['least']:.3f}, {over[name]['greatest']:.3f}]"
                        for name in _RATIOS),
                      f"{max(entry['saved_bytes']) / MIB:.1f}", mib(entry, "peak_above_rest_bytes"),
                      mib(entry, "peak_above_imports_bytes"),
                      f"{median(one['cpu_seconds'] for one in entry['rounds']):.2f}",
                      f"{entry['work_differs_by']:.0e}"))
    return table(("contender", "transport", "mesh", *(f"{phase} ms" for phase in PHASES),
                  *(f"{name}, x {base}" for name in _RATIOS), "saved MiB", "peak above rest", "above imports",
                  "CPU s/step", "differs by"), lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps: does it work?")
    parser.add_argument("--output", type=Path, help="the file of results; default benchmarks/results/tensor/KIND-DATE")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="contenders, e.g. 'dtensor*'")
    parser.add_argument("--base", default="dtensor-sp", help="contender that the others are compared with")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="timed steps in each block")
    parser.add_argument("--no-pin", action="store_true", help="leave the ranks' cores to the kernel")
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), default="default",
                        help="glibc's settings, for everyone")
    for name, text in (("layers", ""), ("hidden", ""), ("heads", ""), ("sequence", ""),
                       ("microbatch", "sequences, of all ranks together")):
        parser.add_argument(f"--{name}", type=int, help=text)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.steps = options.steps or (2 if options.quick else 5)
    sizes = {"num_layers": options.layers, "hidden": options.hidden, "heads": options.heads,
             "sequence": options.sequence, "microbatch": options.microbatch}
    given = {name: value for name, value in sizes.items() if value is not None}
    quick = dict(num_layers=2, hidden=64, heads=4, sequence=32, microbatch=4) if options.quick else {}
    try:
        options.stem = Stem(**{**quick, **given})
    except ValueError as error:
        parser.error(str(error))
    everyone = contenders(options.ranks)
    options.contenders = [contender for contender in everyone
                          if any(fnmatch(contender.name, pattern) for pattern in options.only)]
    if options.base not in [contender.name for contender in options.contenders]:
        parser.error(f"--base {options.base} takes no part; contenders: {', '.join(one.name for one in everyone)}")
    return options


def kind(options: argparse.Namespace) -> str:
    """The kind of result: results of other sizes, or of selected contenders, do not replace this one's."""
    return f"stem-hidden-{options.stem.hidden}{'' if options.only == ['*'] else '-selected'}"


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    options = parse(arguments)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranvier-benchmark-") as folder:
        stand = Stand(store=store, port=store.port, folder=Path(folder), cores=available_cores(),
                      pin=not options.no_pin, allocator=options.allocator, warmup=1)
        try:
            entries = measure(options.stem, options.contenders, stand, rounds=options.rounds, steps=options.steps)
        except (WorkDiffers, TeamFailed) as error:
            raise SystemExit(str(error)) from None
    add_ratios(entries, options.base)
    print(shown(entries, options.base))
    path = options.output or results_file("tensor", kind(options), quick=options.quick)
    write_results(path, {"stem": asdict(options.stem), "base": options.base, "rounds": options.rounds,
                         "steps_per_round": options.steps, "allocator": options.allocator, "threads_per_rank": 1,
                         "contenders": entries})
    print(f"wrote {path}")
    return entries


if __name__ == "__main__":
    main()
