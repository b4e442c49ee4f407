"""The elastic command of docs/elastic.md exactly as written, against a plain loop over transformers' model.

    python -m benchmarks.elastic.typed [--rounds 3]

The command trains as a user starts it: the mesh is predicted, layers freeze, outputs are cached. The loop is one
process on all cores with the same weights, samples, batches, learning rates and number of epochs, and batches padded to
their longest sentence; it freezes nothing. Both take turns. The comparison is of seconds of training, without the start
of processes, the import of libraries and evaluations. The loop is evaluated after each epoch, which shows how soon it
could have stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.elastic.contender import Contender
from benchmarks.elastic.rounds import ROOT, Stand, run_one
from benchmarks.record import results_file, write_results
from ranvier.config import read
from ranvier.config.run import Checkpoint, Elastic
from ranvier.mesh import Mesh

PAGE = ROOT / "docs" / "elastic.md"


def documented() -> list[str]:
    """The words of the page's first training command, without its run folder."""
    words = shlex.split(re.search(r"^ranvier (train .+)$", PAGE.read_text(), re.MULTILINE)[1])
    place = words.index("--run-dir")
    return words[:place] + words[place + 2:]


def typed(folder: Path) -> dict[str, float]:
    """Run the command; returns its seconds of training and its accuracy in percent."""
    subprocess.run([sys.executable, "-m", "ranvier", *documented(), "--run-dir", str(folder)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (end,) = [one for one in events if one["event"] == "end"]
    evaluations = [one for one in events if one["event"] == "eval"]
    return {"seconds": end["seconds"] - sum(one["seconds"] for one in evaluations),
            "accuracy": 100 * evaluations[-1]["eval_accuracy"]}


def plain(folder: Path, of: Path) -> dict[str, object]:
    """Run the loop on the data of the run in `of`; `curve` has (seconds, accuracy) after each epoch."""
    run = read.merge([read.load(str(of / "run.toml"), keep_folder=True)[1]]).run
    batch = replace(run.batch, microbatch_size=run.batch.global_size)
    train = replace(run.train, eval_every=run.train.steps // run.train.epochs)
    base = replace(run, mesh=Mesh(), batch=batch, train=train, elastic=Elastic(), checkpoint=Checkpoint(every=0))
    outcome = run_one(Contender(name="plain", pipe=1, peer=True, microbatch_size=batch.global_size), base,
                      Stand(folder=folder))
    return {"seconds": outcome.seconds, "accuracy": 100 * outcome.accuracy,
            "curve": [(seconds, 100 * accuracy) for seconds, accuracy in outcome.curve]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="the file of results; by default in benchmarks/results/elastic")
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as place:
            ours = typed(Path(place) / "run")
            rounds.append({"typed": ours, "plain": plain(Path(place), Path(place) / "run")})
        print(f"round {number + 1}: " + ", ".join(f"{name} {one['seconds']:.1f} s, {one['accuracy']:.1f} %"
                                                  for name, one in rounds[-1].items()), flush=True)
        print("    the loop by epochs: " + ", ".join(f"{seconds:.1f} s {accuracy:.1f} %"
                                                     for seconds, accuracy in rounds[-1]["plain"]["curve"]), flush=True)
    ratios = sorted(one["plain"]["seconds"] / one["typed"]["seconds"] for one in rounds)
    print(f"the command is {median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] times as fast as the loop")
    path = options.output or results_file("elastic", "typed")
    write_results(path, {"words": documented(), "rounds": rounds, "ratios": ratios})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
