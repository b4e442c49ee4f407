"""Which settings have no effect, and when: one table for `ranvier check`, the start of a run and the tests.

Each setting of the configuration is either in `CONDITIONS`, with the configurations in which nothing depends on it, or
in `ALWAYS`. A test requires this, so a new setting cannot be left out. A warning is given only for a value that a user
has chosen, and not for one that switches the setting off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ranvier import resolve
from ranvier.errors import ConfigError
from ranvier.run import Run

Reason = Callable[[Run], str | None]
"""Why a setting has no effect in a run; None where it has one."""

ALWAYS = frozenset({
    "mesh.data", "mesh.pipe", "mesh.row", "mesh.col", "batch.global_size", "batch.microbatch_size", "train.epochs",
    "train.learning_rate", "train.warmup_steps", "train.schedule", "pipeline.policy", "pipeline.boundaries",
    "comm.transport", "comm.timeout_seconds", "optim.algorithm", "optim.weight_decay", "optim.groups",
    "optim.clip_norm", "optim.offload", "optim.bucket_size", "optim.update_in_backward", "memory.checkpoint",
    "checkpoint.dir", "checkpoint.on_error", "guard.bad_step", "guard.explode", "launch.launcher", "launch.threads",
    "launch.device", "model.family", "model.pretrained", "model.num_layers", "model.hidden", "model.heads",
    "model.dropout", "model.intermediate", "model.norm_epsilon", "data.task", "data.cache_dir", "elastic.freeze",
    "elastic.manual", "elastic.profile_microbatches", "seed", "precision", "memory_report", "resume", "run_dir"})
"""Settings that change something in every run that is not refused because of them."""

_OFF = (False, None, 0, "none", "auto", "", ())
"""Values that ask for nothing."""


def _epochs(run: Run) -> str | None:
    return f"train.epochs {run.train.epochs} decides how many there are" if run.train.epochs is not None else None


def _beyond_the_end(every: int, run: Run) -> str | None:
    known = run.train.epochs is None
    return f"the run ends after {run.train.steps} steps" if known and every >= run.train.steps else None


def _task_is(*tasks: str, why: str) -> Reason:
    return lambda run: why.format(task=run.data.task) if run.data.task in tasks else None


def _no_text_is_written(run: Run) -> str | None:
    if run.data.task != "lm":
        return f"the task {run.data.task} writes no text"
    return None if run.train.sample_tokens else "no text is written: train.sample-tokens is 0"


def _one_rank_a_stage(run: Run) -> str | None:
    return "blocks are not split: mesh.row and mesh.col are 1" if run.mesh.stage_size == 1 else None


def _sequence_sharding(run: Run) -> str | None:
    scheme = run.tensor.scheme
    return _one_rank_a_stage(run) or (
        None if scheme == "megatron" else f"activations are always split in scheme {scheme}")


def _keep_weights(run: Run) -> str | None:
    gathers = run.tensor.scheme == "stationary" and run.mesh.row > 1
    return _one_rank_a_stage(run) or (
        None if gathers else "weights are gathered in scheme stationary on several rows only")


def _defer_bytes(run: Run) -> str | None:
    if run.pipeline.policy != "message-driven":
        return f"{run.pipeline.policy} postpones no weight gradients"
    return "optim.update-in-backward postpones none" if run.optim.update_in_backward else None


def _partition(run: Run) -> str | None:
    return "pipeline.boundaries says where stages begin" if run.pipeline.boundaries is not None else (
        "there is one stage" if run.mesh.pipe == 1 else None)


def _wide_precision(run: Run) -> str | None:
    half = run.precision in ("bf16", "fp16")
    return None if half else f"gradients of {run.precision} parameters add up and travel in {run.precision}"


def _wide_activations(run: Run) -> str | None:
    half = run.precision in ("bf16", "fp16")
    return _one_rank_a_stage(run) or (
        None if half else f"sums of {run.precision} activations travel in {run.precision}")


def _nothing_is_averaged(run: Run) -> str | None:
    megatron = run.tensor.scheme == "megatron" and run.tensor.sequence_sharding and run.mesh.col > 1
    alone = run.mesh.data == run.mesh.row == 1 and not megatron and not run.elastic.auto_dp
    return "mesh.data is 1, so no gradients are averaged" if alone else None


def _no_copies(run: Run) -> str | None:
    alone = run.mesh.data == run.mesh.stage_size == 1 and not run.elastic.auto_dp
    return "no two ranks have the same parameters" if alone else _beyond_the_end(run.guard.compare_every, run)


def _not_offloaded(run: Run) -> str | None:
    offload = run.optim.offload
    if offload == "auto" and run.launch.device != "cpu":
        from torch.cuda import is_available  # where a GPU has too little room, auto is stream

        return None if is_available() else "optim.offload auto is none on a CPU"
    return "optim.offload is none" if offload in ("none", "auto") else None


def _keeps(run: Run) -> str | None:
    last = run.checkpoint.every == 0 and run.resume == "none"
    return "checkpoint.every is 0: there is one checkpoint, at the end" if last else None


def _freeze_is(*policies: str) -> Reason:
    return lambda run: f"elastic.freeze is {run.elastic.freeze}" if run.elastic.freeze in policies else None


def _nothing_freezes(run: Run) -> str | None:
    return "nothing is frozen: elastic.freeze is none" if run.elastic.freeze == "none" else (
        "nothing is frozen: elastic.dry-run is true" if run.elastic.dry_run else None)


def _auto_pipe(run: Run) -> str | None:
    return _nothing_freezes(run) or ("there is one stage already" if run.mesh.pipe == 1 else None)


def _no_auto_pipe(run: Run) -> str | None:
    return _nothing_freezes(run) or (None if run.elastic.auto_pipe else "elastic.auto-pipe is false")


def _no_cache(run: Run) -> str | None:
    return _nothing_freezes(run) or (None if run.elastic.cache else "elastic.cache is false")


def _frozen_dropout(run: Run) -> str | None:
    return _nothing_freezes(run) or (None if run.model.dropout else "model.dropout is 0")


def _tokenizer(run: Run) -> str | None:
    if run.data.task == "images":
        return "the task images has no text"
    if run.data.task != "lm" and run.model.pretrained is not None:
        return "the tokenizer of model.pretrained is taken"
    if run.data.task != "lm" and run.data.tokenizer in ("bpe", "gpt2"):
        return f"the task {run.data.task} takes a WordPiece tokenizer"
    return None


_LM_CORPUS = _task_is("lm", why="the task lm learns from data.corpus")
_OTHER_THAN_LM = _task_is("classification", "qa", "images", why="the task {task} learns from data.train")
_IMAGES = _task_is("images", why="the task images has no tokens")

CONDITIONS: Mapping[str, Reason] = {
    "mesh.tile": _one_rank_a_stage,
    "train.steps": _epochs,
    "train.final_learning_rate":
        lambda run: "train.schedule is constant" if run.train.schedule == "constant" else None,
    "train.eval_every": lambda run: _beyond_the_end(run.train.eval_every, run),
    "train.eval_sequences":
        _task_is("classification", "qa", "images", why="the task {task} is evaluated on all held-out samples"),
    "train.sample_tokens": _task_is("classification", "qa", "images", why="the task {task} writes no text"),
    "train.prompt": _no_text_is_written,
    "pipeline.in_flight":
        lambda run: "gpipe keeps all microbatches in flight" if run.pipeline.policy == "gpipe" else None,
    "pipeline.partition": _partition,
    "pipeline.defer_bytes": _defer_bytes,
    "tensor.scheme": _one_rank_a_stage,
    "tensor.sequence_sharding": _sequence_sharding,
    "tensor.keep_weights": _keep_weights,
    "tensor.reduce_dtype": _wide_activations,
    "optim.betas": lambda run: "sgd has none" if run.optim.algorithm == "sgd" else None,
    "optim.epsilon": lambda run: "sgd has none" if run.optim.algorithm == "sgd" else None,
    "optim.momentum": lambda run: "adamw has its betas" if run.optim.algorithm == "adamw" else None,
    "optim.decay": lambda run: None if run.optim.weight_decay else "optim.weight-decay is 0",
    "optim.accumulate": _wide_precision,
    "optim.reduce_dtype": lambda run: _wide_precision(run) or _nothing_is_averaged(run),
    "optim.chunk_buckets": _nothing_is_averaged,
    "optim.buckets_in_flight": _not_offloaded,
    "optim.shard": _nothing_is_averaged,
    "optim.initial_loss_scale": lambda run: None if run.precision == "fp16" else "only fp16 scales the loss",
    "optim.loss_scale_window": lambda run: None if run.precision == "fp16" else "only fp16 scales the loss",
    "checkpoint.every": lambda run: _beyond_the_end(run.checkpoint.every, run),
    "checkpoint.keep": _keeps,
    "checkpoint.keep_every": _keeps,
    "guard.most_bad_steps": lambda run: (
        None if run.guard.bad_step in ("skip", "back") else f"guard.bad-step is {run.guard.bad_step}"),
    "guard.compare_every": _no_copies,
    "launch.cluster": lambda run: (
        None if run.mesh.is_open or run.batch.microbatch_size == "auto" else "nothing of the mesh or batch is auto"),
    "model.vocab": _IMAGES,
    "model.sequence": _IMAGES,
    "model.num_classes": _task_is("lm", "qa", why="the task {task} has no classes"),
    "model.image_size": _task_is("lm", "classification", "qa", why="the task {task} has no images"),
    "model.patch_size": _task_is("lm", "classification", "qa", why="the task {task} has no images"),
    "data.train": _LM_CORPUS,
    "data.eval": _LM_CORPUS,
    "data.train_samples": _LM_CORPUS,
    "data.eval_samples": _LM_CORPUS,
    "data.augment": _task_is("lm", why="the task lm has no images"),  # with others it is refused
    "data.augment_repeats": _task_is("lm", why="the task lm has no images"),
    "data.corpus": _OTHER_THAN_LM,
    "data.max_bytes": _OTHER_THAN_LM,
    "data.tokenizer": _tokenizer,
    "elastic.alpha": _freeze_is("none", "manual"),
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


def warnings(run: Run, chosen: Collection[str] | None = None, asked: Run | None = None) -> Iterator[ConfigError]:
    """A warning for each setting that a user has chosen, and on which nothing depends in `run`.

    chosen: names of the settings that have a value of the user's; None: those that differ from their defaults.
    asked: the run before `auto` was planned, where it was.
    """
    values = resolve.flatten(run)
    for name, reason in CONDITIONS.items():
        setting, value = resolve.settings()[name], values[name]
        if (value == setting.default) if chosen is None else (name not in chosen or _asks_for_nothing(value)):
            continue
        why = reason(asked or run) if name == "launch.cluster" else reason(run)
        if why is not None:
            yield ConfigError(f"has no effect: {why}", where=setting.flag, value=resolve.as_text(value),
                              remedy="Leave it out, or change the other setting.")


def _asks_for_nothing(value: object) -> bool:
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF)
