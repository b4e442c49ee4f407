"""Fine-tuning a BERT on sentences of different lengths: Ranvier against a plain transformers loop, and against DDP.

    python -m benchmarks.finetune.sentences [--quick]

    transformers               a loop over transformers' model with dynamic padding, one process: the peer
    Ranvier                    Ranvier's engine on one rank
    two loops                  two such loops at the same time, independent of each other: the most that two cores reach
    DDP, data 2                the loop under DistributedDataParallel over Gloo, half of a batch on each rank
    Ranvier, data 2 [sharded]  two replicas over Gloo; with sharded optimizer states
    Ranvier, data 2, MPI       two replicas over MPI, as `ranvier train` starts them where MPI is installed

The model has MiniLM's size (6 layers of 384) and random weights, which transformers makes and all contenders load.
Sentences are generated; their lengths are distributed as in SST-2 (13.5 tokens on average, at most 64). All contenders
have the same batches, AdamW's default settings, fp32, and one thread on each rank, which has its own core. Contenders
are processes that stay alive and take turns, one epoch each, alternately forwards and backwards through the list. The
first epoch is not timed. Its losses must agree to 1e-3 with those of the transformers loop, otherwise no ratio is
printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import transformers

from benchmarks.finetune.contenders import CONTENDERS, PLAIN, Contender, Work, loader_of, make_sentences, serve
from benchmarks.memory.program import ratios, table
from benchmarks.rank_team import RankTeam
from benchmarks.record import results_file, write_results
from ranvier.launch.mpiexec import mpi_available

AGREE = 1e-3
"""Largest relative difference of losses in the first epoch."""


def save_model(options: argparse.Namespace, folder: Path, longest: int) -> Path:
    """transformers' BERT with random weights, in `folder`."""
    transformers.logging.disable_progress_bar()
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32, intermediate_size=4 * options.hidden, num_labels=2,
        max_position_embeddings=longest, hidden_dropout_prob=options.dropout, attention_probs_dropout_prob=0.0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


class Team(RankTeam):
    """The processes of one contender, which have built their models."""

    def __init__(self, context, work: Work, contender: Contender, port: int) -> None:
        super().__init__(context, contender.name, contender.ranks, serve, lambda rank: (work, contender, rank, port),
                         mpi=contender.mpi)
        self.contender = contender
        self.answers()

    def run(self, steps: int) -> tuple[float, list[float]]:
        """Seconds from the first rank's start to the last one's end, and the loss of each step."""
        began, ended, losses = zip(*self.ask(steps), strict=True)
        return max(ended) - min(began), [sum(shares) for shares in zip(*losses, strict=True)]


