"""Bytes that a layer keeps on each rank, counted, and the largest batch that fits: Figure 9 of Xu et al., 2021
(Optimus).

    python -m benchmarks.tensor.limits [--quick] [--ranks 4 16] [--budget-gib 16]

The first table is of one layer and microbatch in bf16, as autograd keeps it, next to the closed formula: 34 s b h / p,
for Megatron s b h (10 + 24 / p). That formula counts two dropout masks, 2 s b h, which are drawn again here and not
kept; it leaves out the statistics of two norms (fp32) and the logarithms of attention's sums (fp32, one a head and
position). `rest` is the unexplained difference. "again" is the count for a layer that is being recomputed: operands
that its products have gathered stay for their backward.

The second is the largest batch whose ranks need no more than the budget: fp32, AdamW, every layer checkpointed, one
microbatch, and N, s, h, n as in the paper's Table 2 (9 ranks: half of its 36). Memory is that of `ranvier check`, with
a vocabulary too small to count. Rows divide the batch, and columns the heads (with sequence sharding the sequence too);
"-" if they do not. stationary's best shape is the one with the fewest bytes received at the largest batch of the
square mesh. The paper's Megatron stores what enters a layer in parts, b s h / p a layer, as megatron-sequence here;
megatron stores all of it on every rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.memory.program import MIB, table
from benchmarks.record import results_file, write_results
from benchmarks.tensor.counted import SETTINGS
from benchmarks.tensor.paper_volumes import activation_bytes
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Memory, Optim, Transformer
from ranvier.cost.mesh_shape import best_shape
from ranvier.cost.volume import Scheme
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.plan.block_costs import block_costs
from ranvier.plan.cut import meta_mesh, split_model
from ranvier.planner.count import laid_out
from ranvier.planner.problems import problems
from ranvier.tensor.split.linear import SplitLinear

TABLE_2 = {4: (2048, 32), 9: (3060, 36), 16: (4096, 64), 36: (6120, 72), 64: (8192, 128)}
"""Ranks -> h, n."""
PAPER_RAN = {"megatron": {4: 60, 16: 60, 36: 40, 64: 30}, "summa": {4: 96, 16: 192, 36: 288, 64: 384}}
"""Batches of Table 2, by ranks."""
COLOURS = {"megatron": "tab:red", "megatron-sequence": "tab:purple", "summa": "tab:orange", "stationary": "tab:blue",
           "stationary best": "tab:green"}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes of a layer on a rank; see the module's docstring."""

    counted: int
    formula: float
    masks: float
    statistics: float
    again: int

    @property
    def rest(self) -> float:
        return self.counted - (self.formula - self.masks + self.statistics)


def kept(scheme: Scheme, row: int, col: int, config: Transformer, batch: int) -> Kept:
    """Bytes of one microbatch in bf16 with fused attention."""
    shape = dict(row=row, col=col, batch=batch, sequence=config.sequence, hidden=config.hidden, heads=config.heads)
    tokens, ranks = batch * config.sequence, row * col
    common = 1 if scheme == "megatron" else ranks  # all ranks of Megatron keep tensors between products
    own_tokens = tokens / (ranks if scheme == "megatron-sequence" else row)
    return Kept(counted=_counted(scheme, row, col, config, batch, recomputed=False),
                again=_counted(scheme, row, col, config, batch, recomputed=True),
                formula=activation_bytes(scheme, **shape, fused_attention=True),
                masks=2 * tokens * config.hidden / common,
                statistics=2 * 2 * 4 * own_tokens + 4 * tokens * config.heads / ranks)


