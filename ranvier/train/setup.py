"""Set-up of a run: its data and initial weights, what all ranks must agree on before there is an engine, and the
settings once every `auto` is resolved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

from ranvier.checkpoint.hf.from_pretrained import load_pretrained, resolve_pretrained, with_model
from ranvier.checkpoint.hf.import_model import check_adapters, check_source
from ranvier.checkpoint.hf.peft import AdapterFolder, load_adapters
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.comm.mixed_backend import MixedBackend
from ranvier.comm.protocol import Group
from ranvier.config import read
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.resolve import bucket_size as resolve_bucket_size
from ranvier.config.task_form import form_of
from ranvier.cost.tensor_traffic import tensor_mesh_facts
from ranvier.data.cache import PreparationProgress, cache_folder, process_name
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.data.prepare import prepare
from ranvier.data.task import AnyTokenizer, Prepared, TokenizerWithFiles
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import ConfigError, DataError, counted
from ranvier.models import any_transformers, families
from ranvier.optim.learning_rate import describe as describe_schedule
from ranvier.pipeline.engine import Engine
from ranvier.plan.limits import defers_by_limits
from ranvier.planner.auto import shipped_cluster_with
from ranvier.precision import DTYPES, is_half
from ranvier.schedule.policies import policy_named
from ranvier.system.atomic_file import write_atomically
from ranvier.train.logs import writing
from ranvier.train.saving import checkpoint_class_names
from ranvier.world import World

PROMPT_TOKENS = 24
"""Most tokens of held-out text that the sample continues if the run has no prompt."""


def prepare_run(run: ResolvedRun, world: World, stream: TextIO) -> tuple[ResolvedRun, Prepared, Pretrained | None]:
    """The run with the settings that only its data and its pretrained model determine, the data, and that model, if
    any. The first rank of a machine prepares what is not in the cache; rank 0 prints progress. ConfigError if the
    number of classes differs from the data's."""
    def line(text: str) -> None:
        if world.rank == 0:
            print(text, file=stream, flush=True)

    def key(process: str) -> str:
        return f"ranvier/prepares/{process}"

    world.store.set(key(process_name()), "")
    tell = PreparationProgress(tell=line, is_own=lambda process: world.store.check([key(process)]))
    pretrained = None
    if run.model.family == "transformers":  # whose blocks come with their weights
        run = resolve(resolve_pretrained(run))
    elif run.model.pretrained is not None:
        pretrained = Pretrained(folder_of(run.model.pretrained, cache_folder(run), tell))
        run = resolve(with_model(run, pretrained))
        check_source(pretrained, cache_folder(run), tell, run.lora.adapters)
    if run.lora.adapters is not None:
        check_adapters(pretrained, AdapterFolder(Path(os.path.expanduser(run.lora.adapters))), families.config_of(run),
                       families.head_of(run), cache_folder(run), tell)
    data = prepare(run, tell, checkpoint_class_names(run))
    return resolve(run, Facts(num_classes=data.num_classes, num_samples=data.epoch_samples)), data, pretrained


def agree_on_run(run: ResolvedRun, recipe: str, data: Prepared, ranks: Group, world: World) -> ResolvedRun:
    """The run with the folder that rank 0 names, the best placement of the tensor mesh on the nodes, and
    `launch.cluster` as set, or else a shipped cluster with the GPU of all ranks. DataError if the ranks have different
    data, ConfigError if they have different settings."""
    folder = run.run_dir or read.default_folder(recipe)
    everyone = ranks.gather_objects({"folder": str(folder), "text": fingerprint(data),
                                     "local_size": world.local_size, "settings": _settings_compared_on_ranks(run),
                                     "cluster": run.launch.cluster or _cluster_of_device(world)})
    for rank, other in enumerate(everyone):
        first, here = everyone[0]["settings"], other["settings"]
        if differ := [name for name in first if first[name] != here.get(name, first[name])]:
            raise ConfigError(f"differ from those of rank 0: {_first_three(first, differ)} there",
                              code="settings-differ-between-ranks", where=f"settings of rank {rank}",
                              value=_first_three(here, differ),
                              remedy="Start all ranks with the same settings and the same file; where mesh or "
                                     "microbatches are auto and machines differ, name one cluster with "
                                     "`--launch.cluster`, or give numbers.")
        if other["text"] != everyone[0]["text"]:
            raise DataError(f"differs from that of rank 0 ({everyone[0]['text']})", code="data-differs-between-ranks",
                            where=f"data of rank {rank}", value=other["text"],
                            remedy="Give all machines the same files and versions, or one shared `--data.cache-dir`.")
    nodes = {other["local_size"] for other in everyone}
    facts = tensor_mesh_facts(run, nodes.pop() if len(nodes) == 1 else None)
    clusters = {other["cluster"] for other in everyone}
    return replace(resolve(run, Facts(tile=None if facts is None else facts.tile)), run_dir=Path(everyone[0]["folder"]),
                   launch=replace(run.launch, cluster=clusters.pop() if len(clusters) == 1 else None))