def measure(options: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        work = Work(model=Path(folder), vocab=options.vocab, sentences=options.sentences, batch=options.batch,
                    microbatch=options.microbatch, learning_rate=options.learning_rate,
                    bucket_size=options.bucket_size or "auto")
        save_model(options, work.model, work.longest)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.finetune.contenders"])
        found = [one for one in CONTENDERS if options.only is None or one.name in (PLAIN.name, *options.only)]
        if missing := mpi_available():
            print(f"without MPI: {missing}")
            found = [one for one in found if not one.mpi]
        teams = [Team(context, work, contender, store.port) for contender in found]
    rows = {team.contender.name: {**asdict(team.contender), "first_losses": team.run(work.steps)[1], "rounds": []}
            for team in teams}
    for number in range(options.rounds):
        for team in teams if number % 2 == 0 else reversed(teams):
            seconds, losses = team.run(work.steps)
            rate = team.contender.batches * work.sentences / seconds
            rows[team.contender.name]["rounds"].append({"sentences_per_second": rate, "losses": losses})
    for team in teams:
        team.end()
    about = describe(work)
    report(rows, about, compared=not options.dropout)
    sizes = {name: getattr(options, name) for name in (
        "layers", "hidden", "vocab", "sentences", "batch", "microbatch", "bucket_size", "dropout",
        "learning_rate", "rounds")}
    path = options.output or results_file("finetune", name_of(options), quick=options.quick)
    write_results(path, {"transformers": transformers.__version__, **sizes, "about": about,
                         "contenders": list(rows.values())})
    print(f"wrote {path}")
    return list(rows.values())


def report(rows: dict[str, dict], about: dict[str, float], *, compared: bool) -> None:
    """Add the values derived from the measurements to each row, and print the table. compared: whether losses must
    agree, which they cannot if each contender draws its own dropout masks."""
    plain = rows[PLAIN.name]
    for row in rows.values():
        row["largest_loss_difference"] = max(abs(ours - theirs) / theirs for ours, theirs in zip(
            row["first_losses"], plain["first_losses"], strict=True))
    agree = not compared or all(row["largest_loss_difference"] <= AGREE for row in rows.values())
    rates = {name: [entry["sentences_per_second"] for entry in row["rounds"]] for name, row in rows.items()}
    lines = []
    for name, row in rows.items():
        row["sentences_per_second"] = median(rates[name])
        row["final_loss"] = sum(row["rounds"][-1]["losses"]) / len(row["rounds"][-1]["losses"])
        spread = ratios(rates[name], rates[PLAIN.name])
        row["speed_over_transformers"] = asdict(spread) if agree else None
        lines.append((name, row["ranks"], f"{row['sentences_per_second']:.1f}",
                      str(spread) if agree else "losses differ", f"{row['final_loss']:.5f}",
                      f"{row['largest_loss_difference']:.1e}"))
    print(f"{about['tokens']:.1f} tokens a sentence, at most {about['longest']}, padded to {about['positions']:.1f} "
          f"on average in whole batches")
    print(table(("contender", "ranks", "sentences/s", "speed over transformers", "loss of the last epoch",
                 "difference of first losses"), lines))


def describe(work: Work) -> dict[str, float]:
    """Lengths of sentences, and of batches of one process after dynamic padding."""
    lengths, loader = make_sentences(work).sample_lengths, loader_of(work)
    positions = sum(batch.inputs["ids"].numel() for step in range(work.steps) for batch in loader.microbatches(step))
    return {"tokens": float(lengths.mean()), "longest": int(lengths.max()), "positions": positions / work.sentences}


def name_of(options: argparse.Namespace) -> str:
    """The kind of the result: everything that makes results incomparable."""
    parts = [f"sentences-{options.layers}x{options.hidden}-{options.sentences}-by-{options.batch}"]
    parts += [f"microbatch-{options.microbatch}"] * (options.microbatch > 0)
    parts += [f"bucket-{options.bucket_size}"] * (options.bucket_size > 0)
    parts += [f"dropout-{options.dropout:g}"] * (options.dropout > 0)
    return "-".join([*parts, *(["selected"] if options.only is not None else [])])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer sentences and rounds: does it work?")
    made.add_argument("--rounds", type=int, help="timed epochs of each contender")
    made.add_argument("--sentences", type=int, help="in an epoch; a multiple of the batch")
    made.add_argument("--batch", type=int, default=32, help="sentences of a step, over all ranks; even")
    made.add_argument("--microbatch", type=int, default=0, help="Ranvier's microbatches; 0 is a rank's whole share")
    made.add_argument("--bucket-size", type=int, default=0, help="parameters in a bucket of Ranvier's; 0 is auto")
    made.add_argument("--learning-rate", type=float, default=1e-4)
    made.add_argument("--dropout", type=float, default=0.0, help="above 0 losses are not compared: masks differ")
    made.add_argument("--layers", type=int, default=6)
    made.add_argument("--hidden", type=int, default=384, help="a multiple of 32, the size of a head")
    made.add_argument("--vocab", type=int, default=30522)
    made.add_argument("--only", nargs="+", choices=[one.name for one in CONTENDERS], metavar="NAME",
                      help="these contenders, and transformers")
    made.add_argument("--output", type=Path, help="the file of results; by default in benchmarks/results/finetune")
    options = made.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.sentences = options.sentences or (128 if options.quick else 512)
    if options.batch % 2 or options.sentences % options.batch or options.hidden % 32:
        made.error("--batch must be even, --sentences a multiple of it, and --hidden a multiple of 32")
    return options


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(parse())
