"""A freeze policy of your own, in a run on two ranks: `python examples/own_freezing.py`.

A freeze policy decides how many layers are frozen, here from each layer's gradient norm by AutoFreeze's rule (Liu et
al., 2021): a layer has converged when its gradient changes less from one evaluation to the next than that of the median
active layer. The layers below the first one that has not converged are frozen. (The article's gradients are sums since
the last evaluation; here they are those of the step.) The run does everything else: it builds engines again, packs the
pipeline and makes replicas of freed ranks.

The task is artificial: does a sentence have more good words than bad ones?
"""

import random
from pathlib import Path
from statistics import median

import ranvier
from ranvier import Batch, Data, Elastic, Mesh, Run, Train, Transformer

GOOD, BAD = ["lovely", "great", "fine", "warm"], ["awful", "dull", "poor", "weak"]
OTHER = ["the", "film", "is", "a", "story", "was"]


class GradientChange:
    """Freezes the layers whose gradients change least, compared with the norms of the evaluation before."""

    def __init__(self):
        self.before = None

    def frozen_layers(self, facts):
        norms, before, self.before = facts.gradient_norms, self.before, facts.gradient_norms
        active = range(facts.frozen, facts.num_layers)
        if before is None or not active:
            return facts.frozen
        change = {layer: abs(before[layer] - norms[layer]) / max(before[layer], 1e-12) for layer in active}
        least = median(change.values())
        return next((layer for layer in active if change[layer] >= least), facts.frozen)

    def state_dict(self):
        """The policy's state in a checkpoint."""
        return {"before": self.before}

    def load_state_dict(self, state):
        self.before = state["before"]


def write_sentences(path, count, seed):
    """Labelled sentences as TSV."""
    chance, lines = random.Random(seed), ["label\tsentence"]
    for _ in range(count):
        good = chance.random() < 0.5
        words = chance.sample(OTHER, 4) + chance.choices(GOOD if good else BAD, k=2)
        chance.shuffle(words)
        lines.append(f"{int(good)}\t{' '.join(words)}")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    folder = Path("runs") / "own-freezing-data"
    mesh = Mesh(pipe=2)
    run = Run(mesh=mesh, batch=Batch(global_size=16, microbatch_size=4),
              model=Transformer(num_layers=4, hidden=32, heads=2, vocab=60, sequence=10),
              data=Data(task="classification", train=str(folder / "train.tsv"), eval=str(folder / "eval.tsv")),
              train=Train(epochs=3, learning_rate=3e-3), elastic=Elastic(every=8, auto_pipe=True, auto_dp=True))
    folder.mkdir(parents=True, exist_ok=True)
    world = ranvier.start(mesh)
    if world.rank == 0:
        write_sentences(folder / "train.tsv", 320, seed=1)
        write_sentences(folder / "eval.tsv", 100, seed=2)
    world.backend.group("example", [range(world.size)]).barrier()  # the files are there
    ranvier.train(run, "own-freezing", world, freezing=GradientChange())