def _counted(scheme: Scheme, row: int, col: int, config: Transformer, batch: int, *, recomputed: bool) -> int:
    model = split_model(gpt(replace(config, num_layers=1), dtype=torch.bfloat16),
                        meta_mesh(Mesh(row=row, col=col), SETTINGS[scheme], "cuda"))

    def marked(build: Callable[[], nn.Module]) -> nn.Module:
        block = build()
        for layer in block.modules():
            if isinstance(layer, SplitLinear):
                layer.recomputed = recomputed
        return block

    model = replace(model, blocks={name: partial(marked, build) for name, build in model.blocks.items()})
    ids = torch.empty(batch // row, config.sequence, dtype=torch.int64, device="meta")
    costs = {cost.name: cost.kept_bytes for cost in block_costs(model, ids, dtype=torch.bfloat16)}
    return sum(costs[name] for name in model.layers[0])


def run_of(scheme: Scheme, row: int, col: int, config: Transformer, batch: int) -> ResolvedRun:
    return ResolvedRun(mesh=Mesh(row=row, col=col), batch=Batch(global_size=batch, microbatch_size=batch),
                       precision="fp32", tensor=SETTINGS[scheme], optim=Optim(offload="none"),
                       memory=Memory(recompute=1), model=config, launch=Launch(device="cpu"))


def needed(scheme: Scheme, row: int, col: int, config: Transformer, batch: int) -> dict[str, int]:
    """Category -> bytes on a rank. Layers after the second are like the second, and are not laid out."""
    one, two = (laid_out(run_of(scheme, row, col, replace(config, num_layers=layers), batch))[1][0].device
                for layers in (1, 2))
    return {name: size + (config.num_layers - 1) * (two[name] - size) for name, size in one.items()}


def largest(size_of: Callable[[int], int], budget: int) -> int:
    """The most steps whose size is within the budget: bisection, at the point where a line through its ends crosses."""
    low, high = (0, None), None
    guess = 1
    while high is None or high[0] - low[0] > 1:
        size = size_of(guess)
        if size > budget:
            high = guess, size
        else:
            before, low = low, (guess, size)
        if low[0] == 0:
            guess = max(1, guess // 2)
            if high[0] == 1:
                break
            continue
        start, end = (low, high) if high else (before, low)
        slope = (end[1] - start[1]) / (end[0] - start[0]) if start[1] is not None else 0
        guess = low[0] + (max(1, int((budget - low[1]) / slope)) if slope > 0 else low[0])
        if high:
            guess = min(guess, high[0] - 1)
    return low[0]


def limit(scheme: Scheme, row: int, col: int, config: Transformer, budget: int) -> dict:
    """The largest batch, and what ranks need for it; or why there is none."""
    entry = {"ranks": row * col, "scheme": scheme, "mesh": [row, col], "hidden": config.hidden, "heads": config.heads}
    wrong = [str(problem) for problem in problems(run_of(scheme, row, col, config, row))]
    if wrong:
        return {**entry, "batch": None, "problems": wrong}
    seen: dict[int, dict[str, int]] = {}

    def size_of(steps: int) -> int:
        seen[steps] = needed(scheme, row, col, config, steps * row)
        return sum(seen[steps].values())

    steps = largest(size_of, budget)
    return {**entry, "batch": steps * row, "does_not_fit": (steps + 1) * row, "bytes": seen.get(steps, seen[1])}


def limits(ranks: int, config: Transformer, budget: int) -> list[dict]:
    """The limits of every scheme on `ranks` ranks, a square number."""
    side = isqrt(ranks)
    found = [{"name": name, **limit(scheme, row, col, config, budget)} for name, scheme, row, col in (
        ("megatron", "megatron", 1, ranks), ("megatron-sequence", "megatron-sequence", 1, ranks),
        ("summa", "summa", side, side), ("stationary", "stationary", side, side))]
    batch = found[-1]["batch"] or ranks
    batch = max(ranks, batch - batch % ranks)  # a multiple of all numbers of rows
    try:
        row, col = best_shape(ranks, batch=batch, sequence=config.sequence, hidden=config.hidden, heads=config.heads,
                              scheme="stationary", recompute="kept")
    except ConfigError as problem:
        return [*found, {"name": "stationary best", "ranks": ranks, "scheme": "stationary", "mesh": None,
                         "hidden": config.hidden, "heads": config.heads, "batch": None, "problems": [str(problem)]}]
    best = found[-1] if row == side else limit("stationary", row, col, config, budget)
    return [*found, {**best, "name": "stationary best"}]


def kept_rows(ranks: Sequence[int], configs: Mapping[int, Transformer], batches: Mapping[int, int]) -> list[dict]:
    """The first table."""
    rows = []
    for size in ranks:
        side, config, batch = isqrt(size), configs[size], batches[size]
        for scheme, row, col in (("megatron", 1, size), ("megatron-sequence", 1, size), ("summa", side, side),
                                 ("stationary", side, side), ("stationary", size, 1)):
            if config.heads % col or batch % row or (scheme == "megatron-sequence" and config.sequence % col):
                continue
            one = kept(scheme, row, col, config, batch)
            rows.append({"scheme": scheme, "mesh": [row, col], "batch": batch, "unit": batch * config.sequence *
                         config.hidden / size, **{name: getattr(one, name) for name in (
                             "counted", "formula", "masks", "statistics", "rest", "again")}})
    return rows


def kept_shown(rows: Sequence[Mapping]) -> str:
    names = ("counted", "formula", "masks", "statistics", "rest", "again")
    return table(("scheme", "mesh", "batch", "MiB", *(f"{name} / (bsh/p)" for name in names)), [
        (row["scheme"], "x".join(map(str, row["mesh"])), row["batch"], f"{row['counted'] / MIB:.1f}",
         *(f"{row[name] / row['unit']:.3f}" for name in names)) for row in rows])


def limits_shown(rows: Sequence[Mapping]) -> str:
    lines = []
    for row in rows:
        mesh = "-" if row["mesh"] is None else "x".join(map(str, row["mesh"]))
        ran = PAPER_RAN.get(row["name"], {}).get(row["ranks"], "-")
        parts = row.get("bytes", {})
        states = sum(parts.get(name, 0) for name in ("parameters", "gradients", "moments"))
        lines.append((row["ranks"], row["name"], mesh, row["hidden"], row["heads"],
                      "-" if row["batch"] is None else row["batch"], row.get("does_not_fit", "-"), ran,
                      *(f"{size / MIB:,.0f}" for size in (states, *(
                          parts.get(name, 0) for name in ("activations", "workspace", "tensor mesh"))))))
    text = table(("ranks", "scheme", "mesh", "h", "n", "fits", "does not", "paper ran", "states MiB", "activations",
                  "workspace", "tensor mesh"), lines)
    notes = [f"{row['ranks']} ranks, {row['name']}: {'; '.join(row['problems'])}" for row in rows if "problems" in row]
    return "\n".join([text, *notes])


def draw(rows: Sequence[Mapping], budget_gib: float, path: Path) -> None:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        mine = [row for row in rows if row["name"] == name and row["batch"]]
        axes.plot([row["ranks"] for row in mine], [row["batch"] for row in mine], "o-", color=colour, label=name)
        for row in mine:
            axes.annotate(f"{row['batch']}", (row["ranks"], row["batch"]), textcoords="offset points", xytext=(4, 4),
                          fontsize=7, color=colour)
    ticks = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set(xlabel="ranks", ylabel="largest batch, sequences", title=f"{budget_gib:g} GiB a rank, by prediction")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and 4 and 9 ranks: does it work?")
    parser.add_argument("--output", type=Path,
                        help="the file of results; by default benchmarks/results/tensor/limits-DATE")
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(TABLE_2))
    parser.add_argument("--budget-gib", type=float, help="of a rank; default 16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--vocab", type=int, default=512)
    options = parser.parse_args(arguments)
    quick = options.quick
    options.ranks = options.ranks or ([4, 9] if quick else sorted(TABLE_2))
    options.budget_gib = options.budget_gib or (0.012 if quick else 16.0)
    options.layers = options.layers or (4 if quick else 24)
    options.sequence = options.sequence or (36 if quick else 512)
    options.configs = {ranks: Transformer(num_layers=options.layers, hidden=2 * heads if quick else hidden, heads=heads,
                                  vocab=options.vocab, sequence=options.sequence)
                       for ranks, (hidden, heads) in TABLE_2.items()}
    return options


def main(arguments: Sequence[str] | None = None) -> dict:
    options = parse(arguments)
    budget = int(options.budget_gib * 2**30)
    first = kept_rows(options.ranks, options.configs, {ranks: ranks for ranks in options.ranks})
    print(kept_shown(first), flush=True)
    path, rows = options.output or results_file("tensor", "limits", quick=options.quick), []
    results = {"layers": options.layers, "sequence": options.sequence, "vocab": options.vocab,
               "budget_gib": options.budget_gib, "kept": first, "limits": rows}
    for ranks in options.ranks:
        rows += limits(ranks, options.configs[ranks], budget)
        print(f"{ranks} ranks: " + ", ".join(f"{row['name']} {row['batch'] or '-'}" for row in rows[-5:]), flush=True)
        write_results(path, results)  # many ranks take minutes
        draw(rows, options.budget_gib, path.with_suffix(".png"))
    print(limits_shown(rows))
    print(f"wrote {path}")
    return results


if __name__ == "__main__":
    main()
