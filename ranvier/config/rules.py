"""Problems and warnings that follow from the settings alone.

    problems(run)      each a reason to refuse the run
    warnings(run)      settings that contradict each other without harm

Nothing is built and nothing is read: no torch, no clock, no I/O. `ranvier.planner.problems` adds problems of the model
family, the task and the disk. Rules that also apply to an engine built from Python are functions of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from ranvier.config import parameter_groups
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Elastic, Guard, Memory, Optim, TensorParallel, Train
from ranvier.errors import ConfigError, counted
from ranvier.mesh import Mesh, StagePlacement

MAX_LAYERS = 10_000
"""Most layers of a model that can be cut into stages."""


def problems(run: ResolvedRun, num_ranks: int | None = None, *, num_blocks: int | None) -> Iterator[ConfigError]:
    """Every reason why `run` cannot work. num_ranks: number of started ranks, if known. num_blocks: of the run's model;
    None if it cannot be built."""
    yield from mesh_problems(run, num_ranks, num_blocks)
    yield from batch_problems(run)
    yield from update_problems(run)
    if run.model.float8:
        yield from float8_problems(run.mesh, is_fp64=run.precision == "fp64")
        yield from _no_float8_layers(run)
    yield from recompute_problems(run.memory, run.mesh, compile=run.model.compile, float8=run.model.float8)
    yield from parameter_groups.problems(run.optim)
    yield from resume_problems(run)
    yield from collectives_problems(run.comm.transport, run.comm.collectives)
    if run.launch.join_address is not None and run.comm.transport == "mpi":
        yield ConfigError("needs `comm.transport torch`: MPI's ranks are those that were started",
                          code="join-needs-torch", where="launch.join-address", value=run.launch.join_address,
                          remedy="Leave `--comm.transport auto`, or `--launch.join-address` out.")
    if run.launch.join_address is not None and run.data.task == "preference" and run.preference.needs_reference:
        yield ConfigError("cannot be used if the loss has a reference: ranks that join would not have its "
                          "log-probabilities", code="join-with-reference", where="launch.join-address",
                          value=run.launch.join_address,
                          remedy="Leave `--launch.join-address` out, or set `--preference.loss simpo`.")
    if run.launch.survive_losses and (run.comm.transport == "mpi" or run.launch.device == "cuda"):
        what = "`comm.transport torch`: MPI's ranks are those that were started" if run.comm.transport == "mpi" else \
            "`launch.device cpu`: a wait inside NCCL for a lost rank cannot be ended"
        yield ConfigError(f"needs {what}", code="survive-losses-needs", where="launch.survive-losses", value="true",
                          remedy="Leave `--launch.survive-losses` out, and use `--max-restarts` instead.")
    yield from elastic_problems(run)


# --- the mesh --------------------------------------------------------------------------------------------------------


def mesh_problems(run: ResolvedRun, num_ranks: int | None, num_blocks: int | None) -> Iterator[ConfigError]:
    """Problems of a mesh that does not fit the ranks, the model or the batch."""
    mesh, num_layers = run.mesh, run.model.num_layers
    try:
        mesh.require_known_axes("a run")
    except ConfigError as problem:
        yield problem
    if num_ranks is not None and mesh.size != num_ranks:
        yield ConfigError(f"needs {counted(mesh.size, 'rank')}, not {num_ranks}", code="mesh-needs-ranks", where="mesh",
                          value=str(mesh),
                          remedy="Change `--mesh.data` and `--mesh.pipe` so that data x pipe x row x col is "
                                 f"{num_ranks}, or start {counted(mesh.size, 'rank')}.")
    yield from tensor_problems(mesh, run.tensor)
    yield from schedule_problems(run.placement, run.pipeline.policy, run.pipeline.deferred)
    yield from divisibility_problems(run)
    yield from _rotary_problems(run)
    if num_layers > MAX_LAYERS:
        yield ConfigError(f"is more than {MAX_LAYERS}, the most that can be cut into stages", code="too-many-layers",
                          where="model.num-layers", value=num_layers, remedy="Use fewer and wider layers.")
    if num_blocks is None:
        return
    num_stages = run.placement.num_stages
    if mesh.pipe > num_blocks:
        yield ConfigError(f"is more than the {num_blocks} blocks of the model", code="fewer-blocks-than-ranks",
                          where="mesh.pipe", value=mesh.pipe,
                          remedy=f"Set `--mesh.pipe {num_blocks}` or less"
                                 f"{'' if run.model.pretrained else ', or raise `--model.num-layers`'}.")
    elif num_stages > num_blocks:
        yield ConfigError(f"makes {num_stages} stages on {mesh.pipe} ranks, more than the {num_blocks} blocks of the "
                          "model", code="fewer-blocks-than-stages", where="pipeline.stages-per-rank",
                          value=run.pipeline.stages_per_rank,
                          remedy=f"Set `--pipeline.stages-per-rank {num_blocks // mesh.pipe}` or less.")
    elif run.pipeline.boundaries is not None:
        try:
            check_boundaries(run.pipeline.boundaries, num_blocks, num_stages)
        except ConfigError as problem:
            yield problem


def schedule_problems(placement: StagePlacement, policy: str, deferred: tuple[int, ...] | None
                      ) -> Iterator[ConfigError]:
    """Problems of a schedule without support for several stages per rank, and of a wrong number of per-rank limits."""
    if deferred is not None and len(deferred) != placement.num_ranks:
        yield ConfigError(f"has {len(deferred)} numbers for {placement.num_ranks} ranks of the pipeline",
                          code="deferred-count", where="pipeline.deferred", value=deferred,
                          remedy="Set `--pipeline.deferred none`, or one number for each.")
    if placement.per_rank > 1 and policy == "1f1b":
        yield ConfigError("supports one stage per rank only", code="policy-for-one-stage",
                          where="pipeline.policy", value=policy,
                          remedy="Set `--pipeline.policy message-driven`, or `--pipeline.stages-per-rank 1`.")


def _rotary_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of dynamic rotary scaling, which chooses its base by the length of a sequence: with packing or padding,
    that is not the length of the sample."""
    task, longest = run.data.task, run.model.rope_positions
    if run.model.rope_scaling != "dynamic" or longest is None or run.model.sequence <= longest:
        return
    depends = f"and the rotary scaling dynamic depends on the length above {longest} positions"
    remedy = f"Set `--model.sequence {longest}` or less"
    if task in ("preference", "reward"):
        yield ConfigError(f"puts two answers into one sequence, {depends}", code="pairs-with-dynamic-rope",
                          where="data.task", value=task, remedy=f"{remedy}.")
    elif run.data.packing or (task in ("chat", "classification") and run.data.padding == "longest"):
        setting, value, way = ("data.packing", True, "leave `--data.packing` out") if run.data.packing else (
            "data.padding", "longest", "`--data.padding maximum`")
        yield ConfigError(f"gives samples other lengths than their own, {depends}", code="dynamic-rope-length",
                          where=setting, value=value, remedy=f"{remedy}, or {way}.")


