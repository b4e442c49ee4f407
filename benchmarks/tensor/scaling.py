"""Weak and strong scaling of the layers alone, as in Tables 2 and 3 of Xu et al., 2021 (Optimus), in sizes for CPUs.

    python -m benchmarks.tensor.scaling [--quick] [--kind weak strong] [--ranks 4 9] [--only 'summa*'] [--no-times]

weak: b, h and n in proportion to q = sqrt(ranks), with as many layers and as long sequences; strong: one size. Every
size is also run on 1 rank, in the same rounds: efficiency is that rank's time over ranks x time. If ranks share cores,
it is also given by cores, min(ranks, cores) x time, and by processor time, which excludes waits (except that a rank
that polls for messages uses some). Received bytes are counted (`counted`).

The last table grows the problem so that a rank's bytes per FLOP stay those of 4 ranks, separately for each line, with b
and n in proportion to h, and fits W ~ p^x over 4 ... 1024 ranks; `last` is x between the last two. Bytes are those of
the layers on the meta device, without checkpointing, and of the paper's Table 1, whose broadcasts over q ranks cost
log2(q) times their size. The paper's claims: Megatron W ~ p^3, Optimus W ~ (sqrt(p) log p)^3.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from math import isqrt, log
from pathlib import Path
from statistics import median

from torch.distributed import TCPStore

from benchmarks.memory.program import MIB, spread, table
from benchmarks.pipeline.team import ALLOCATORS, Stand, TeamFailed
from benchmarks.record import results_file, write_results
from benchmarks.tensor.contender import Contender
from benchmarks.tensor.counted import ONE_PANEL, Meter, Sizes, count_layer, whole
from benchmarks.tensor.paper_volumes import paper_elements
from benchmarks.tensor.run import WorkDiffers, measure
from benchmarks.tensor.stem import Stem
from benchmarks.tensor.team import PHASES
from ranvier.cost.mesh_shape import best_shape
from ranvier.cost.volume import Scheme
from ranvier.errors import ConfigError
from ranvier.system.machine import available_cores

MANY_RANKS = (4, 16, 64, 256, 1024)


def stem_of(kind: str, ranks: int, options: argparse.Namespace) -> Stem:
    """The problem on `ranks` ranks. options: sizes of 1 rank for weak scaling, of all ranks for strong."""
    side = isqrt(ranks) if kind == "weak" else 1
    return Stem(num_layers=options.layers, sequence=options.sequence, hidden=options.hidden * side,
                heads=options.heads * side, microbatch=options.microbatch * side)


def contenders_of(stem: Stem, ranks: int, transport: str) -> list[Contender]:
    """One rank; Megatron on 1 x p, summa and stationary on q x q, and stationary's best shape. Meshes that do not
    divide the problem are left out."""
    side = isqrt(ranks)
    shapes: list[tuple[str, Scheme, int, int]] = [("megatron", "megatron", 1, ranks), ("summa", "summa", side, side),
                                                 ("stationary", "stationary", side, side)]
    try:
        row, col = best_shape(ranks, batch=stem.microbatch, sequence=stem.sequence, hidden=stem.hidden,
                              heads=stem.heads, scheme="stationary")
        shapes += [("stationary", "stationary", row, col)] if row != side else []
    except ConfigError:
        pass
    return [_contender("one", "stationary", 1, 1, transport), *(
        _contender(f"{name}-{row}x{col}", scheme, row, col, transport) for name, scheme, row, col in shapes
        if stem.heads % col == 0 and stem.microbatch % row == 0 and stem.hidden % (row * col) == 0)]


def _contender(name: str, scheme: Scheme, row: int, col: int, transport: str) -> Contender:
    return Contender(name=name, build="benchmarks.tensor.ours:open_ours", mesh=(row, col), transport=transport,
                     settings={"scheme": scheme})


def counted_bytes(scheme: Scheme, mesh: tuple[int, int], stem: Stem) -> dict[str, float]:
    """Bytes that a rank receives in a forward and in a backward of the stem, including statistics of norms."""
    sizes = Sizes(batch=stem.microbatch, sequence=stem.sequence, hidden=stem.hidden, heads=stem.heads,
                  dtype=stem.torch_dtype)
    one = count_layer(Meter(scheme, *mesh), sizes)
    parts = whole(one.parts)
    return {"forward": stem.num_layers * (parts.forward + one.small.forward).total,
            "backward": stem.num_layers * (parts.backward + one.small.backward).total}


def add_efficiency(entries: Sequence[dict], cores: int) -> None:
    """Add the efficiency relative to the first entry, one rank: by ranks, by cores and by processor time; round by
    round, so that other load on the machine slows both."""
    for entry in entries:
        both = list(zip(entries[0]["rounds"], entry["rounds"], strict=True))
        entry["efficiency"] = {}
        for name, phases in (("forward", ["forward"]), ("backward", ["backward"]), ("step", PHASES)):
            speedups = [_seconds(one, phases) / _seconds(mine, phases) for one, mine in both]
            entry["efficiency"][name] = {over: asdict(spread([speedup / share for speedup in speedups]))
                                         for over, share in (("ranks", entry["ranks"]),
                                                             ("cores", min(entry["ranks"], cores)))}
        entry["efficiency"]["processor"] = asdict(spread([one["cpu_seconds"] / mine["cpu_seconds"]
                                                          for one, mine in both]))


def _seconds(block: Mapping, phases: Sequence[str]) -> float:
    return median(map(sum, zip(*(block["phase_seconds"][phase] for phase in phases), strict=True)))


def times(kind: str, options: argparse.Namespace, stand: Stand) -> list[dict]:
    """One entry for each size and contender."""
    found = []
    for ranks in options.ranks:
        stem = stem_of(kind, ranks, options)
        print(f"{kind} scaling, {ranks} ranks: {stem}")
        one, *others = contenders_of(stem, ranks, options.transport)
        others = [other for other in others if any(fnmatch(other.name, pattern) for pattern in options.only)]
        entries = measure(stem, [one, *others], stand, rounds=options.rounds,
                          steps=options.steps)
        add_efficiency(entries, stand.cores)
        for entry in entries:
            found.append({"kind": kind, "size": ranks, "stem": asdict(stem), "received": counted_bytes(
                entry["settings"]["scheme"], tuple(entry["mesh"]), stem), **entry})
    return found


def shown(entries: Sequence[Mapping]) -> str:
    def cell(found: Mapping[str, float]) -> str:
        return f"{found['middle']:.3f} [{found['least']:.3f}, {found['greatest']:.3f}]"

    return table(("scaling", "p", "contender", "b", "h", "n", "forward ms", "backward ms", "finish ms",
                  "forward by ranks", "by cores", "backward by ranks", "by cores", "CPU s/step", "of processor time",
                  "received MiB forward", "backward"), [
        (entry["kind"], entry["size"], entry["name"], entry["stem"]["microbatch"], entry["stem"]["hidden"],
         entry["stem"]["heads"], *(f"{entry['milliseconds'][phase]:.1f}" for phase in PHASES),
         *(cell(entry["efficiency"][phase][over]) for phase in ("forward", "backward") for over in ("ranks", "cores")),
         f"{median(one['cpu_seconds'] for one in entry['rounds']):.3f}", cell(entry["efficiency"]["processor"]),
         *(f"{entry['received'][phase] / MIB:.2f}" for phase in ("forward", "backward"))) for entry in entries])


# ---------------------------------------------------------------------- isoefficiency


def flops(sizes: Sizes) -> float:
    """FLOP of a layer, forward and backward."""
    tokens = sizes.batch * sizes.sequence
    return 72 * tokens * sizes.hidden**2 + 12 * tokens * sizes.sequence * sizes.hidden


def sizes_of(hidden: float, ranks: int, sequence: int) -> Sizes:
    """Sizes with about the width `hidden`, which all meshes of `ranks` ranks divide: b = 3 h / 64 as in the paper's
    Table 2, n = h / 64 if that many ranks divide it."""
    def multiple(size: float, of: int) -> int:
        return max(1, round(size / of)) * of

    wide = multiple(hidden, max(64, ranks))
    return Sizes(batch=multiple(3 * hidden / 64, 4 * isqrt(ranks)), sequence=sequence, hidden=wide,
                 heads=wide // 64 if wide // 64 % ranks == 0 else ranks)


def counted_on(scheme: Scheme, square: bool) -> Callable[[Sizes, int], tuple[float, tuple[int, int]]]:
    """Returns a function for the bytes that a layer receives on a number of ranks, forward and backward, and the
    mesh."""
    def count(sizes: Sizes, ranks: int) -> tuple[float, tuple[int, int]]:
        mesh = (isqrt(ranks), isqrt(ranks))
        if scheme == "megatron":
            mesh = (1, ranks)
        elif not square:
            mesh = best_shape(ranks, batch=sizes.batch, sequence=sizes.sequence, hidden=sizes.hidden,
                              heads=sizes.heads, scheme=scheme)
        parts = whole(count_layer(Meter(scheme, *mesh, panel_bytes=ONE_PANEL), sizes).parts)
        return parts.forward.total + parts.backward.total, mesh
    return count


def table_1(scheme: Scheme) -> Callable[[Sizes, int], tuple[float, tuple[int, int]]]:
    """The paper's forward and backward with its recomputation, in bytes."""
    def count(sizes: Sizes, ranks: int) -> tuple[float, tuple[int, int]]:
        elements = paper_elements(scheme, ranks=ranks, batch=sizes.batch, sequence=sizes.sequence, hidden=sizes.hidden)
        mesh = (1, ranks) if scheme == "megatron" else (isqrt(ranks), isqrt(ranks))
        return sizes.dtype.itemsize * sum(elements), mesh
    return count


