"""Settings without effect: one table for `ranvier check`, the start of a run and the tests.

Settings that always have an effect are listed in the test, which checks that every setting is in one of the two places.
A warning is given only for a value that a user has chosen and that does not switch the setting off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from ranvier.config import read
from ranvier.config.named_object import is_object_name
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import MeshSettings, Run
from ranvier.config.task_form import family_name, form_of
from ranvier.errors import ConfigError

Reason = Callable[[ResolvedRun], str | None]
"""Why a setting has no effect in a run; None if it has one."""

_OFF = (False, None, 0, "none", "auto", "", ())
"""Values that switch a setting off."""


def _value(run: ResolvedRun, name: str) -> object:
    section, _, field = name.rpartition(".")
    return getattr(getattr(run, section) if section else run, field)


def _describe_value(run: ResolvedRun, name: str) -> str:
    """A setting and its value: "optim.ema is 0"."""
    return f"{read.flag(name)} is {read.as_text(_value(run, name))}"


def _needs(name: str, *values: object) -> Reason:
    """The reason for a setting that has an effect only if another one, `name`, has one of `values`; without values, if
    `name` is switched on."""
    def reason(run: ResolvedRun) -> str | None:
        value = _value(run, name)
        return None if (value in values if values else value not in _OFF) else _describe_value(run, name)

    return reason


def _unless(name: str, *values: object) -> Reason:
    """The reason for a setting that has no effect if another one, `name`, has one of `values`."""
    return lambda run: _describe_value(run, name) if _value(run, name) in values else None


def _in_runs(holds: Callable[[ResolvedRun], object], why: str) -> Reason:
    """`why`, in the runs for which `holds` is true."""
    return lambda run: why if holds(run) else None


def _first(*reasons: Reason) -> Reason:
    """The first of several reasons that is not None."""
    return lambda run: next((why for reason in reasons if (why := reason(run)) is not None), None)


def _no_such_layer(name: str, run: ResolvedRun) -> str | None:
    count = run.model.num_layers
    return f"the model has {count} layers" if min(getattr(run.model, name), default=0) >= count else None


def _beyond_the_end(every: int, run: ResolvedRun) -> str | None:
    known = run.train.epochs is None
    return f"the run ends after {run.train.steps} steps" if known and every >= run.train.steps else None


def _unused_by_task(name: str) -> Reason:
    """The reason that the task gives (`TaskForm.unused`)."""
    return lambda run: form_of(run.data).unused.get(name)


def _no_sample_text(run: ResolvedRun) -> str | None:
    return None if form_of(run.data).writes_text else f"the task {run.data.task} writes no text"


_one_rank_a_stage = _in_runs(lambda run: run.mesh.stage_size == 1, "blocks are not split: mesh.row and mesh.col are 1")
DEFERRING_POLICIES = ("message-driven",)
"""Values of `pipeline.policy` that defer weight gradients (`Policy.defers`; `config` cannot import `schedule`)."""
_defer_bytes = _first(_needs("pipeline.policy", *DEFERRING_POLICIES), _unless("optim.update_in_backward", True))
_deferred = _first(_defer_bytes, _needs("pipeline.defer_bytes", "auto"))


def _limits_are_set(run: ResolvedRun) -> str | None:
    pipeline = run.pipeline
    if pipeline.in_flight != "auto" and pipeline.deferred is not None:
        return "pipeline.in-flight and pipeline.deferred are set"
    both = "auto" not in (pipeline.in_flight, pipeline.defer_bytes)
    return "pipeline.in-flight and pipeline.defer-bytes are set" if both else None


def _on_cpu(why: str) -> Reason:
    return _in_runs(lambda run: run.launch.device == "cpu", why)


_half_precision = _needs("precision", "bf16", "fp16")


def _algorithm(run: ResolvedRun) -> str:
    return run.optim.algorithm


def _only_for(name_of: Callable[[ResolvedRun], str], *names: str) -> Reason:
    """The reason for a setting of only these families, or optimizers. A user's own may read any: a rule that updates
    full tensors may leave some to AdamW."""
    def reason(run: ResolvedRun) -> str | None:
        name = name_of(run)
        return None if name in names or is_object_name(name) else f"{name} has no such setting"

    return reason


_llama_only = _only_for(family_name, "llama")


_nothing_is_averaged = _in_runs(
    lambda run: run.mesh.data == run.mesh.row == 1 and not (run.tensor.shards_sequence and run.mesh.col > 1)
    and not run.elastic.auto_dp, "mesh.data is 1, so no gradients are averaged")
_one_replica = _in_runs(lambda run: run.mesh.data == 1 and not run.elastic.auto_dp,
                        "mesh.data is 1; rows and columns add up gradients in fp32")
_no_copies = _first(_in_runs(lambda run: run.mesh.data == run.mesh.stage_size == 1 and not run.elastic.auto_dp,
                             "no two ranks have the same parameters"),
                    lambda run: _beyond_the_end(run.guard.compare_every, run))
_one_rank = _in_runs(lambda run: run.mesh.size == 1 and run.launch.join_address is None,
                     "a single rank has no other rank that would see it stopped")
_no_state_elsewhere = _in_runs(
    lambda run: run.mesh.data == 1 and run.launch.join_address is None and not run.elastic.auto_dp,
    "mesh.data is 1, so no other rank has the state of a lost one")


def _not_offloaded(run: ResolvedRun) -> str | None:
    offload = run.optim.offload
    if offload == "auto" and run.launch.device != "cpu":
        from torch.cuda import is_available  # if a GPU has too little memory, auto is stream

        return None if is_available() else "optim.offload auto is none on a CPU"
    return "optim.offload is none" if offload in ("none", "auto") else None


def _freeze_is(*policies: str) -> Reason:
    """The reason for a setting that these policies do not read; "module:name" stands for a user's own."""
    def reason(run: ResolvedRun) -> str | None:
        named = "module:name" if is_object_name(run.elastic.freeze) else run.elastic.freeze
        return f"elastic.freeze is {run.elastic.freeze}" if named in policies else None

    return reason