def tensor_problems(mesh: Mesh, tensor: TensorParallel) -> Iterator[ConfigError]:
    """Problems of a tensor parallel scheme that does not support this shape of tensor mesh."""
    if tensor.scheme == "megatron" and mesh.row > 1:
        yield ConfigError(f"splits blocks over columns only, and `mesh.row` is {mesh.row}", code="megatron-with-rows",
                          where="tensor.scheme", value="megatron",
                          remedy=f"Set `--mesh.row 1` `--mesh.col {mesh.stage_size}`, or `--tensor.scheme stationary`.")


def float8_problems(mesh: Mesh, *, is_fp64: bool) -> Iterator[ConfigError]:
    """Problems of settings that are incompatible with products in float8."""
    if is_fp64:
        yield ConfigError("would round the products of an fp64 run to 8 bits", code="float8-in-fp64",
                          where="model.float8", value=True, remedy="Set `--precision bf16`, or `--model.float8 false`.")
    if mesh.stage_size > 1:
        yield ConfigError(f"is for layers that are not split, and {mesh.stage_size} ranks split them",
                          code="float8-split", where="model.float8", value=True,
                          remedy="Set `--mesh.row 1` `--mesh.col 1`, or `--model.float8 false`.")


def recompute_problems(memory: Memory, mesh: Mesh, *, compile: bool | Literal["auto"], float8: bool
                       ) -> Iterator[ConfigError]:
    """Problems of selective recomputation with incompatible settings."""
    if memory.recompute != "selective":
        return
    if compile is True and mesh.stage_size == 1:
        yield ConfigError("keeps outputs of operations, and a compiled block is a single operation",
                          code="recompute-selective-compiled", where="memory.recompute", value=memory.recompute,
                          remedy="Set `--model.compile false`, or `--memory.recompute none`: compiled blocks compute "
                                 "elementwise operations again automatically.")
    if float8:
        yield ConfigError("does not keep products in float8", code="recompute-selective-float8",
                          where="memory.recompute", value=memory.recompute,
                          remedy="Set `--memory.recompute alternate`, or `--model.float8 false`.")


