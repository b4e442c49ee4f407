"""Tiny elastic runs whose ranks are threads of this process, what they leave, and trackers that disturb them."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from ranvier.config.run import Batch, Data, Elastic, Optim, Run, Train, Transformer
from ranvier.elastic import controller
from ranvier.elastic.ledger import Ledger
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train import resize
from ranvier.train.loop import train

WORDS = ["the", "a", "film", "story", "actor", "scene", "plot", "music", "is", "was", "very", "quite", "good", "bad"]

mesh_candidates, pays = controller.mesh_candidates, Ledger.decide


def write_sentences(folder, train=96):
    """Labelled sentences; a training sentence's label says whether it contains "good"."""
    for name, count, start in (("train", train, 0), ("eval", 30, 7)):
        lines = ["label\tsentence"]
        for number in range(start, start + count):
            words = [WORDS[(number * step + step) % 12] for step in (1, 5, 7, 11)]
            lines.append(f"{number % 2}\t{' '.join([*words, WORDS[13 - number % 2]])} {number}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


TRAIN = Train(epochs=2, learning_rate=3e-3, warmup_steps=4, schedule="cosine", final_learning_rate=1e-4, eval_every=12)
NUM_STEPS, NUM_LAYERS = 24, 6
AT_ONCE = Batch(global_size=8, microbatch_size=8)
"""For runs on one rank, which take a third of the time with it."""
IN_TWO = Batch(global_size=8, microbatch_size=4)
"""For runs of at most two replicas whose tests do not depend on microbatches."""


def tiny(sentences, run_dir, *, mesh=None, elastic=None, **changes):
    """Six layers, twelve batches an epoch, two epochs, in fp64; no two steps have the same learning rate."""
    changes = {"train": TRAIN, **changes}
    changes = {"batch": Batch(global_size=8, microbatch_size=2), **changes}
    return Run(mesh=mesh or Mesh(pipe=4), precision="fp64",
               model=Transformer(num_layers=NUM_LAYERS, hidden=16, heads=2, vocab=120, sequence=12),
               data=Data(task="classification", train=str(sentences / "train.tsv"), eval=str(sentences / "eval.tsv"),
                         cache_dir=sentences / "cache"), optim=Optim(weight_decay=0.0, offload="none"),
               elastic=elastic or Elastic(), run_dir=run_dir, **changes)


def run_all(run, **options):
    stream = io.StringIO()
    results = run_ranks(lambda world: train(run, "tiny", world, stream=stream, **options), run.mesh.size,
                        timeout_seconds=120)
    return results, stream.getvalue()


def lines(run, name):
    return [json.loads(line) for line in (run.run_dir / name).read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run, "metrics.jsonl")]


_OF_ONE_RANK = {}


def losses_of_one_rank(sentences, folders, elastic):
    """Losses of the tiny run with `elastic`; all test files in one process share one run."""
    if elastic not in _OF_ONE_RANK:
        run = tiny(sentences, folders.mktemp("one") / "run", mesh=Mesh(), elastic=elastic, batch=AT_ONCE)
        run_all(run)
        _OF_ONE_RANK[elastic] = losses(run)
    return _OF_ONE_RANK[elastic]


def transitions(run):
    return events(run, "transition")


def events(run, name):
    return [line for line in lines(run, "events.jsonl") if line["event"] == name]


def read_rows(results):
    """Rows that all ranks have read from their caches."""
    return sum(counts["hits"] + counts["upgraded"] for counts in results[0]["cache"] if counts)


BY_HAND = Elastic(freeze="manual", manual=("5:2", "14:4"), auto_pipe=True, auto_dp=True)


def always(monkeypatch):
    """Half the stages are always best, and every transition pays: times of ranks that are threads mean nothing."""
    def halved(rules, present, *args, **options):
        found = mesh_candidates(rules, present, *args, **options)
        return sorted(found, key=lambda candidate: abs(candidate.mesh.pipe - max(1, present.mesh.pipe // 2)))

    monkeypatch.setattr(controller, "mesh_candidates", halved)
    monkeypatch.setattr(Ledger, "decide", lambda ledger, **facts: replace(pays(ledger, **facts), pays=True))


class Wishes:
    """A tracker that requests another mesh after given steps."""

    def __init__(self, run, wishes):
        self.run, self.wishes = run, wishes

    def event(self, event):
        wish = self.wishes.get(getattr(event, "step", None))
        if wish is not None and type(event).__name__ == "StepEvent":
            resize.ask(self.run.run_dir, **wish)

    def close(self):
        pass


class StopAfter:
    """A tracker that requests all ranks to stop once a given step has been reported."""

    def __init__(self, step, requests):
        self.step, self.requests = step, requests

    def event(self, event):
        if type(event).__name__ == "StepEvent" and event.step == self.step:
            for request in self.requests:
                request.request("test")

    def close(self):
        pass
