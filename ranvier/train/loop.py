"""A training run from its configuration to its folder of results: read this first.

    prepare the text -> build the engine -> [learning rate -> train_batch -> metrics] x steps -> evaluate -> report

Every rank runs all of it. Only rank 0 has trackers, so only rank 0 prints and writes. Nothing here waits for the step
that has just been started: a step's numbers are read while the next one is under way.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch

from ranvier import resolve
from ranvier.comm.protocol import Group
from ranvier.data.loader import Loader, Prepared, prepare
from ranvier.errors import RanvierError
from ranvier.models.gpt import flops_per_sequence, gpt
from ranvier.pipeline.engine import Engine
from ranvier.run import Run
from ranvier.run import Train as TrainConfig
from ranvier.train.console import console
from ranvier.train.events import EndEvent, EvalEvent, NoteEvent, StartEvent, StepEvent, Tracker, Trackers
from ranvier.train.files import EventsFile, MetricsFile, open_folder, writing
from ranvier.train.metrics import Meter, PendingStep
from ranvier.train.peak import matrix_product_rate
from ranvier.train.report import History, rank_facts, summarise, write_report
from ranvier.train.sample import continue_tokens
from ranvier.train.tensorboard import TensorBoard
from ranvier.train.timeline import gather_timelines
from ranvier.world import World

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def train(run: Run, recipe: str, world: World, *, trackers: Sequence[Tracker] = (),
          stream: TextIO | None = None) -> dict[str, object]:
    """Train as `run` says and leave the results in its folder; the contents of summary.json, the same on every rank.

    Args:
        recipe: the run's name, for its folder and headings.
        trackers: more takers of the run's events, beside files, TensorBoard and console; used on rank 0.
        stream: where rank 0's console writes; standard output by default.

    Raises RanvierError when text, settings or folder do not allow the run, or when the loss stops being a number.
    """
    began = time.monotonic()
    everyone = world.backend.group("train", [tuple(range(world.size))])
    data = _prepare(run, world, everyone)
    engine = _engine(run, world)
    run_dir = run.run_dir or default_folder(recipe)
    history = History()
    outputs = _outputs(run_dir, history, trackers, stream) if world.rank == 0 else Trackers()
    try:
        run = _resolved(run, engine, world, run_dir)
        if world.rank == 0:
            with writing(run_dir / "run.toml"):
                resolve.write(run, run_dir / "run.toml")
        outputs.event(StartEvent(recipe=recipe, run_dir=run_dir, mesh=run.mesh, steps=run.train.steps,
                                 settings=_settings(run, world), stages=str(engine.stages)))
        meter = _steps(run, engine, data, everyone, world, outputs)
        summary = _finish(run, recipe, engine, data, everyone, world, outputs, history, meter, run_dir, began)
    finally:
        outputs.close()
    engine.close()
    return summary
