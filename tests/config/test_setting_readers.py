"""How far a setting travels: the files that read it in a run."""

import dataclasses
import io
import sys
from collections import defaultdict
from pathlib import Path

import ranvier
from ranvier.config import run as sections
from ranvier.config.run import (
    Batch,
    Checkpoint,
    Data,
    Elastic,
    Guard,
    Launch,
    Memory,
    Optim,
    Pipeline,
    Run,
    Train,
    Transformer,
)
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from tests.config.test_effects import texts

PACKAGE = Path(ranvier.__file__).parent
BESIDE = {"config", "cost", "plan", "planner", "cli"}
"""Packages that check, predict, plan and print settings, but do not act on them."""
COMPARES = "pipeline/same_on_ranks.py"
"""Compares the settings of all ranks."""
STATE = {"Batch.microbatch_size", "Batch.global_size"}
"""The state of a run: a transition changes the mesh and the sizes of the batch, so all code that describes a run reads
them."""


def test_a_setting_is_read_in_at_most_four_files_of_a_run(tmp_path, monkeypatch):
    readers = defaultdict(set)

    def watch(section):
        names = {field.name for field in dataclasses.fields(section)}
        plain = section.__getattribute__

        def read(self, name):
            if name in names:
                caller = Path(sys._getframe(1).f_code.co_filename)
                if caller.is_relative_to(PACKAGE) and (file := caller.relative_to(PACKAGE)).parts[0] not in BESIDE and (
                        str(file) != COMPARES):
                    readers[f"{section.__name__}.{name}"].add(str(file))
            return plain(self, name)

        monkeypatch.setattr(section, "__getattribute__", read)

    for section in (Batch, Checkpoint, sections.Comm, Data, Elastic, Guard, Launch, sections.Log, sections.Lora, Memory,
                    Optim, Pipeline, sections.TensorParallel, Train, Transformer):
        watch(section)
    texts(tmp_path)
    run = Run(mesh=Mesh(pipe=2), batch=Batch(global_size=8, microbatch_size=4), run_dir=tmp_path / "run",
              model=Transformer(num_layers=2, hidden=16, heads=2, vocab=60, sequence=8), memory=Memory(recompute=1),
              train=Train(epochs=2, sample_tokens=0, eval_every=2), checkpoint=Checkpoint(every=3),
              optim=Optim(offload="stream", clip_norm=1.0, shard=True), guard=Guard(bad_step="skip"),
              elastic=Elastic(freeze="manual", manual=("1:1",), auto_pipe=True, auto_dp=True, cache=True),
              data=Data(task="classification", train=str(tmp_path / "train.tsv"), cache_dir=tmp_path / "cache"))
    run_ranks(lambda world: train(run, "tiny", world, stream=io.StringIO()), 2, timeout_seconds=120)

    assert {"optim/optimizer.py"} <= readers["Optim.offload"] and len(readers) > 80  # the run was watched
    assert {name: files for name, files in readers.items() if len(files) > 4 and name not in STATE} == {}
