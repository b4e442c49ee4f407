"""Which settings have no effect, and when: one table for `ranvier check`, the start of a run and the tests.

Each setting of the configuration is either in `CONDITIONS`, with the configurations in which nothing depends on it, or
in `ALWAYS`. A test requires this, so a new setting cannot be left out. A warning is given only for a value that a user
has chosen, and not for one that switches the setting off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ranvier.config import read
from ranvier.config.named_object import is_object_name
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import MeshSettings, Run
from ranvier.config.task_form import form_of
from ranvier.errors import ConfigError

Reason = Callable[[ResolvedRun], str | None]
"""Why a setting has no effect in a run; None where it has one."""

ALWAYS = frozenset({
    "mesh.data", "mesh.pipe", "mesh.row", "mesh.col", "batch.global_size", "batch.microbatch_size", "train.epochs",
    "train.learning_rate", "train.warmup_steps", "train.schedule", "pipeline.policy", "pipeline.boundaries",
    "comm.transport", "comm.timeout_seconds", "optim.algorithm", "optim.weight_decay", "optim.groups",
    "optim.clip_norm", "optim.ema", "optim.offload", "optim.bucket_size", "optim.update_in_backward",
    "memory.recompute",
    "checkpoint.dir", "checkpoint.best", "checkpoint.background",
    "checkpoint.on_error", "guard.bad_step", "guard.loss_spike_factor",
    "launch.launcher", "launch.join_address",
    "log.tracker", "log.every", "launch.threads", "launch.device", "launch.hang_seconds", "model.family",
    "model.preset", "model.pretrained",
    "model.float8",
    "model.num_layers", "model.hidden", "model.heads", "model.dropout", "model.intermediate", "model.norm_epsilon",
    "lora.rank", "lora.adapters", "data.task", "data.cache_dir", "data.eval", "data.eval_sets",
    "elastic.freeze", "elastic.manual", "elastic.profile_microbatches", "seed", "precision", "memory_report", "verbose",
    "resume", "run_dir"})
"""Settings that change something in every run that is not refused because of them."""

_OFF = (False, None, 0, "none", "auto", "", ())
"""Values that ask for nothing."""


def _epochs(run: ResolvedRun) -> str | None:
    return f"train.epochs {run.train.epochs} decides how many there are" if run.train.epochs is not None else None


def _beyond_the_end(every: int, run: ResolvedRun) -> str | None:
    known = run.train.epochs is None
    return f"the run ends after {run.train.steps} steps" if known and every >= run.train.steps else None


def _not_wsd(run: ResolvedRun) -> str | None:
    return None if run.train.schedule == "wsd" else f"train.schedule is {run.train.schedule}"


def _by_task(name: str) -> Reason:
    """The reason that the task itself gives (`TaskForm.unused`)."""
    return lambda run: form_of(run.data).unused.get(name)


def _no_sample_text(run: ResolvedRun) -> str | None:
    return None if form_of(run.data).writes_text else f"the task {run.data.task} writes no text"


def _prompt(run: ResolvedRun) -> str | None:
    return _no_sample_text(run) or (
        None if run.train.sample_tokens else "no text is written: train.sample-tokens is 0")


def _one_rank_a_stage(run: ResolvedRun) -> str | None:
    return "blocks are not split: mesh.row and mesh.col are 1" if run.mesh.stage_size == 1 else None


def _sequence_sharding(run: ResolvedRun) -> str | None:
    return _one_rank_a_stage(run) or (
        "summa always splits the hidden dimension" if run.tensor.scheme == "summa" else
        "mesh.col is 1, so no column shares a sequence" if run.mesh.col == 1 else None)


def _keep_weights(run: ResolvedRun) -> str | None:
    gathers = run.tensor.scheme == "stationary" and run.mesh.row > 1
    return _one_rank_a_stage(run) or (
        None if gathers else "weights are gathered in scheme stationary on several rows only")


def _panel_bytes(run: ResolvedRun) -> str | None:
    return _one_rank_a_stage(run) or ("summa cuts panels by the mesh" if run.tensor.scheme == "summa" else None)


def _defer_bytes(run: ResolvedRun) -> str | None:
    if run.pipeline.policy != "message-driven":
        return f"{run.pipeline.policy} defers no weight gradients"
    return "optim.update-in-backward defers none" if run.optim.update_in_backward else None


def _deferred(run: ResolvedRun) -> str | None:
    return _defer_bytes(run) or (None if run.pipeline.defer_bytes == "auto" else "pipeline.defer-bytes is set")


def _schedule_memory(run: ResolvedRun) -> str | None:
    if run.pipeline.policy != "message-driven":
        return f"{run.pipeline.policy} has a fixed order"
    if run.mesh.pipe == 1:
        return "there is one stage"
    pipeline = run.pipeline
    if pipeline.in_flight != "auto" and pipeline.deferred is not None:
        return "pipeline.in-flight and pipeline.deferred are set"
    both = "auto" not in (pipeline.in_flight, pipeline.defer_bytes)
    return "pipeline.in-flight and pipeline.defer-bytes are set" if both else None


def _one_stage_each(run: ResolvedRun) -> str | None:
    return "each rank has one stage" if run.mesh.pipe == 1 or run.pipeline.stages_per_rank == 1 else None


def _on_cpu(why: str) -> Reason:
    return lambda run: why if run.launch.device == "cpu" else None


def _partition(run: ResolvedRun) -> str | None:
    return "pipeline.boundaries says where stages begin" if run.pipeline.boundaries is not None else (
        "there is one stage" if run.mesh.pipe == 1 else None)


def _wide_precision(run: ResolvedRun) -> str | None:
    half = run.precision in ("bf16", "fp16")
    return None if half else f"gradients of {run.precision} parameters add up and travel in {run.precision}"


def _wide_activations(run: ResolvedRun) -> str | None:
    half = run.precision in ("bf16", "fp16")
    return _one_rank_a_stage(run) or (
        None if half else f"sums of {run.precision} activations travel in {run.precision}")


def _only(*algorithms: str, others: str) -> Reason:
    """A setting of these optimizers; `others` is what the rest lack. A rule of a user's that updates whole tensors may
    leave some to AdamW."""
    def reason(run: ResolvedRun) -> str | None:
        name = run.optim.algorithm
        return None if name in algorithms or is_object_name(name) else f"{name} has no setting {others}"

    return reason


def _nothing_is_averaged(run: ResolvedRun) -> str | None:
    by_sequence = run.tensor.shards_sequence and run.mesh.col > 1
    alone = run.mesh.data == run.mesh.row == 1 and not by_sequence and not run.elastic.auto_dp
    return "mesh.data is 1, so no gradients are averaged" if alone else None


def _one_replica(run: ResolvedRun) -> str | None:
    alone = run.mesh.data == 1 and not run.elastic.auto_dp
    return "mesh.data is 1; rows and columns add up gradients in fp32" if alone else None


def _no_copies(run: ResolvedRun) -> str | None:
    alone = run.mesh.data == run.mesh.stage_size == 1 and not run.elastic.auto_dp
    return "no two ranks have the same parameters" if alone else _beyond_the_end(run.guard.compare_every, run)


def _one_rank(run: ResolvedRun) -> str | None:
    alone = run.mesh.size == 1 and run.launch.join_address is None
    return "one rank has nobody beside it to see that it was stopped" if alone else None


def _no_state_elsewhere(run: ResolvedRun) -> str | None:
    if run.mesh.data == 1 and run.launch.join_address is None and not run.elastic.auto_dp:
        return "mesh.data is 1, so no other rank has the state of a lost one"
    return None


def _not_offloaded(run: ResolvedRun) -> str | None:
    offload = run.optim.offload
    if offload == "auto" and run.launch.device != "cpu":
        from torch.cuda import is_available  # where a GPU has too little room, auto is stream

        return None if is_available() else "optim.offload auto is none on a CPU"
    return "optim.offload is none" if offload in ("none", "auto") else None


def _keeps(run: ResolvedRun) -> str | None:
    last = run.checkpoint.every == 0 and run.resume == "none"
    return "checkpoint.every is 0: there is one checkpoint, at the end" if last else None


def _freeze_is(*policies: str) -> Reason:
    """For a setting that these policies do not read; "module:name" stands for a user's own."""
    def reason(run: ResolvedRun) -> str | None:
        named = "module:name" if is_object_name(run.elastic.freeze) else run.elastic.freeze
        return f"elastic.freeze is {run.elastic.freeze}" if named in policies else None

    return reason


