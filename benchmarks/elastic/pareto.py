"""Accuracy or perplexity against seconds, as curves: freezing, adapters and caches against early stopping and peers.

    python -m benchmarks.elastic.pareto --outcomes FILE [--task sentiment | cifar10 | decoder]
                                        [--data FILE [--eval-data FILE]] [--seeds 0 1 ... 9] [--only NAME ...]
                                        [--budget-minutes 20]

Every contender starts from the same weights, sees the same samples in the same order, and is evaluated after each
epoch on the same held-out samples; a point of its curve is (seconds of training until then, without evaluations; best
accuracy or perplexity so far). Stopping after any epoch is therefore part of every curve, also for the peers and for
training without freezing. The learning rate falls to zero over all epochs; contenders called -short have their own
schedule over half of the epochs, -shorter over a quarter, as a run that is meant to be short would have.

    plain, plain-short, plain-shorter
                 transformers' model in one process on all cores, batches padded to their longest sample: peers
    plain-static-k, plain-lora   the same with the first k layers frozen, and with PEFT's adapters: peers
    ddp          plain under torch's DDP, a rank for each of two cores: a peer
    none, none-short     Ranvier on two replicas, no freezing: early stopping
    static-k     the first k layers frozen from the start, with the cache
    gradient-norm, cap, cap-short, plasticity   the policies on two replicas, with the cache
    stage-balance                               on two stages
    packed       cap on two stages that pack, with replicas and cache (PipeTransformer)
    lora, lora-cache     adapters in the upper half of the layers, without and with the cache

At each budget of seconds the contenders of Ranvier are compared with the best of the peers and of training without
freezing there, seed by seed. A difference counts if it is larger than its half interval (Student's t), which is
corrected for the number of comparisons in the table (Bonferroni). With fewer than ten seeds the program says so.

Tasks: MiniLM on the sentences of a package (sentiment) or a TSV, CSV, JSONL or Parquet file (--data), a ViT on CIFAR-10
(cifar10) or folders of images (--data), and a small decoder (benchmarks/elastic/decoder.py) on film reviews or text of
your own (--data). All seeds of a task should take about two hours on two quiet cores. With --outcomes each case is kept
immediately, and another start continues with the missing cases; --budget-minutes N starts no case that would not end
within N minutes, seed by seed, so that outcomes are paired. 0 starts none and shows the kept outcomes.

The machine must be quiet: other work slows loops with a thread for each core far more than ranks with one thread, since
their threads wait for each other at every operation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.elastic.contender import Contender, named
from benchmarks.elastic.curves import ACCURACY, PERPLEXITY, SEEDS_WANTED, budgets_of, cells, claim, draw, table
from benchmarks.elastic.outcome import Outcome
from benchmarks.elastic.program import TASKS, base_run, documents, epochs_parser, finish, run_all, stand_of, write
from ranvier.config.run import Elastic, Lora, Run

SEEDS = tuple(range(SEEDS_WANTED))
SIZES = {"sentiment": (4, 560, 400), "cifar10": (4, 560, 500), "decoder": (4, 800, 256)}
"""Epochs, samples of one, held-out samples: the longest cases should last about 70 seconds on two quiet cores (an
estimate from earlier results: benchmarks/results/elastic)."""
_SHORT, _SHORTER = Fraction(1, 2), Fraction(1, 4)
_EXAMPLES = "examples.published_freezing"


def pareto_contenders(base: Run) -> list[Contender]:
    """All contenders, in the order of the table."""
    share, layers = base.batch.global_size // 2, base.model.num_layers
    every = 0 if base.train.epochs else base.train.eval_every  # an epoch of text may end within a batch
    cached = Elastic(cache=True, frozen_dropout=False, every=every)
    upper = Lora(rank=8, targets=tuple(f"layer{layer}.*" for layer in range(layers // 2, layers)))
    untrained, static = replace(cached, freeze="untrained"), {
        depth: replace(cached, freeze="manual", manual=(f"0:{depth}",)) for depth in (layers // 3, 2 * layers // 3)}
    adapters = {"lora": upper, "learning_rate": 10 * base.train.learning_rate}
    plain = Contender(name="plain", pipe=1, microbatch_size=2 * share, peer=True)

    def replicas(name: str, elastic: Elastic, **changes: object) -> Contender:
        return Contender(name=name, data=2, pipe=1, microbatch_size=share, elastic=elastic, **changes)

    return [
        plain, replace(plain, name="plain-short", length=_SHORT),
        replace(plain, name="plain-shorter", length=_SHORTER),
        *(replace(plain, name=f"plain-static-{depth}", elastic=replace(elastic, cache=False))
          for depth, elastic in static.items()),
        replace(plain, name="plain-lora", elastic=replace(untrained, cache=False), **adapters),
        replace(plain, name="ddp", data=2, microbatch_size=share),
        replicas("none", Elastic()), replicas("none-short", Elastic(), length=_SHORT),
        *(replicas(f"static-{depth}", elastic) for depth, elastic in static.items()),
        *(replicas(policy, replace(cached, freeze=policy)) for policy in ("gradient-norm", "cap")),
        replicas("plasticity", replace(cached, freeze=f"{_EXAMPLES}:Plasticity")),
        replicas("cap-short", replace(cached, freeze="cap"), length=_SHORT),
        Contender(name="stage-balance", pipe=2, elastic=replace(
            cached, freeze=f"{_EXAMPLES}:StageBalance", cache=False)),
        Contender(name="packed", pipe=2, elastic=replace(cached, freeze="cap", auto_pipe=True, auto_dp=True)),
        replicas("lora", replace(untrained, cache=False), **adapters), replicas("lora-cache", untrained, **adapters),
    ]


def references_of(contenders: Sequence[Contender]) -> list[str]:
    """Contenders that the others must be above: peers, and training without freezing that may stop early."""
    return [one.name for one in contenders if one.peer or one.elastic.freeze == "none"]


def whole_seeds(outcomes: Sequence[Outcome], chosen: Sequence[Contender]) -> list[Outcome]:
    """The outcomes of those seeds for which all contenders have one."""
    there = {(one.name, one.seed) for one in outcomes}
    return [one for one in outcomes if all((each.name, one.seed) in there for each in chosen)]


def measure(options: argparse.Namespace) -> dict | None:
    """Measure, and return the results; None if no seed has all its contenders yet."""
    with stand_of(options) as stand:
        base = base_run(options, stand, options.seeds[0])
        chosen = pareto_contenders(base)
        references = references_of(chosen)
        if options.only is not None:
            chosen = named(chosen, [*references, *options.only])
        outcomes = whole_seeds(run_all(options, stand, chosen, minutes=options.budget_minutes), chosen)
    seeds = sorted({one.seed for one in outcomes})
    if not seeds:
        print("no seed has all its contenders yet")
        return None
    scale = PERPLEXITY if base.data.task == "lm" else ACCURACY
    found = cells(outcomes, budgets_of(outcomes, references), references)
    text = claim(found, references, len(seeds), scale)
    samples = base.train.eval_every * base.batch.global_size
    head = (f"{_name(options)}: {base.model.num_layers} layers, {options.epochs} epochs of {samples} samples, "
            f"{len(seeds)} seeds; best {scale.name} so far{',' if scale.unit else ''}{scale.unit} (difference from the "
            f"best of {', '.join(references)} in {scale.points}; more is better; the interval is for all comparisons "
            f"together)\n\n{text}")
    results = {"claim": text, "cells": [{**vars(cell), "difference": cell.difference and vars(cell.difference),
                                         "is_above": cell.is_above} for cell in found],
               "outcomes": documents(outcomes, options)}
    shown = table(found, head, scale)
    if len(seeds) < len(options.seeds) and options.output is None:
        print(f"\n{shown}\nnot written, since seeds are missing (--output FILE writes it)")
        return results
    name = f"pareto-{_name(options)}{'-selected' if options.only is not None else ''}"
    write(options, name, results, shown, lambda path: draw(
        outcomes, _panels(chosen), references, f"{_name(options)}, {len(seeds)} seeds", path, scale))
    return results


def _panels(chosen: Sequence[Contender]) -> dict[str, list[str]]:
    """Contenders by panel: those that train all layers at first, and the others."""
    parts = [one.name for one in chosen if one.lora is not None or one.elastic.freeze == "manual"]
    return {"all layers train at first": [one.name for one in chosen if one.name not in parts],
            "layers frozen from the start, or adapters": parts}


def _name(options: argparse.Namespace) -> str:
    return options.task if options.data is None else f"{options.task}-{Path(options.data).stem}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = epochs_parser(__doc__, SEEDS, (*TASKS, "decoder"))
    made.set_defaults(eval_epochs=1)
    made.add_argument("--data", metavar="FILE", help="training data instead of the task's: a table with the columns "
                                                     "label and sentence, folders of images, or text")
    made.add_argument("--eval-data", metavar="FILE", help="held-out data beside --data; by default a part of that")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these contenders, peers, and those without freezing")
    made.add_argument("--budget-minutes", type=float, metavar="N", help="start no case that would not end in time")
    options = made.parse_args(arguments)
    if not options.quick:
        sizes = zip(("epochs", "samples", "eval_samples"), SIZES[options.task], strict=True)
        vars(options).update((name, size) for name, size in sizes if getattr(options, name) is None)
    if options.eval_epochs != 1:
        made.error("--eval-epochs must be 1: curves have a point for each epoch")
    if options.eval_data is not None and options.data is None:
        made.error("--eval-data is held out beside --data, which is missing")
    if options.budget_minutes is not None and options.outcomes is None:
        made.error("--budget-minutes needs --outcomes, where cases are kept")
    return finish(options, SEEDS)


if __name__ == "__main__":
    measure(parse())