def _cluster_of_device(world: World) -> str | None:
    """The shipped cluster with this rank's GPU, if there is one."""
    return shipped_cluster_with(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None


def _settings_compared_on_ranks(run: ResolvedRun) -> dict[str, str]:
    """Settings that must be the same on all ranks, as text: all except machine, paths, logs, restarts, and the data,
    whose fingerprint is compared."""
    return {name: read.as_text(value) for name, value in read.flatten(run).items()
            if not isinstance(value, Path) and not name.startswith(("launch.", "log.", "data."))
            and name not in ("run_dir", "resume", "model.pretrained", "verbose", "max_restarts")}


def _first_three(settings: Mapping[str, str], names: Sequence[str]) -> str:
    """The first three of `names` with their values."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{read.flag(name)} {settings.get(name)}" for name in names[:3]) + more


def initial_weights(engine: Engine, run: ResolvedRun, pretrained: Pretrained | None, *, from_step: int | None,
                    before_adapters: Callable[[], list[str]] = list) -> list[str]:
    """Set the initial weights if they come from a pretrained model or from adapters in a folder. Collective. from_step:
    of the checkpoint from which the run resumes, None without one. before_adapters: called while adapters, if there are
    any, change nothing. Returns notes for the user."""
    any_transformers.release()  # the blocks are built
    notes = []
    if pretrained is not None and from_step is None:
        notes = load_pretrained(engine, pretrained)
        theirs = pretrained.config.dropout
        if theirs != run.model.dropout:
            notes.append(f"{pretrained.folder} has dropout {theirs:g}, with which transformers trains; this run "
                         f"has {run.model.dropout:g} unless --model.dropout sets another value")
    notes += before_adapters()
    if run.lora.adapters is not None and not from_step:
        folder = AdapterFolder(Path(os.path.expanduser(run.lora.adapters)))
        notes += load_adapters(engine, folder, families.config_of(run), families.head_of(run))
    return notes


def write_tokenizer(tokenizer: AnyTokenizer, run_dir: Path) -> None:
    """Write tokenizer.json, and the files that belong with it, into the run's folder. RanvierError if that fails."""
    path = run_dir / "tokenizer.json"
    with writing(path):
        write_atomically(path, tokenizer.text())
        if isinstance(tokenizer, TokenizerWithFiles):
            for name, text in tokenizer.files_beside().items():
                (run_dir / name).parent.mkdir(exist_ok=True)
                write_atomically(run_dir / name, text)


def fingerprint(data: Prepared) -> str:
    """Fingerprint of all sets of the data and their names, equal on all ranks."""
    return " ".join([data.fingerprint,
                     *(f"{name}={eval_set.fingerprint}" for name, eval_set in data.eval_sets.items())])


def held_out_line(data: Prepared) -> list[int]:
    """The start of the first held-out line of at least four words, as tokens, for the task lm."""
    assert isinstance(data.tokenizer, Tokenizer) and data.first_tokens
    text = data.tokenizer.decode([token for token in data.first_tokens if token not in data.tokenizer.start])
    line = next((line for line in text.splitlines() if len(line.split()) >= 4), text)
    return data.tokenizer.encode_from_start(line)[:PROMPT_TOKENS]


def settings_text(run: ResolvedRun, engine: Engine, world: World, data: Prepared, elastic: str) -> dict[str, str]:
    """Description of a run in words. elastic: its elastic settings in words; empty if nothing is elastic."""
    model, unit = run.model, "packed sequences" if run.data.packing else form_of(run.data).samples
    num_parameters = sum(parameter.numel for parameter in engine.layout.parameters
                         if parameter.owner == parameter.name)
    most = policy_named(run.pipeline.policy).in_flight(engine.in_flight, run.num_microbatches)
    return {
        "model": f"{families.text(run)}: {num_parameters:,} parameters in {run.precision}"
                 + (f", from {model.pretrained}" if model.pretrained else ""),
        **({"adapters": adapters_text(run, engine)} if run.lora.rank else {}),
        "data": data.about,
        **({"padding": data.padding} if data.padding else {}),
        "batch": f"{run.batch.global_size} {unit} in microbatches of {run.batch.microbatch_size}",
        "pipeline": f"{run.pipeline.policy}, at most {counted(min(most, run.num_microbatches), 'microbatch')} in flight"
                    + (f", deferred weight gradients by rank: {engine.limits.deferred_text}"
                       if any(engine.limits.deferred) and run.pipeline.defer_bytes == "auto" else "")
                    + ("" if engine.limits.max_stored is None else
                       f", {engine.limits.max_stored} held by the stages of a rank")
                    + (", in 1F1B's order" if engine.limits.alternating else "")
                    + ("" if run.memory.recompute == "none" else f", checkpoints: {run.memory.recompute}"),
        **({"tensor mesh": tensor_text(run)} if run.mesh.stage_size > 1 else {}),
        "optimizer": optimizer_text(run),
        "learning rate": describe_schedule(run.train),
        **({"elastic": elastic} if elastic else {}),
        "ranks": f"{world.size} over {world.backend.name} on {world.device.type}, threads for each: "
                 f"{torch.get_num_threads()}",
        "folder": str(run.run_dir)}


def resolve_remaining(run: ResolvedRun, engine: Engine, world: World, origin: str = "none") -> ResolvedRun:
    """`run` with every `auto` replaced by the value chosen on these ranks. origin: the checkpoint with which this
    folder's run began, or none."""
    transport = world.backend.name
    comm = run.comm if transport == "in-process" else replace(run.comm, transport=transport)
    if isinstance(world.backend, MixedBackend):
        comm = replace(comm, collectives="torch")
    assert engine.flat_optimizer is not None  # a run's engine has Ranvier's own
    optim = replace(run.optim, offload=engine.flat_optimizer.offload,
                    offload_share=engine.flat_optimizer.offload_share,
                    bucket_size=resolve_bucket_size(run.optim, world.device.type))
    if is_half(DTYPES[run.precision]) and run.mesh.num_replicas > 1:
        optim = replace(optim, reduce_dtype="half" if optim.reduce_dtype == "auto" else optim.reduce_dtype)
    resume = origin if run.resume == "auto" else run.resume  # a run started from this file begins as this run did
    pipeline = replace(run.pipeline, boundaries=engine.boundaries or None, in_flight=engine.in_flight)
    if defers_by_limits(run):
        pipeline = replace(pipeline, deferred=engine.limits.deferred, defer_last=engine.limits.last)
    return replace(run, resume=resume, pipeline=pipeline, optim=optim,
                   comm=comm, launch=replace(run.launch, threads=torch.get_num_threads(),
                                             device="cuda" if world.device.type == "cuda" else "cpu"))


def adapters_text(run: ResolvedRun, engine: Engine) -> str:
    """The adapters in words."""
    trained = sum(parameter.numel for parameter in engine.layout.parameters
                  if parameter.trainable and parameter.is_owner)
    folder = f", from {run.lora.adapters}" if run.lora.adapters else ""
    base = "" if run.lora.base_format == "precision" else f", the layers' weights in {run.lora.base_format}"
    return (f"{run.lora.method} of rank {run.lora.rank}, alpha {run.lora.alpha:g}: {trained:,} parameters train{folder}"
            f"{base}")


def tensor_text(run: ResolvedRun) -> str:
    """The split of blocks in words."""
    tensor = run.tensor
    more = [text for enabled, text in ((tensor.sequence_sharding, "sequence sharded"),
                                       (tensor.keep_weights, "gathered weights kept")) if enabled]
    return ", ".join([" x ".join(str(run.mesh[axis]) for axis in run.mesh.stage_axes), tensor.scheme, *more])


def optimizer_text(run: ResolvedRun) -> str:
    """The optimizer in words, its settings resolved."""
    optim = run.optim
    part = optim.offload_share if isinstance(optim.offload_share, float) else 0.0
    streamed = f"streamed from the host, {optim.buckets_in_flight} buckets at once"
    where = {"none": "states on the device", "host": "states and updates on the host", "stream": f"states {streamed}",
             "hybrid": f"{part:.1%} of the states {streamed}, the others on the device"}[optim.offload]
    shared = f", sharded over {run.mesh.num_replicas} replicas" if optim.shard and run.mesh.num_replicas > 1 else ""
    return f"{optim.algorithm} in buckets of {optim.bucket_size:,}, {where}{shared}"