def grown(count: Callable[[Sizes, int], tuple[float, tuple[int, int]]], ranks: Sequence[int], hidden: int,
          sequence: int) -> list[dict]:
    """For each number of ranks, the problem that has the bytes per FLOP of the first."""
    found: list[dict] = []
    for size in ranks:
        wish = found[-1]["hidden"] if found else hidden
        for _ in range(8):  # the ratio falls roughly as 1 / h
            sizes = sizes_of(wish, size, sequence)
            received, mesh = count(sizes, size)
            ratio = size * received / flops(sizes)
            if not found or abs(ratio / found[0]["bytes_per_flop"] - 1) < 0.005:
                break
            wish *= ratio / found[0]["bytes_per_flop"]
        found.append({"ranks": size, "mesh": list(mesh), "hidden": sizes.hidden, "batch": sizes.batch,
                      "received": received, "flops": flops(sizes), "bytes_per_flop": ratio})
    return found


def exponent(points: Sequence[Mapping]) -> float:
    """x of W ~ p^x, by least squares of the logarithms."""
    xs, ys = [log(point["ranks"]) for point in points], [log(point["flops"]) for point in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def claims(ranks: Sequence[int]) -> dict[str, list[dict]]:
    """The two growth laws that the paper claims."""
    return {"p^3": [{"ranks": size, "flops": size**3} for size in ranks],
            "(sqrt(p) log p)^3": [{"ranks": size, "flops": (size**0.5 * log(size)) ** 3} for size in ranks]}


def isoefficiency(ranks: Sequence[int], hidden: int, sequence: int) -> list[dict]:
    """One entry for each way to count bytes, and for each claim."""
    ways = {"megatron 1xp": counted_on("megatron", False), "summa qxq": counted_on("summa", True),
            "stationary qxq": counted_on("stationary", True), "stationary best": counted_on("stationary", False),
            "Table 1 Megatron": table_1("megatron"), "Table 1 Optimus": table_1("summa")}
    found = {name: grown(count, ranks, hidden, sequence) for name, count in ways.items()} | claims(ranks)
    return [{"name": name, "exponent": exponent(points), "last": exponent(points[-2:]), "points": points}
            for name, points in found.items()]


def isoefficiency_shown(rows: Sequence[Mapping]) -> str:
    ranks = [point["ranks"] for point in rows[0]["points"]]

    def point(one: Mapping) -> str:
        return f"{one['hidden']} ({'x'.join(map(str, one['mesh']))})" if "hidden" in one else "-"

    return table(("bytes of", "bytes / FLOP at first", "largest miss", "x", "last",
                  *(f"h at p = {size}" for size in ranks)), [
        (row["name"], *((f"{row['points'][0]['bytes_per_flop']:.2e}", "{:.1%}".format(max(
            abs(one["bytes_per_flop"] / row["points"][0]["bytes_per_flop"] - 1) for one in row["points"])))
            if "hidden" in row["points"][0] else ("-", "-")),
         f"{row['exponent']:.2f}", f"{row['last']:.2f}", *map(point, row["points"])) for row in rows])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few steps and ranks: does it work?")
    parser.add_argument("--output", type=Path,
                        help="the file of results; by default benchmarks/results/tensor/scaling-DATE")
    parser.add_argument("--kind", nargs="+", choices=("weak", "strong"), default=["weak", "strong"])
    parser.add_argument("--ranks", type=int, nargs="+", help="square numbers; default 4 9")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="beside 1 rank, e.g. 'summa*'")
    parser.add_argument("--transport", choices=("mpi", "gloo"), default="mpi")
    parser.add_argument("--no-times", action="store_true", help="isoefficiency alone: nothing is timed")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="timed steps in each block")
    parser.add_argument("--no-pin", action="store_true", help="leave the ranks' cores to the kernel")
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), default="default")
    for name, text in (("layers", ""), ("sequence", ""), ("hidden", "of weak scaling on 1 rank"), ("heads", "the same"),
                       ("microbatch", "the same, in sequences"), ("strong-hidden", "of strong scaling"),
                       ("strong-heads", ""), ("strong-microbatch", "")):
        parser.add_argument(f"--{name}", type=int, help=text)
    options = parser.parse_args(arguments)
    # Rows and columns of 4 and 9 ranks divide 36; Megatron on 9 columns needs n in nines, on q = 3 as on 1.
    defaults = (dict(layers=2, sequence=16, hidden=36, heads=18, microbatch=2, strong_hidden=72, strong_heads=36,
                     strong_microbatch=6, rounds=1, steps=1, ranks=[4]) if options.quick else
                dict(layers=4, sequence=128, hidden=288, heads=12, microbatch=4, strong_hidden=576, strong_heads=36,
                     strong_microbatch=12, rounds=5, steps=3, ranks=[4, 9]))
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if any(isqrt(ranks) ** 2 != ranks for ranks in options.ranks):
        parser.error("--ranks takes square numbers")
    options.many_ranks = MANY_RANKS[:3] if options.quick else MANY_RANKS
    return options


