"""What of a run may change when it resumes, and what is told of it.

Each setting is of one of three kinds: those of `PLACE` say where and how fast a run computes and change no number
beyond rounding; a change of those in `REFUSED` would give the checkpoint's parameters another meaning; any other change
makes the run another one than it was, and is told with the old and the new value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PLACE = ("mesh.", "batch.microbatch_size", "pipeline.", "tensor.", "comm.", "launch.", "memory", "checkpoint.",
         "optim.offload", "optim.bucket_size", "optim.chunk_buckets", "optim.buckets_in_flight", "optim.shard",
         "optim.update_in_backward", "data.corpus", "data.tokenizer", "data.cache_dir", "data.max_bytes",
         "elastic.cache", "resume", "run_dir")
"""Beginnings of names. Text and tokenizer are compared by what is in them, wherever they lie."""

REFUSED = ("data.task", "model.norm_epsilon")
"""Beside the model's sizes and the optimizer's algorithm, which the tensors of a checkpoint show, and its heads."""


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(setting, its value in the checkpoint) of all that are to be told, by dotted name.

    before: what the checkpoint says. now: all settings of the run.
    """
    for name, value in now.items():
        if name.startswith(PLACE) or name in REFUSED or not is_known(name, before):
            continue
        was = before.get(name)
        was = tuple(was) if isinstance(was, list) else was
        if was != value and str(was) != str(value):  # paths are text in a checkpoint
            yield name, was


def is_known(name: str, before: Mapping[str, object]) -> bool:
    """Whether a checkpoint says what a setting was. One that was none is not among what a run writes; an imported
    checkpoint has some settings only."""
    return name in before or "seed" in before
