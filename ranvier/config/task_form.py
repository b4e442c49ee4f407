"""What the rest of a run must know of a task before its data is there: its model, what it counts, what it ignores.

    task             family    head       counts
    lm               gpt       tokens     tokens of sequences (llama too)
    chat             gpt       tokens     tokens of the assistant in conversations (llama too)
    preference       gpt       tokens     pairs of answers (llama too)
    reward           llama     score      pairs of answers
    classification   bert      classes    sentences (llama too)
    qa               bert      span       questions
    images           vit       classes    images
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ranvier.config.named_object import blamed, is_object_name, load_object
from ranvier.config.run import Data
from ranvier.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TaskForm:
    """Facts about a task.

    family: the model family that `auto` takes; others: shipped families that do the task too. head: what the
    model's last block gives: "tokens" (logits of the next token), "score" (one number for each token), "classes"
    (logits of a sample's class), "span" (scores of each token as an answer's first and last), or any other name
    that the run's own family understands. targets: what the loss is averaged over, in the plural: "tokens".
    samples: what a batch consists of, in the plural: "sequences". writes_text: whether the model can write sample
    text at the end of a run. takes_wordpiece: whether the family's tokenizer must be a WordPiece. unused: settings
    without effect in this task, by dotted name with underscores -> the reason, for warnings.
    """

    family: str
    head: str
    targets: str
    samples: str
    writes_text: bool = False
    takes_wordpiece: bool = False
    unused: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def _unused(task: str, reason: str, *names: str) -> dict[str, str]:
    return {name: reason.format(f"the task {task}") for name in names}


def _labelled(task: str) -> dict[str, str]:
    """Settings without effect in tasks with labelled samples."""
    return (_unused(task, "{} learns from data.train", "data.corpus", "data.max_bytes")
            | _unused(task, "{} is evaluated on all held-out samples", "train.eval_sequences"))


def _no_images(task: str, *names: str) -> dict[str, str]:
    return _unused(task, "{} has no images", "model.image_size", "model.patch_size", *names)


def _no_labels(task: str) -> dict[str, str]:
    return (_unused(task, "{} has no pairs", "data.pair_column")
            | _unused(task, "{} has no column of labels", "data.label_column"))


def _no_text_column(task: str) -> dict[str, str]:
    return _unused(task, "{} has no column of text", "data.text_column")


def _no_messages(task: str) -> dict[str, str]:
    return _unused(task, "{} has no conversations", "data.messages_column", "data.form", "data.chat_template")


def _no_packing(task: str) -> dict[str, str]:
    return _unused(task, "{} packs nothing", "data.packing") | _unused(task, "{} has no mixtures", "data.mixture")


def _of_pairs(task: str) -> dict[str, str]:
    """Settings without effect in tasks with pairs of answers."""
    return (_labelled(task) | _unused(task, "{} has no classes", "model.num_classes") | _no_labels(task)
            | _no_text_column(task) | _no_packing(task) | _no_images(task, "data.augment", "data.augment_repeats")
            | _unused(task, "{} reads prompt, chosen and rejected", "data.messages_column"))


_DECODERS = ("llama", "transformers")
SHIPPED: Mapping[str, TaskForm] = MappingProxyType({
    "lm": TaskForm(
        family="gpt", head="tokens", targets="tokens", samples="sequences", writes_text=True, others=_DECODERS,
        unused=_unused("lm", "{} learns from data.corpus", "data.train", "data.train_samples", "data.eval_samples")
        | _unused("lm", "{} has no classes", "model.num_classes")
        | _unused("lm", "samples of {} have one length", "data.padding") | _no_labels("lm") | _no_messages("lm")
        | _no_images("lm", "data.augment", "data.augment_repeats")),
    "chat": TaskForm(
        family="gpt", head="tokens", targets="tokens", samples="conversations", others=_DECODERS,
        unused=_unused("chat", "{} learns from data.train", "data.corpus", "data.max_bytes")
        | _unused("chat", "{} has no classes", "model.num_classes") | _no_labels("chat") | _no_text_column("chat")
        | _no_images("chat")),
    "preference": TaskForm(family="gpt", head="tokens", targets="pairs", samples="pairs", others=("llama",),
                           unused=_of_pairs("preference")),
    "reward": TaskForm(family="llama", head="score", targets="pairs", samples="pairs", unused=_of_pairs("reward")),
    "classification": TaskForm(
        family="bert", head="classes", targets="sentences", samples="sentences", takes_wordpiece=True,
        others=("llama",),
        unused=_labelled("classification") | _no_messages("classification") | _no_packing("classification")
        | _no_images("classification")),
    "qa": TaskForm(
        family="bert", head="span", targets="questions", samples="questions", takes_wordpiece=True,
        unused=_labelled("qa") | _no_images("qa") | _no_labels("qa") | _no_text_column("qa") | _no_messages("qa")
        | _no_packing("qa") | _unused("qa", "{} has no classes", "model.num_classes")),
    "images": TaskForm(
        family="vit", head="classes", targets="images", samples="images",
        unused=_labelled("images") | _no_labels("images") | _no_text_column("images") | _no_messages("images")
        | _no_packing("images") | _unused("images", "samples of {} have one length", "data.padding")
        | _unused("images", "{} has no tokens", "model.vocab", "model.sequence")
        | _unused("images", "{} has no text", "data.tokenizer"))})

TASK_ATTRIBUTES = ("form", "problems()", "warnings()", "prepare()")
"""What a task has (`ranvier.data.task.Task`)."""


def form_of(data: Data) -> TaskForm:
    """The facts about the task of a run. ConfigError where data.task names an object that is no task."""
    if not is_object_name(data.task):
        return SHIPPED[data.task]
    found = load_object(data.task, "data.task", TASK_ATTRIBUTES, data.options)
    with blamed(data.task, "data.task", "`form`"):
        form = getattr(found, "form")  # noqa: B009 - the protocol is in a room above this one
    if not isinstance(form, TaskForm):
        raise ConfigError(f"has a `form` that is a {type(form).__name__}", code="task-form-type", where="data.task",
                          value=data.task, remedy="Make it a ranvier.config.task_form.TaskForm.")
    return form
