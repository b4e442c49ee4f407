"""What each part of elastic pipelining adds to speed, and its effect on accuracy (PipeTransformer's Figure 9).

    python -m benchmarks.elastic.parts [--task sentiment | cifar10] [--seeds 0 1 2 3 4] [--quick]

Four ranks fine-tune one pretrained model for ten epochs on a part of the samples; the cap freezes layers once an epoch
with alpha 1/3. For the same seed all contenders have the same initial weights, including the classifier, the same
samples in the same order, batch, AdamW, learning rates and clipping.

    none         our pipeline, pipe 4, nothing frozen: the baseline of all comparisons
    gpipe-dp     the article's baseline: gpipe, pipe 2 x data 2
    freeze       freezing alone
    pipe-cache   freezing, AutoPipe, AutoCache; freed ranks are idle
    pipe-dp      freezing, AutoPipe, AutoDP
    all          freezing, AutoPipe, AutoDP, AutoCache
    ddp-cache    data 4, with freezing and the cache
    ddp-torch    the peer: DDP over Gloo on transformers' own model (benchmarks/elastic/peer.py), nothing frozen

Contenders are separate processes, one after the other, seed by seed, alternately forwards and backwards through the
list. `none` and `all` take all seeds, the others the first --between-seeds of them. Time is clocked on rank 0 from the
start of the first step to the end of the last, without evaluations: steps, transitions, and decisions between them
(`other s` in the table is time outside of steps and transitions). Speed-ups are ratios formed within a seed: median
[least, greatest]. The bound is that of benchmarks/elastic/bound.py.

The default part of the samples makes `none` last about four minutes on two quiet cores (benchmarks/elastic/task.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.elastic import bound, picture
from benchmarks.elastic.compare import COLUMNS, WANTED, lines, markdown, row
from benchmarks.elastic.contender import ENDS, contenders, named
from benchmarks.elastic.program import base_run, documents, epochs_parser, finish, run_all, stand_of, write

SEEDS = (0, 1, 2, 3, 4)


def bounds(layers: int, alpha: float, epochs: int) -> dict[str, float]:
    """Bounds of speed-ups by compute alone, for contenders that freeze."""
    return {name: bound.speedup(layers, alpha, epochs, cache="cache" in name or name == "all")
            for name in ("freeze", "pipe-cache", "pipe-dp", "all", "ddp-cache")}


def measure(options: argparse.Namespace) -> dict:
    with stand_of(options) as stand:
        base = base_run(options, stand, options.seeds[0])
        found = contenders(base, alpha=options.alpha, cut=options.cut)
        found = named(found, options.only) if options.only else found
        few = options.seeds[:options.between_seeds]
        outcomes = run_all(options, stand, found, few, ENDS)
    layers = base.model.num_layers
    limits = bounds(layers, options.alpha, options.epochs)
    table = lines(outcomes, "none", limits)
    head = (f"{options.task}: {layers} layers, {options.epochs} epochs of {base.data.train_samples} samples, batch "
            f"{base.batch.global_size}, alpha {options.alpha:.3g}, cut {options.cut}\n\n{WANTED}")
    results = {"lines": [line.document() for line in table], "bounds": limits,
               "frozen_by_epoch": bound.depths(layers, options.alpha, options.epochs),
               "outcomes": documents(outcomes, options)}
    write(options, f"parts-{options.task}", results, markdown(head, COLUMNS, [row(line) for line in table]),
          lambda path: picture.draw_parts(table, outcomes, f"{options.task}, {options.epochs} epochs", path))
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = epochs_parser(__doc__, SEEDS)
    made.add_argument("--between-seeds", type=int, default=2, help="seeds for the others than none and all")
    made.add_argument("--alpha", type=float, default=1 / 3)
    made.add_argument("--only", nargs="+", help="some contenders; none must be among them")
    return finish(made.parse_args(arguments), SEEDS)


if __name__ == "__main__":
    measure(parse())