def _nothing_freezes(run: ResolvedRun) -> str | None:
    return "nothing is frozen: elastic.freeze is none" if run.elastic.freeze == "none" else (
        "nothing is frozen: elastic.dry-run is true" if run.elastic.dry_run else None)


def _auto_pipe(run: ResolvedRun) -> str | None:
    return _nothing_freezes(run) or ("there is one stage already" if run.mesh.pipe == 1 else None)


def _no_auto_pipe(run: ResolvedRun) -> str | None:
    return _nothing_freezes(run) or (None if run.elastic.auto_pipe else "elastic.auto-pipe is false")


def _no_cache(run: ResolvedRun) -> str | None:
    return _nothing_freezes(run) or (None if run.elastic.cache else "elastic.cache is false")


def _frozen_dropout(run: ResolvedRun) -> str | None:
    drops = run.model.dropout or (run.lora.rank and run.lora.dropout)
    return _nothing_freezes(run) or (None if drops else "model.dropout is 0")


def _tokenizer(run: ResolvedRun) -> str | None:
    form = form_of(run.data)
    if "data.tokenizer" in form.unused or form.writes_text or run.data.task in ("chat", "preference"):
        return form.unused.get("data.tokenizer")
    if run.model.pretrained is not None:
        return "the tokenizer of model.pretrained is taken"
    wrong = form.takes_wordpiece and run.data.tokenizer in ("bpe", "gpt2")
    return f"the task {run.data.task} takes a WordPiece tokenizer" if wrong else None