def _no_float8_layers(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of a run in which no layer would multiply in float8."""
    if run.lora.rank:
        yield ConfigError("is for layers that train, and the layers below adapters are frozen", code="float8-with-lora",
                          where="model.float8", value=True, remedy="Set `--lora.rank 0`, or `--model.float8 false`.")
    if run.model.hidden % 16:
        wider = "" if run.model.pretrained else f"`--model.hidden {-(-run.model.hidden // 16) * 16}`, or "
        yield ConfigError("needs a hidden size that 16 divides", code="float8-hidden", where="model.float8", value=True,
                          remedy=f"Set {wider}`--model.float8 false`.")


def divisibility_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of sizes that rows or columns must divide but do not. They need not divide the heads of keys and values
    (`Split.for_cols`), unless a norm is over all of them."""
    mesh, model, tensor = run.mesh, run.model, run.tensor
    shares: list[tuple[str, str, int]] = [("row", "batch.microbatch-size", run.batch.microbatch_size),
                                          ("col", "model.heads", model.heads)]
    if tensor.scheme == "stationary" and model.hidden % mesh.col == 0:
        shares.append(("row", f"model.hidden / {mesh.col}, the features of a column:", model.hidden // mesh.col))
    if tensor.shards_sequence:
        shares.append(("col", "model.sequence", model.sequence))
    if model.qk_norm == "all" and model.kv_heads:
        shares.append(("col", "model.kv-heads with `model.qk-norm all`:", model.kv_heads))
    for axis, what, size in shares:
        count = getattr(mesh, axis)
        if size % count:
            largest = next(part for part in range(min(count, size), 0, -1) if size % part == 0)
            other = what.partition(" ")[0]
            is_given = run.model.pretrained is not None and other in ("model.heads", "model.hidden", "model.kv-heads")
            change, larger = "" if is_given else f", or change {other}", -(-size // count) * count
            if other == "batch.microbatch-size":
                fits = larger * mesh.num_replicas <= run.batch.global_size
                change = (", or " if fits else f", or --batch.global-size {larger * mesh.num_replicas} with ") + (
                    f"--{other} {larger}: rows share the sequences of a microbatch")
            yield ConfigError(f"does not divide {what} {size}", code="mesh-does-not-divide", where=f"mesh.{axis}",
                              value=count, remedy=f"Set `--mesh.{axis} {largest}`{change}.")
    if model.vocab < max(mesh.row, mesh.col):
        yield ConfigError(f"is smaller than the tensor mesh: every rank needs a part of it, on {mesh.row} rows and "
                          f"{mesh.col} columns", code="vocab-below-tensor-mesh", where="model.vocab", value=model.vocab,
                          remedy=f"Set `--model.vocab {max(mesh.row, mesh.col)}` or more.")


def check_boundaries(boundaries: Sequence[int], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return manual boundaries if they cut `num_blocks` into `num_stages` non-empty stages. ConfigError otherwise."""
    boundaries = tuple(boundaries)
    remedy = (f"Give {num_stages - 1} rising block numbers between 1 and {num_blocks - 1}, "
              f"the first block of each stage after the first.")
    if len(boundaries) != num_stages - 1:
        raise ConfigError(f"has {len(boundaries)} numbers for {num_stages} stages", code="boundaries-count",
                          where="pipeline.boundaries", value=boundaries, remedy=remedy)
    edges = (0, *boundaries, num_blocks)
    if any(first >= second for first, second in pairwise(edges)):
        raise ConfigError("does not rise, or leaves a stage without blocks", code="boundaries-not-rising",
                          where="pipeline.boundaries", value=boundaries, remedy=remedy)
    return boundaries


# --- the batch and its update ----------------------------------------------------------------------------------------


def batch_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of replicas without a sample, and of microbatches that are larger than a replica's share."""
    mesh, batch, share = run.mesh, run.batch, run.replica_batch_size
    if batch.global_size < mesh.data:
        yield ConfigError(f"leaves replicas without a sequence: `mesh.data` is {mesh.data}",
                          code="replica-without-samples", where="batch.global-size", value=batch.global_size,
                          remedy=f"Set `--batch.global-size {mesh.data}` or more, or lower `--mesh.data`.")
    elif batch.microbatch_size > share:
        yield ConfigError(f"is more than a replica's share of the batch, {share} of {batch.global_size} sequences",
                          code="microbatch-above-share", where="batch.microbatch-size", value=batch.microbatch_size,
                          remedy=f"Set `--batch.microbatch-size {share}` or less, or raise `--batch.global-size`.")


def update_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of settings that contradict how parameters are updated."""
    count = run.num_microbatches
    if run.optim.update_in_backward and count > 1:
        yield ConfigError(f"needs batches of one microbatch, not {count}: blocks share the memory of gradients, in "
                          "which those of several microbatches cannot add up", code="in-backward-microbatches",
                          where="optim.update-in-backward", value=True,
                          remedy=f"Set `--batch.microbatch-size {run.replica_batch_size}`, or leave it out.")
    yield from in_backward_problems(run.optim, scales_loss=run.precision == "fp16")
    yield from guard_problems(run.guard, run.optim)


def in_backward_problems(optim: Optim, *, scales_loss: bool, own: bool = True) -> Iterator[ConfigError]:
    """Problems of updates in the backward, which cannot wait for values that are known only after it. own: whether the
    optimizer is Ranvier's."""
    for wrong, code, what, remedy in (
            (not own, "in-backward-own-optimizer", "needs Ranvier's own optimizer",
             "Give the engine optim=, and no optimizer=."),
            (bool(optim.clip_norm) and optim.clip_from == "step", "in-backward-clip",
             "cannot clip by a norm that is known only at the end",
             "Set `--optim.clip-norm 0`, or `--optim.clip-from previous-step`, which gives other numbers."),
            (scales_loss, "in-backward-loss-scale", "cannot skip a step whose gradients overflow",
             "Set `--precision bf16`, or leave it out.")):
        if wrong and optim.update_in_backward:
            yield ConfigError(what, code=code, where="optim.update-in-backward", value=True, remedy=remedy)


def looks_before_update(guard: Guard, optim: Optim) -> bool:
    """Whether steps are checked before they are applied. With updates in the backward, blocks change before the step
    can be checked, so that stop has the effect of none."""
    return guard.bad_step != "none" and not optim.update_in_backward


def guard_problems(guard: Guard, optim: Optim) -> Iterator[ConfigError]:
    """Problems of a guard with these settings."""
    if optim.update_in_backward and guard.bad_step in ("skip", "rollback"):
        yield ConfigError("cannot check a step before blocks are updated: `optim.update-in-backward` is set",
                          code="guard-with-in-backward", where="guard.bad-step", value=guard.bad_step,
                          remedy="Set `--guard.bad-step stop`, or leave `--optim.update-in-backward` out.")
    elif guard.loss_spike_factor and not looks_before_update(guard, optim):
        why = "`guard.bad-step` is none" if guard.bad_step == "none" else "`optim.update-in-backward` is set"
        yield ConfigError(f"has no effect if steps are not checked before they are applied: {why}",
                          code="spikes-not-judged", where="guard.loss-spike-factor", value=guard.loss_spike_factor,
                          remedy="Set `--guard.loss-spike-factor 0`, or change the other setting.")


_OF_RANVIERS_OPTIMIZER = ("algorithm", "options", "betas", "epsilon", "momentum", "muon_scale", "weight_decay", "decay",
                          "groups", "offload", "offload_share", "buckets_in_flight", "shard")


def unused_with_torch_optimizer(optim: Optim) -> list[str]:
    """The fields that are set but have no effect if a torch optimizer updates the parameters."""
    default = Optim()
    return [name for name in _OF_RANVIERS_OPTIMIZER if (value := getattr(optim, name)) and value != getattr(
        default, name)]


# --- how a run starts ------------------------------------------------------------------------------------------------


def collectives_problems(transport: str, collectives: str) -> Iterator[ConfigError]:
    """Problems of collectives over MPI if messages use another transport."""
    if transport == "torch" and collectives == "mpi":
        yield ConfigError("needs MPI for messages, too", code="mpi-collectives-alone", where="comm.collectives",
                          value=collectives,
                          remedy="Set `--comm.transport mpi`, or leave `comm.collectives auto`.")


def resume_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of a run that is to resume but has no folder to look into."""
    if run.resume == "auto" and run.run_dir is None and run.checkpoint.dir is None:
        yield ConfigError("needs a folder to look for checkpoints in", code="resume-without-folder", where="resume",
                          value="auto", remedy="Set `--run-dir`, or `--checkpoint.dir`, to the same folder each time.")


_SMALL_BUCKET = 1024
"""Number of parameters; a run with smaller buckets gets a warning."""


def warnings(run: ResolvedRun) -> Iterator[ConfigError]:
    """Warnings about values that do not have the intended effect."""
    asked = run.pipeline.in_flight
    if asked != "auto" and run.pipeline.policy != "gpipe" and asked < run.mesh.pipe:
        yield ConfigError(f"leaves some of the {run.mesh.pipe} stages idle", code="in-flight-below-stages",
                          where="pipeline.in-flight", value=asked,
                          remedy=f"Set `--pipeline.in-flight {run.mesh.pipe}` or more, or auto.")
    if run.optim.clip_norm and run.optim.clip_from == "previous-step":
        scales, judges = run.precision == "fp16", looks_before_update(run.guard, run.optim)
        if scales or judges:
            why = "`precision` is fp16" if scales else f"`guard.bad-step` is {run.guard.bad_step}"
            yield ConfigError(f"clips by another norm and saves no time: updates wait for all gradients, since {why}",
                              code="clip-from-saves-nothing", where="optim.clip-from", value=run.optim.clip_from,
                              remedy="Leave it out" + ("." if scales else ", or set `--guard.bad-step none`."))
    if run.optim.bucket_size != "auto" and run.optim.bucket_size < _SMALL_BUCKET:
        yield ConfigError("makes updates slow: each bucket needs a separate call, and each chunk of a few "
                          "buckets a collective",
                          code="bucket-size-small", where="optim.bucket-size", value=run.optim.bucket_size,
                          remedy="Leave it out, or set 65,536 parameters or more.")
    if run.train.epochs is None:
        yield from length_warnings(run.train)


def length_warnings(train: Train) -> Iterator[ConfigError]:
    """Warnings about lengths that exceed the number of steps, which must be known."""
    if train.warmup_steps >= train.steps:
        how = "`--train.steps`" if train.epochs is None else "`--train.epochs`"
        yield ConfigError(f"is not shorter than the run of {train.steps} steps, so warmup takes all of it",
                          code="warmup-longer-than-run", where="train.warmup-steps", value=train.warmup_steps,
                          remedy=f"Lower `--train.warmup-steps`, or raise {how}.")


# --- elastic runs ----------------------------------------------------------------------------------------------------


def elastic_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of the settings of an elastic run."""
    elastic = run.elastic
    yield from freeze_problems(elastic, run.model.num_layers)
    if elastic.freeze != "none":
        yield from freezing_problems(run)
    if elastic.freeze == "gradient-norm" and run.model.num_layers < 2:
        yield ConfigError("cannot compare layers in a model with only one", code="freeze-one-layer",
                          where="elastic.freeze", value=elastic.freeze,
                          remedy="Set `--elastic.freeze cap`, or use more layers.")
    dropouts = {"model": run.model.dropout, "lora": run.lora.dropout if run.lora.rank else 0.0}
    active = next((name for name, probability in dropouts.items() if probability), None)
    if elastic.cache and active is not None and elastic.frozen_dropout:
        yield ConfigError(f"would repeat the dropout masks of one epoch ({active}.dropout is {dropouts[active]:g})",
                          code="cache-with-dropout", where="elastic.cache", value=True,
                          remedy="Set `--elastic.frozen-dropout false`: frozen layers then have no dropout.")
    if elastic.cache and run.data.augment != "none" and not run.data.augment_repeats:
        yield ConfigError(f"would repeat the augmentation of one epoch (`data.augment` is {run.data.augment})",
                          code="cache-with-augmentation", where="elastic.cache", value=True,
                          remedy="Set `--data.augment-repeats true`: each epoch then repeats the first one's.")
    if run.optim.update_in_backward and elastic.profile_microbatches:
        yield ConfigError("tries several microbatches, and updates in the backward need one",
                          code="in-backward-profile", where="elastic.profile-microbatches", value=True,
                          remedy="Leave out `--optim.update-in-backward`.")
    if run.optim.update_in_backward and elastic.global_batch != "keep":
        yield ConfigError("needs batches of one microbatch, and this one grows", code="in-backward-growing-batch",
                          where="elastic.global-batch", value=elastic.global_batch,
                          remedy="Leave out `--optim.update-in-backward`.")


def freezing_problems(run: ResolvedRun) -> Iterator[ConfigError]:
    """Problems of a run whose layers freeze, by whatever policy."""
    if run.elastic.auto_pipe and run.elastic.cut == "reference" and run.placement.per_rank > 1:
        yield ConfigError(f"supports one stage per rank only, and there are {run.placement.per_rank}",
                          code="elastic-cut-stages", where="elastic.cut", value=run.elastic.cut,
                          remedy="Set `--elastic.cut exact`, or `--pipeline.stages-per-rank 1`.")
    if run.optim.ema and not run.elastic.dry_run:
        yield ConfigError("keeps no average of layers that freeze", code="ema-with-freezing", where="optim.ema",
                          value=run.optim.ema, remedy="Set `--optim.ema 0`, or `--elastic.freeze none`.")


def manual_depth(text: str) -> tuple[int, int]:
    """(step, layers) of a text STEP:LAYERS. ConfigError when it has another form."""
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None:
        raise ConfigError("is not of the form STEP:LAYERS", code="malformed-manual-freeze", where="elastic.manual",
                          value=text,
                          remedy="Give entries such as 100:4, which freezes the first 4 layers after step 100.")
    return int(found[1]), int(found[2])


def freeze_problems(elastic: Elastic, num_layers: int) -> Iterator[ConfigError]:
    """Problems of the freeze settings, for a model with `num_layers` layers."""
    if elastic.freeze != "manual":
        if elastic.manual:
            yield ConfigError(f"is given, but `elastic.freeze` is {elastic.freeze}", code="manual-freeze-unused",
                              where="elastic.manual", value=elastic.manual,
                              remedy="Set `--elastic.freeze manual`, or leave out the entries.")
        return
    if not elastic.manual:
        yield ConfigError("needs entries", code="manual-freeze-missing", where="elastic.freeze", value="manual",
                          remedy="Give `--elastic.manual` entries such as 100:4, which freezes the first 4 layers "
                                 "after step 100.")
    depths: list[tuple[str, int, int]] = []
    for text in elastic.manual:
        try:
            depths.append((text, *manual_depth(text)))
        except ConfigError as problem:
            yield problem
    for text, _, layers in depths:
        if layers > num_layers:
            yield ConfigError(f"freezes more than the model's {num_layers} layers", code="manual-freeze-layers",
                              where="elastic.manual", value=text, remedy=f"Freeze {num_layers} layers or fewer.")
    for (before, earlier, _), (text, step, _) in pairwise(depths):
        if step <= earlier:
            yield ConfigError(f"is not later than the entry before it, {before}", code="manual-freeze-order",
                              where="elastic.manual", value=text,
                              remedy="Give the entries in the order of their steps, one for each step.")