_nothing_freezes = _first(_unless("elastic.freeze", "none"), _unless("elastic.dry_run", True))
_no_auto_pipe = _first(_nothing_freezes, _needs("elastic.auto_pipe"))
_no_cache = _first(_nothing_freezes, _needs("elastic.cache"))


_frozen_dropout = _first(_nothing_freezes, _in_runs(
    lambda run: not (run.model.dropout or (run.lora.rank and run.lora.dropout)), "model.dropout is 0"))


def _tokenizer(run: ResolvedRun) -> str | None:
    form = form_of(run.data)
    is_decoders = form.writes_text or run.data.task in ("chat", "preference", "reward") or run.model.family == "llama"
    if "data.tokenizer" in form.unused or is_decoders:
        return form.unused.get("data.tokenizer")
    if run.model.pretrained is not None:
        return "the tokenizer of model.pretrained is used"
    wrong = form.takes_wordpiece and run.data.tokenizer in ("bpe", "gpt2")
    return f"the task {run.data.task} takes a WordPiece tokenizer" if wrong else None


_all_layers_are_full = _in_runs(lambda run: run.model.full_every == 1 or {*range(run.model.num_layers)} <= {
    *run.model.full_layers}, "no layer has a window")
_factor_of_one = _in_runs(  # dynamic scaling begins beyond the positions with any factor
    lambda run: run.model.rope_factor == 1 and run.model.rope_scaling != "dynamic"
    and run.model.rope_magnitude in (None, 1), "model.rope-factor is 1")


def _preference(*losses: str) -> Reason:
    """The reason for a setting of the task preference with these losses."""
    return _first(_needs("data.task", "preference"), _needs("preference.loss", *losses))


def _nothing_is_planned(asked: Run) -> str | None:
    is_open = (isinstance(asked.mesh, MeshSettings) and asked.mesh.open_axes) or asked.batch.microbatch_size == "auto"
    return None if is_open else "neither the mesh nor the batch is auto"


def _cluster_decides_nothing(asked: Run) -> str | None:
    pipeline = asked.pipeline
    limits_follow = asked.mesh.pipe != 1 and pipeline.memory is not None and (
        pipeline.in_flight == "auto" or (pipeline.deferred is None and pipeline.defer_bytes == "auto"))
    return None if limits_follow else _nothing_is_planned(asked)


ASKED: Mapping[str, Callable[[Run], str | None]] = {
    "launch.cluster": _cluster_decides_nothing, "launch.trial": _nothing_is_planned}
"""Like `CONDITIONS`, for settings that depend on what was asked, before `auto` was planned."""