def _llama_only(run: ResolvedRun) -> str | None:
    family = run.model.family
    if family == "llama" or is_object_name(family):
        return None
    return "the task's family has no such setting" if family == "auto" else f"the family {family} has no such setting"


def _gpt_only(run: ResolvedRun) -> str | None:
    family = form_of(run.data).family if run.model.family == "auto" else run.model.family
    return None if family == "gpt" or is_object_name(family) else f"the family {family} has no such setting"


def _llama(*needed: str) -> Reason:
    """A setting of the family llama, for which others must not be none or 0."""
    def reason(run: ResolvedRun) -> str | None:
        missing = [name for name in needed if getattr(run.model, name) in (None, 0, 0.0, "none")]
        return _llama_only(run) or (f"model.{read.flag(missing[0])} is {read.as_text(getattr(run.model, missing[0]))}"
                                    if missing else None)

    return reason


def _no_adapters(run: ResolvedRun) -> str | None:
    return None if run.lora.rank else "there are no adapters: lora.rank is 0"


def _padding(run: ResolvedRun) -> str | None:
    packed = run.data.task == "chat" and run.data.packing
    return "data.packing fills sequences" if packed else form_of(run.data).unused.get("data.padding")


def _preference(*losses: str) -> Reason:
    """A setting of the task preference, with these losses."""
    def reason(run: ResolvedRun) -> str | None:
        if run.data.task != "preference":
            return f"the task is {run.data.task}"
        return None if run.preference.loss in losses else f"preference.loss is {run.preference.loss}"

    return reason


def _nothing_is_planned(asked: Run) -> str | None:
    is_open = (isinstance(asked.mesh, MeshSettings) and asked.mesh.open_axes) or asked.batch.microbatch_size == "auto"
    return None if is_open else "nothing of the mesh or batch is auto"


ASKED: Mapping[str, Callable[[Run], str | None]] = {
    "launch.cluster": _nothing_is_planned, "launch.trial": _nothing_is_planned}
"""Like `CONDITIONS`, for settings that depend on what was asked, before `auto` was planned."""

