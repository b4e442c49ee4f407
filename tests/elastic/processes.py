"""Elastic runs as real processes: `ranvier train`, `join` and `resize`, their ranks, and what they leave.

A process that hangs is ended by the time limit of its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

from ranvier.comm.signed_store import sign_store
from ranvier.config import read
from ranvier.config.run import Pipeline
from ranvier.launch import contact
from ranvier.launch.stopped_ranks import find_rank_processes_by_variable
from ranvier.mesh import Mesh
from ranvier.train.resize import write_request
from tests.elastic.runs import AT_ONCE, losses, run_all


class Command:
    """`ranvier train` on a tiny BERT over two epochs, and what it leaves in its folder."""

    def __init__(self, sentences, folder, transport, ranks=4, manual="5:2,14:4", faults=(), inside=(), **flags):
        """inside: the command that runs it on another host."""
        self.folder = folder
        settings = {
            "model.num-layers": 6, "model.hidden": 16, "model.heads": 2, "model.vocab": 120, "model.sequence": 12,
            "batch.global-size": 8, "batch.microbatch-size": 2, "train.steps": 24, "train.learning-rate": 3e-3,
            "train.warmup-steps": 0, "train.eval-every": 0, "train.sample-tokens": 0, "precision": "fp64",
            "mesh.data": 1, "mesh.pipe": ranks, "data.task": "classification", "data.train": sentences / "train.tsv",
            "data.eval": sentences / "eval.tsv", "data.cache-dir": sentences / "cache", "comm.transport": transport,
            "comm.timeout-seconds": 20, "checkpoint.every": 0, "launch.device": "cpu", "run-dir": folder, **({
                "elastic.freeze": "manual", "elastic.manual": manual} if manual else {}), **{
                name.replace("__", ".").replace("_", "-"): value
                for name, value in flags.items()}}
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        program = ["tests.without_pictures"] if not faults else [
            "ranvier.cli.faults", *(word for fault in faults for word in ("--fault", fault)), "--"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", *program, "train", "gpt-tiny", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ | {"OMP_NUM_THREADS": "1"})

    def lines(self, name):
        try:
            return [json.loads(line) for line in (self.folder / name).read_text().splitlines(keepends=True)
                    if line.endswith("\n")]
        except FileNotFoundError:
            return []

    @property
    def losses(self):
        return [line["loss"] for line in self.lines("metrics.jsonl")]

    @property
    def transitions(self):
        return [line for line in self.lines("events.jsonl") if line["event"] == "transition"]

    def wait_until(self, condition):
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.03)

    def ranks(self):
        """Process ids of the ranks, by rank."""
        return {rank: process.pid for variable in ("RANVIER_LOCAL_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
                for rank, process in find_rank_processes_by_variable(self.process, variable).items()}

    def end(self):
        """Exit code and output; no process of it is left."""
        text, _ = self.process.communicate()
        return self.process.returncode, text


class Joining:
    """`ranvier join`; its ranks are found in the same way as a run's."""

    ranks = Command.ranks

    def __init__(self, run, *options, inside=()):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "ranvier", "join", str(run.folder), *map(str, options)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ | {"OMP_NUM_THREADS": "1"})

    def end(self):
        text, _ = self.process.communicate()
        return self.process.returncode, text


def resize(run, data, pipe, wait=60):
    return subprocess.run([sys.executable, "-m", "ranvier", "resize", str(run.folder), "--data", str(data), "--pipe",
                           str(pipe), "--wait", str(wait)], capture_output=True, text=True, check=False)


@contextmanager
def stopped(run):
    """Stop the ranks with which the run was started, within a step or between two, until the block ends."""
    run.wait_until((run.folder / contact.NAME).exists)
    run.stopped = getattr(run, "stopped", None) or list(run.ranks().values())
    for process in run.stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in run.stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def events(run, name):
    return [line for line in run.lines("events.jsonl") if line["event"] == name]


def undisturbed(run, tmp_path):
    """Losses of the same run on one rank in this process, with one microbatch a batch."""
    there = read.merge([read.load(str(run.folder / "run.toml"))[1]]).run
    here = replace(there, mesh=Mesh(), batch=AT_ONCE, run_dir=tmp_path / "here", pipeline=Pipeline(),
                   launch=replace(there.launch, join_address=None))
    run_all(here)
    return losses(here)


def silent_newcomer(run):
    """Answer the run's call as a newcomer that never connects; returns the store and the prefix of its keys."""
    request_id = "00000000000000aa"
    with stopped(run):
        found = contact.read_contact(run.folder)
        _, store = sign_store(contact.connect(found), found.secret)
        write_request(run.folder, request_id, {"ranks": 1})
    run.wait_until(lambda: store.check([f"ranvier/join/{request_id}/call"]))
    store.set(f"ranvier/join/{request_id}/here/0", "")
    return store, f"ranvier/join/{request_id}"