CONDITIONS: Mapping[str, Reason] = {
    "mesh.tile": _one_rank_a_stage,
    "train.steps": lambda run: None if run.train.epochs is None else _describe_value(run, "train.epochs"),
    "train.final_learning_rate": _unless("train.schedule", "constant"),
    "train.decay_share": _needs("train.schedule", "wsd"),
    "train.decay_shape": _needs("train.schedule", "wsd"),
    "train.eval_every": lambda run: _beyond_the_end(run.train.eval_every, run),
    "train.eval_ema": _needs("optim.ema"),
    "train.early_stopping": _needs("train.eval_every"),
    "train.early_stopping_delta": _needs("train.early_stopping"),
    "train.sample_tokens": _no_sample_text,
    "train.prompt": _first(_no_sample_text, _needs("train.sample_tokens")),
    "pipeline.in_flight": _unless("pipeline.policy", "gpipe"),
    "pipeline.partition": _first(_needs("pipeline.boundaries", None), _unless("mesh.pipe", 1)),
    "pipeline.defer_bytes": _defer_bytes,
    "pipeline.deferred": _deferred,
    "pipeline.defer_last": _deferred,
    "pipeline.placement": _first(_unless("mesh.pipe", 1), _unless("pipeline.stages_per_rank", 1)),
    "pipeline.stages_per_rank": _unless("mesh.pipe", 1),
    "pipeline.memory": _first(_needs("pipeline.policy", *DEFERRING_POLICIES), _unless("mesh.pipe", 1), _limits_are_set),
    "pipeline.look_ahead": _on_cpu("on a CPU an action has ended when it returns"),
    "tensor.scheme": _one_rank_a_stage,
    "tensor.sequence_sharding": _first(_one_rank_a_stage, _unless("tensor.scheme", "summa"), _unless("mesh.col", 1)),
    "tensor.keep_weights": _first(_one_rank_a_stage, _needs("tensor.scheme", "stationary"), _unless("mesh.row", 1)),
    "tensor.reduce_dtype": _first(_one_rank_a_stage, _half_precision),
    "tensor.panel_bytes": _first(_one_rank_a_stage, _unless("tensor.scheme", "summa")),
    "optim.options": lambda run: (
        None if is_object_name(run.optim.algorithm) else f"{run.optim.algorithm} takes no options"),
    "optim.betas": _only_for(_algorithm, "adamw", "lion", "muon"),
    "optim.epsilon": _only_for(_algorithm, "adamw", "muon"),
    "optim.momentum": _only_for(_algorithm, "sgd", "muon"),
    "optim.muon_scale": _needs("optim.algorithm", "muon"),
    "optim.decay": _needs("optim.weight_decay"),
    "optim.accumulate": _half_precision,
    "optim.reduce_dtype": _first(_half_precision, _one_replica),
    "optim.chunk_buckets": _nothing_is_averaged,
    "optim.clip_from": _needs("optim.clip_norm"),
    "optim.offload_share": _needs("optim.offload", "hybrid"),
    "optim.buckets_in_flight": _not_offloaded,
    "optim.shard": _nothing_is_averaged,
    "optim.initial_loss_scale": _needs("precision", "fp16"),
    "optim.loss_scale_window": _needs("precision", "fp16"),
    "checkpoint.every": lambda run: _beyond_the_end(run.checkpoint.every, run),
    # a resumed run may find earlier checkpoints
    "checkpoint.keep": lambda run: _needs("checkpoint.every")(run) if run.resume == "none" else None,
    "checkpoint.keep_every": lambda run: _needs("checkpoint.every")(run) if run.resume == "none" else None,
    "guard.max_bad_steps": _needs("guard.bad_step", "skip", "rollback"),
    "guard.compare_every": _no_copies,
    "log.project": _in_runs(lambda run: not run.log.tracker, "log.tracker names none"),
    "log.store": _in_runs(lambda run: not {"mlflow", "aim"} & {*run.log.tracker},
                          "log.tracker names neither mlflow nor aim"),
    "log.offline": _in_runs(lambda run: "wandb" not in run.log.tracker, "log.tracker does not name wandb"),
    "comm.collectives": _first(_one_rank, _unless("comm.transport", "torch")),
    "launch.stopped_seconds": _one_rank,
    "launch.survive_losses": _no_state_elsewhere,
    "deterministic": _on_cpu("on a CPU runs are bit-identical without it"),
    "max_restarts": _one_rank,  # its use by other launchers is reported when the launcher is known
    "model.compile": _in_runs(
        lambda run: run.mesh.stage_size > 1 and run.tensor.scheme == "megatron" and not run.model.dropout
        and _llama_only(run) is not None, "with several rows or columns only chains of elementwise operations are "
        "compiled, and with unsharded features and without dropout this model has none"),
    "model.attention_kernel": _on_cpu("a CPU has no choice of kernels"),
    "model.options": lambda run: (
        None if is_object_name(run.model.family) else f"the family {run.model.family} takes no options"),
    **{f"model.{name}": _llama_only for name in (
        "max_positions", "kv_heads", "head_dim", "activation", "bias", "tied", "norms", "norm_offset", "qk_norm",
        "query_pre_attn_scalar", "rope_base", "embedding_scale",
        "residual_multiplier", "logits_scaling", "attention_softcap", "logit_softcap")},
    "model.untied": _only_for(family_name, "gpt", "transformers"),
    **{f"model.{name}": _only_for(family_name, "llama", "bert", "vit", "transformers")
       for name in ("intermediate", "norm_epsilon")},
    "model.window": _first(_llama_only, _all_layers_are_full),
    "model.rope_scaling": _first(_llama_only, _factor_of_one),
    **{f"model.{name}": _first(_llama_only, _needs("model.window")) for name in ("full_every", "window_rope_base")},
    "model.full_layers": _first(_llama_only, _needs("model.window"), partial(_no_such_layer, "full_layers")),
    "model.nope_layers": _first(_llama_only, partial(_no_such_layer, "nope_layers")),
    **{f"model.{name}": _first(_llama_only, _needs("model.rope_scaling", *kinds)) for name, kinds in (
        ("rope_factor", ()), ("rope_positions", ("dynamic", "llama3", "yarn")), ("rope_limits", ("llama3", "yarn")),
        ("rope_magnitude", ("yarn",)))},
    **{f"lora.{name}": _needs("lora.rank") for name in (
        "alpha", "targets", "dropout", "method", "train_head", "base_format")},
    "preference.loss": _preference("dpo", "ipo", "simpo"),
    "preference.beta": _preference("dpo", "ipo", "simpo"),
    "preference.label_smoothing": _preference("dpo", "simpo"),
    "preference.gamma": _preference("simpo"),
    "data.options": lambda run: None if is_object_name(run.data.task) else f"the task {run.data.task} takes no options",
    **{name: _unused_by_task(name) for name in (
        "train.eval_sequences", "model.vocab", "model.sequence", "model.num_classes", "model.image_size",
        "model.patch_size", "data.train_samples", "data.eval_samples", "data.augment",
        "data.augment_repeats", "data.max_bytes", "data.text_column", "data.pair_column",
        "data.label_column", "data.messages_column", "data.form", "data.chat_template", "data.mixture",
        "data.packing")},
    **{name: _first(_unused_by_task(name), _in_runs(lambda run: run.data.mixture, "data.mixture is set"))
       for name in ("data.train", "data.corpus")},
    "data.padding": _first(_in_runs(lambda run: run.data.task == "chat" and run.data.packing,
                                    "data.packing fills sequences"), _unused_by_task("data.padding")),
    "data.tokenizer": _tokenizer,
    "elastic.options": lambda run: (
        None if is_object_name(run.elastic.freeze) else f"the freeze policy {run.elastic.freeze} takes no options"),
    "elastic.alpha": _freeze_is("none", "manual", "untrained", "module:name"),
    "elastic.every": _freeze_is("none", "manual"),
    "elastic.dry_run": _freeze_is("none"),
    "elastic.auto_pipe": _first(_nothing_freezes, _unless("mesh.pipe", 1)),
    "elastic.auto_dp": _no_auto_pipe,
    "elastic.cut": _no_auto_pipe,
    "elastic.global_batch": _in_runs(lambda run: run.mesh.size == 1, "one rank has no replicas to add"),
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
    """A warning for each setting that a user has chosen and that has no effect in `run`.

    chosen: names of the settings whose values a user has chosen; None: those that differ from their defaults. asked:
    the run before `auto` was planned, if it was.
    """
    values = read.flatten(run)
    for name in (*CONDITIONS, *ASKED):
        setting, value = read.settings()[name], values[name]
        if (value == setting.default) if chosen is None else (name not in chosen or _is_off(value)):
            continue
        why = CONDITIONS[name](run) if name in CONDITIONS else ASKED[name](asked or run)
        if why is not None:
            yield ConfigError(f"has no effect: {why}", code="without-effect", where=setting.flag,
                              value=read.as_text(value), remedy="Leave it out, or change the other setting.")


def _is_off(value: object) -> bool:
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF)