CONDITIONS: Mapping[str, Reason] = {
    "mesh.tile": _one_rank_a_stage,
    "train.steps": _epochs,
    "train.final_learning_rate":
        lambda run: "train.schedule is constant" if run.train.schedule == "constant" else None,
    "train.decay_share": _not_wsd,
    "train.decay_shape": _not_wsd,
    "train.eval_every": lambda run: _beyond_the_end(run.train.eval_every, run),
    "train.eval_ema": lambda run: None if run.optim.ema else "optim.ema is 0",
    "train.early_stopping":
        lambda run: None if run.train.eval_every else "train.eval-every is 0: there is one evaluation, at the end",
    "train.early_stopping_delta": lambda run: None if run.train.early_stopping else "train.early-stopping is 0",
    "train.sample_tokens": _no_sample_text,
    "train.prompt": _prompt,
    "pipeline.in_flight":
        lambda run: "gpipe keeps all microbatches in flight" if run.pipeline.policy == "gpipe" else None,
    "pipeline.partition": _partition,
    "pipeline.defer_bytes": _defer_bytes,
    "pipeline.deferred": _deferred,
    "pipeline.defer_last": _deferred,
    "pipeline.placement": _one_stage_each,
    "pipeline.stages_per_rank":
        lambda run: "the pipeline has one rank" if run.mesh.pipe == 1 else None,
    "pipeline.memory": _schedule_memory,
    "pipeline.look_ahead": _on_cpu("on a CPU an action has ended when it returns"),
    "tensor.scheme": _one_rank_a_stage,
    "tensor.sequence_sharding": _sequence_sharding,
    "tensor.keep_weights": _keep_weights,
    "tensor.reduce_dtype": _wide_activations,
    "tensor.panel_bytes": _panel_bytes,
    "optim.options": lambda run: (
        None if is_object_name(run.optim.algorithm) else f"{run.optim.algorithm} takes no options"),
    "optim.betas": _only("adamw", "lion", "muon", others="betas"),
    "optim.epsilon": _only("adamw", "muon", others="epsilon"),
    "optim.momentum": _only("sgd", "muon", others="momentum"),
    "optim.muon_scale": lambda run: None if run.optim.algorithm == "muon" else "optim.algorithm is not muon",
    "optim.decay": lambda run: None if run.optim.weight_decay else "optim.weight-decay is 0",
    "optim.accumulate": _wide_precision,
    "optim.reduce_dtype": lambda run: _wide_precision(run) or _one_replica(run),
    "optim.chunk_buckets": _nothing_is_averaged,
    "optim.clip_from": lambda run: None if run.optim.clip_norm else "optim.clip-norm is 0",
    "optim.offload_share": lambda run: None if run.optim.offload == "hybrid" else "optim.offload is not hybrid",
    "optim.buckets_in_flight": _not_offloaded,
    "optim.shard": _nothing_is_averaged,
    "optim.initial_loss_scale": lambda run: None if run.precision == "fp16" else "only fp16 scales the loss",
    "optim.loss_scale_window": lambda run: None if run.precision == "fp16" else "only fp16 scales the loss",
    "checkpoint.every": lambda run: _beyond_the_end(run.checkpoint.every, run),
    "checkpoint.keep": _keeps,
    "checkpoint.keep_every": _keeps,
    "guard.max_bad_steps": lambda run: (
        None if run.guard.bad_step in ("skip", "rollback") else f"guard.bad-step is {run.guard.bad_step}"),
    "guard.compare_every": _no_copies,
    "log.project": lambda run: None if run.log.tracker else "log.tracker names none",
    "log.store": lambda run: None if {"mlflow", "aim"} & {*run.log.tracker} else "log.tracker names neither mlflow nor "
                                                                                 "aim",
    "log.offline": lambda run: None if "wandb" in run.log.tracker else "log.tracker does not name wandb",
    "comm.collectives": lambda run: _one_rank(run) or (
        "comm.transport torch has collectives of its own" if run.comm.transport == "torch" else None),
    "launch.stopped_seconds": _one_rank,
    "launch.survive_losses": _no_state_elsewhere,
    "deterministic": _on_cpu("on a CPU the same run gives the same bits"),
    "max_restarts": _one_rank,  # what launchers of other kinds do with it is told where they are known
    "model.compile": lambda run: (
        "with several rows or columns only chains of elementwise operations are compiled, and with whole features and "
        "without dropout this model has none"
        if run.mesh.stage_size > 1 and run.tensor.scheme == "megatron" and not run.model.dropout
        and _llama_only(run) is not None else None),
    "model.attention_kernel": _on_cpu("a CPU has no choice of kernels"),
    "model.options": lambda run: (
        None if is_object_name(run.model.family) else f"the family {run.model.family} takes no options"),
    **{f"model.{name}": _llama() for name in (
        "max_positions", "kv_heads", "head_dim", "activation", "bias", "tied", "norms", "norm_offset", "qk_norm",
        "query_pre_attn_scalar", "window", "rope_base", "rope_scaling", "embedding_scale", "attention_softcap",
        "logit_softcap")},
    "model.untied": _gpt_only,
    "model.full_every": _llama("window"),
    **{f"model.{name}": _llama("rope_scaling") for name in (
        "rope_factor", "rope_positions", "rope_limits", "rope_magnitude")},
    **{f"lora.{name}": _no_adapters for name in (
        "alpha", "targets", "dropout", "method", "train_head", "base_format")},
    "preference.loss": _preference("dpo", "ipo", "simpo"),
    "preference.beta": _preference("dpo", "ipo", "simpo"),
    "preference.label_smoothing": _preference("dpo", "simpo"),
    "preference.gamma": _preference("simpo"),
    "data.options": lambda run: None if is_object_name(run.data.task) else f"the task {run.data.task} takes no options",
    **{name: _by_task(name) for name in (
        "train.eval_sequences", "model.vocab", "model.sequence", "model.num_classes", "model.image_size",
        "model.patch_size", "data.train", "data.train_samples", "data.eval_samples", "data.augment",
        "data.augment_repeats", "data.corpus", "data.max_bytes", "data.text_column", "data.pair_column",
        "data.label_column", "data.messages_column", "data.form", "data.chat_template", "data.mixture",
        "data.packing")},
    "data.padding": _padding,
    "data.tokenizer": _tokenizer,
    "elastic.options": lambda run: (
        None if is_object_name(run.elastic.freeze) else f"the freeze policy {run.elastic.freeze} takes no options"),
    "elastic.alpha": _freeze_is("none", "manual", "untrained", "module:name"),
    "elastic.every": _freeze_is("none", "manual"),
    "elastic.dry_run": _freeze_is("none"),
    "elastic.auto_pipe": _auto_pipe,
    "elastic.auto_dp": _no_auto_pipe,
    "elastic.cut": _no_auto_pipe,
    "elastic.global_batch": lambda run: "one rank has no replicas to add" if run.mesh.size == 1 else None,
    "elastic.cache": _nothing_freezes,
    "elastic.cache_from": _no_cache,
    "elastic.cache_dir": _no_cache,
    "elastic.cache_bytes": _no_cache,
    "elastic.cache_precision": _no_cache,
    "elastic.frozen_dropout": _frozen_dropout,
}
"""Setting -> when it has no effect, and why."""


def warnings(run: ResolvedRun, chosen: Collection[str] | None = None, asked: Run | None = None
             ) -> Iterator[ConfigError]:
    """A warning for each setting that a user has chosen, and on which nothing depends in `run`.

    chosen: names of the settings that have a value of the user's; None: those that differ from their defaults.
    asked: the run before `auto` was planned, where it was.
    """
    values = read.flatten(run)
    for name in (*CONDITIONS, *ASKED):
        setting, value = read.settings()[name], values[name]
        if (value == setting.default) if chosen is None else (name not in chosen or _asks_for_nothing(value)):
            continue
        why = CONDITIONS[name](run) if name in CONDITIONS else ASKED[name](asked or run)
        if why is not None:
            yield ConfigError(f"has no effect: {why}", code="without-effect", where=setting.flag,
                              value=read.as_text(value), remedy="Leave it out, or change the other setting.")


def _asks_for_nothing(value: object) -> bool:
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF)