def main(arguments: Sequence[str] | None = None) -> dict:
    options = parse(arguments)
    entries: list[dict] = []
    if not options.no_times:
        strong = argparse.Namespace(**{**vars(options), "hidden": options.strong_hidden, "heads": options.strong_heads,
                                       "microbatch": options.strong_microbatch})
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory(prefix="ranvier-benchmark-") as folder:
            stand = Stand(store=store, port=store.port, folder=Path(folder), cores=available_cores(),
                          pin=not options.no_pin, allocator=options.allocator, warmup=1)
            try:
                for kind in options.kind:
                    entries += times(kind, options if kind == "weak" else strong, stand)
            except (WorkDiffers, TeamFailed) as error:
                raise SystemExit(str(error)) from None
        print(f"{stand.cores} cores, one thread a rank: ranks beyond that share cores, and efficiency is then that of "
              "processor time. Median [least, greatest] over the rounds")
        print(shown(entries))
    iso = isoefficiency(options.many_ranks, 6144, 512)
    print(isoefficiency_shown(iso))
    path = options.output or results_file("tensor", "scaling", quick=options.quick)
    results = {"transport": options.transport, "rounds": options.rounds, "steps_per_round": options.steps,
               "threads_per_rank": 1, "allocator": options.allocator, "contenders": entries, "isoefficiency": iso}
    write_results(path, results)
    print(f"wrote {path}")
    return results


if __name__ == "__main__":
    main()
