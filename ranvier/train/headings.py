"""What a run has come to: its settings with every `auto` replaced, and in words."""

from __future__ import annotations

from dataclasses import replace

import torch

from ranvier.data.task import Prepared
from ranvier.models import families
from ranvier.optim.optimizer import resolve_bucket_size
from ranvier.pipeline.engine import Engine
from ranvier.precision import DTYPES, is_half
from ranvier.run import Run
from ranvier.world import World

UNITS = {"lm": "tokens", "classification": "sentences", "qa": "questions", "images": "images"}
"""What a task's targets are counted in."""


def settings_text(run: Run, engine: Engine, world: World, data: Prepared, elastic: str) -> dict[str, str]:
    """What a reader wants to know of a run, in words. elastic: how it transforms itself; empty where it does not."""
    model, unit = run.model, "sequences" if run.data.task == "lm" else UNITS[run.data.task]
    num_parameters = sum(parameter.numel for parameter in engine.layout.parameters
                         if parameter.owner == parameter.name)
    return {
        "model": f"{families.text(run)}: {num_parameters:,} parameters in {run.precision}"
                 + (f", from {model.pretrained}" if model.pretrained else ""),
        "data": data.about,
        "batch": f"{run.batch.global_size} {unit} in microbatches of {run.batch.microbatch_size}",
        "pipeline": f"{run.pipeline.policy}, at most {engine.in_flight} microbatches in flight"
                    + ("" if run.memory.checkpoint == "none" else f", checkpoints: {run.memory.checkpoint}"),
        **({"tensor mesh": tensor_text(run)} if run.mesh.stage_size > 1 else {}),
        "optimizer": optimizer_text(run),
        **({"elastic": elastic} if elastic else {}),
        "ranks": f"{world.size} over {world.backend.name} on {world.device.type}, threads for each: "
                 f"{torch.get_num_threads()}",
        "folder": str(run.run_dir)}


def resolved(run: Run, engine: Engine, world: World, origin: str = "none") -> Run:
    """`run` with every `auto` replaced by what it has come to on these ranks. origin: with which checkpoint the run of
    this folder began, or none."""
    transport = {} if world.backend.name == "in-process" else {"transport": world.backend.name}
    optim = replace(run.optim, offload=engine.flat_optimizer.offload,
                    bucket_size=resolve_bucket_size(run.optim, world.device.type))
    if is_half(DTYPES[run.precision]) and run.mesh.data > 1:
        optim = replace(optim, reduce_dtype="half" if optim.reduce_dtype == "auto" else optim.reduce_dtype)
    resume = origin if run.resume == "auto" else run.resume  # who repeats the run from its file begins as it did
    return replace(run, resume=resume, pipeline=replace(run.pipeline, boundaries=engine.boundaries or None,
                                         in_flight=engine.in_flight), optim=optim,
                   comm=replace(run.comm, **transport),
                   launch=replace(run.launch, threads=torch.get_num_threads(), device=world.device.type))


def tensor_text(run: Run) -> str:
    """The split of blocks in words."""
    tensor = run.tensor
    more = [text for said, text in ((tensor.sequence_sharding, "sequence sharded"),
                                    (tensor.keep_weights, "gathered weights kept")) if said]
    return ", ".join([f"{run.mesh.row} x {run.mesh.col}", tensor.scheme, *more])


def optimizer_text(run: Run) -> str:
    """The optimizer in words, its settings resolved."""
    optim = run.optim
    where = {"none": "states on the device", "host": "states and updates on the host",
             "stream": f"states streamed from the host, {optim.buckets_in_flight} buckets at once"}[optim.offload]
    shared = f", sharded over {run.mesh.data} replicas" if optim.shard and run.mesh.data > 1 else ""
    return f"{optim.algorithm} in buckets of {optim.bucket_size:,}, {where}{shared}"
