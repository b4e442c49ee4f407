"""Resolves a run's settings: every `auto` becomes a value.

    resolve(run, facts) -> ResolvedRun

Nothing is decided here. A plan chooses the mesh and the microbatch, the data determines the steps of an epoch, and a
device where optimizer states fit; these answers are passed as `Facts`, and `resolve` substitutes them. Answers arrive
one after the other while a run starts, so a `ResolvedRun` may be resolved again with more facts. Values that follow
from resolved settings by arithmetic (a replica's share of the batch, the number of microbatches) are computed only by
`ResolvedRun`. Pure: no torch, no clock, no I/O.

Still `auto` in a `ResolvedRun`, because the answer differs between ranks, or is known only after a measurement:

    memory.recompute        chosen on each stage, by its blocks
    optim.offload_share     from the free memory of a rank's device
    pipeline.in_flight, pipeline.defer_bytes    by counted blocks (`plan/limits`)
    launch.*                from the machine that a rank runs on
    tensor.reduce_dtype, optim.reduce_dtype    the format of the summed tensors
    elastic.cache_from      measured while the run trains
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ranvier.config.run import Batch, MeshSettings, Optim, Pipeline, Positive, Run
from ranvier.config.section import section
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh, StagePlacement


@section
class ResolvedBatch(Batch):
    """The batch with one size of microbatches."""

    microbatch_size: Positive = 4


def _with_one_size(batch: object) -> object:
    """A `Batch` whose microbatch size is a number, as a `ResolvedBatch`."""
    return ResolvedBatch(**_fields(batch)) if type(batch) is Batch else batch


@section
class ResolvedRun(Run):
    """A run with a mesh and a microbatch size, and the values that follow from them. `dataclasses.replace` keeps it
    resolved."""

    mesh: Mesh = Mesh()
    batch: Annotated[ResolvedBatch, BeforeValidator(_with_one_size)] = ResolvedBatch()

    @property
    def replica_batch_size(self) -> int:
        """Most samples of a global batch on one replica."""
        return -(-self.batch.global_size // self.mesh.data)

    @property
    def device_type(self) -> str:
        """torch's name of the device type for predictions; auto counts as a CPU."""
        return "cuda" if self.launch.device == "cuda" else "cpu"

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a global batch on one replica; the last one may be smaller."""
        return -(-self.replica_batch_size // self.batch.microbatch_size)

    @property
    def last_microbatch_fraction(self) -> float:
        """Size of the last microbatch, relative to the others."""
        return self.replica_batch_size / self.batch.microbatch_size - (self.num_microbatches - 1)

    @property
    def row_microbatch_size(self) -> int:
        """Samples of a microbatch on one row of the tensor mesh."""
        return self.batch.microbatch_size // self.mesh.row

    @property
    def placement(self) -> StagePlacement:
        """Stages of each rank of the pipeline."""
        return stage_placement(self.mesh.pipe, self.pipeline)


def stage_placement(pipe: int, pipeline: Pipeline) -> StagePlacement:
    """Placement of stages on `pipe` ranks; a single rank has one stage."""
    return StagePlacement(num_ranks=pipe, per_rank=pipeline.stages_per_rank if pipe > 1 else 1, how=pipeline.placement)


@section
class Facts:
    """Answers for settings that a run leaves open. None: not known (yet), so the setting stays unchanged.

    mesh, microbatch_size: from a plan, or the shape of the tensor mesh with the fewest bytes. tile: rows and columns of
    the tensor mesh on one node. num_samples: training samples in an epoch, from which `train.epochs` gives the steps.
    num_classes: of the data. device: kind of device of the ranks. offload: where optimizer states fit. offload_share:
    their share in host memory, with offload hybrid.
    """

    mesh: Mesh | None = None
    microbatch_size: Positive | None = None
    tile: tuple[Positive, Positive] | None = None
    num_samples: int | None = None
    num_classes: Positive | None = None
    device: Literal["cpu", "cuda"] | None = None
    offload: Literal["none", "stream", "host"] | None = None
    offload_share: float | None = None


def resolve(run: Run, facts: Facts | None = None) -> ResolvedRun:
    """`run` with the answers of `facts` for the settings that it leaves open; other settings stay unchanged.

    ConfigError if an axis of the mesh or the microbatch size is still auto, or if the data has another number of
    classes than the run's setting.
    """
    facts = facts or Facts()
    size = run.batch.microbatch_size if facts.microbatch_size is None else facts.microbatch_size
    if size == "auto":
        raise ConfigError("is auto, and must be a number here", code="microbatch-size-auto",
                          where="batch.microbatch-size", value="auto",
                          remedy="Set `--batch.microbatch-size`, or plan the run first (ranvier.planner.auto).")
    batch = ResolvedBatch(**_fields(run.batch) | {"microbatch_size": size})
    train, model = run.train, run.model
    if train.epochs is not None and facts.num_samples is not None:
        train = replace(train, steps=-(-train.epochs * facts.num_samples // batch.global_size))
    if facts.num_classes is not None:
        if model.num_classes not in ("auto", facts.num_classes):
            raise ConfigError(f"is not the number of classes in the data, {facts.num_classes}",
                              code="num-classes-differ", where="model.num-classes", value=model.num_classes,
                              remedy="Leave it out: auto takes it from the data.")
        model = replace(model, num_classes=facts.num_classes)
    optim, launch = run.optim, run.launch
    if facts.offload is not None and optim.offload == "auto":
        optim = replace(optim, offload=facts.offload)
    if facts.offload_share is not None and optim.offload == "hybrid" and optim.offload_share == "auto":
        optim = replace(optim, offload_share=facts.offload_share)
    if facts.device is not None:
        launch = replace(launch, device=facts.device)
    mesh = facts.mesh or (run.mesh.with_sizes() if isinstance(run.mesh, MeshSettings) else run.mesh)
    if facts.tile is not None and mesh.tile is None:
        mesh = mesh.with_tile(facts.tile)
    sections = _fields(run) | {"mesh": mesh, "batch": batch, "train": train, "model": model,
                               "optim": optim, "launch": launch}
    return ResolvedRun(**sections)


def _fields(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


# --- answers by rule -------------------------------------------------------------------------------------------------


def auto_offload(device: str, needed_bytes: int, free_bytes: int) -> Literal["none", "stream"]:
    """The place of optimizer states that `auto` stands for: the device, unless it is a GPU with too little free memory.

    needed_bytes: memory that the rank needs on its device with the states there: predicted before a run starts; twice
    the bytes of the states for an engine built from Python, for which nothing is predicted.
    """
    return "stream" if device == "cuda" and needed_bytes > free_bytes else "none"


def auto_offload_share(device: str, needed_bytes: int, state_bytes: int, free_bytes: int) -> float:
    """The share of the optimizer states in host memory that `auto` stands for, between 0 and 1: the smallest share that
    leaves enough device memory, rounded up to a thousandth. On a CPU, where it has no benefit, one half.

    needed_bytes: memory that the rank needs on its device with all states there. state_bytes: the part that can leave
    it.
    """
    if device != "cuda":
        return 0.5
    missing = max(0, needed_bytes - free_bytes)
    return min(1000, ceil(1000 * missing / max(1, state_bytes))) / 1000


def bucket_size(optim: Optim, device: str) -> int:
    """`optim.bucket_size`, or, for auto, a number that keeps a GPU's link busy, or fits into a CPU's cache."""
    if optim.bucket_size != "auto":
        return optim.bucket_size
    return 4_194_304 if device == "cuda" else 262_144


def chunk_size(optim: Optim, device: str) -> int:
    """Gradient elements that are reduced together, before rounding up to a multiple of the group's size."""
    return bucket_size(optim, device) * optim.chunk_buckets
