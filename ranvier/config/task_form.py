"""Facts about a task that a run needs before its data is prepared: its model, its unit, and the settings that it
ignores.

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
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ranvier.config.named_object import blame_user_code, is_object_name, load_object
from ranvier.config.run import Data, Run
from ranvier.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TaskForm:
    """Facts about a task.

    family: the model family for `auto`; others: shipped families that also support the task. head: the output of the
    model's last block: "tokens" (logits of the next token), "score" (one number for each token), "classes" (logits of a
    sample's class), "span" (scores of each token as an answer's first and last), or any other name that the run's own
    family supports. targets: what the loss is averaged over, in the plural: "tokens".
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


_UNUSED: tuple[tuple[str, str, str], ...] = (
    ("lm", "{} learns from data.corpus", "data.train data.train_samples data.eval_samples"),
    ("chat preference reward classification qa images", "{} learns from data.train", "data.corpus data.max_bytes"),
    ("preference reward classification qa images", "{} is evaluated on all held-out samples", "train.eval_sequences"),
    ("preference reward classification qa images", "{} packs nothing", "data.packing"),
    ("preference reward classification qa images", "{} has no mixtures", "data.mixture"),
    ("preference reward", "{} reads prompt, chosen and rejected", "data.messages_column"),
    ("lm classification qa images", "{} has no conversations", "data.messages_column data.form data.chat_template"),
    ("lm chat preference reward qa", "{} has no classes", "model.num_classes"),
    ("lm chat preference reward qa images", "{} has no pairs", "data.pair_column"),
    ("lm chat preference reward qa images", "{} has no column of labels", "data.label_column"),
    ("chat preference reward qa images", "{} has no column of text", "data.text_column"),
    ("lm chat preference reward classification qa", "{} has no images", "model.image_size model.patch_size"),
    ("lm preference reward", "{} has no images", "data.augment data.augment_repeats"),
    ("lm images", "samples of {} have one length", "data.padding"),
    ("images", "{} has no tokens", "model.vocab model.sequence"),
    ("images", "{} has no text", "data.tokenizer"))
"""(tasks, why these settings have no effect in them, the settings)."""

_DECODERS = ("llama", "transformers")
_FORMS = {
    "lm": TaskForm(family="gpt", head="tokens", targets="tokens", samples="sequences", writes_text=True,
                   others=_DECODERS),
    "chat": TaskForm(family="gpt", head="tokens", targets="tokens", samples="conversations", others=_DECODERS),
    "preference": TaskForm(family="gpt", head="tokens", targets="pairs", samples="pairs", others=("llama",)),
    "reward": TaskForm(family="llama", head="score", targets="pairs", samples="pairs"),
    "classification": TaskForm(family="bert", head="classes", targets="sentences", samples="sentences",
                               others=("llama",), takes_wordpiece=True),
    "qa": TaskForm(family="bert", head="span", targets="questions", samples="questions", takes_wordpiece=True),
    "images": TaskForm(family="vit", head="classes", targets="images", samples="images")}
SHIPPED: Mapping[str, TaskForm] = MappingProxyType({task: replace(form, unused={
    setting: why.format(f"the task {task}") for tasks, why, settings in _UNUSED if task in tasks.split()
    for setting in settings.split()}) for task, form in _FORMS.items()})

TASK_ATTRIBUTES = ("form", "problems()", "warnings()", "prepare()")
"""Attributes that a task must have (`ranvier.data.task.Task`)."""


def form_of(data: Data) -> TaskForm:
    """The facts about the task of a run. ConfigError if data.task names an object that is not a task."""
    if not is_object_name(data.task):
        return SHIPPED[data.task]
    found = load_object(data.task, "data.task", TASK_ATTRIBUTES, data.options)
    with blame_user_code(data.task, "data.task", "`form`"):
        form = getattr(found, "form")  # noqa: B009 - the protocol is in a room above this one
    if not isinstance(form, TaskForm):
        raise ConfigError(f"has a `form` that is a {type(form).__name__}", code="task-form-type", where="data.task",
                          value=data.task, remedy="Make it a ranvier.config.task_form.TaskForm.")
    return form


def family_name(run: Run) -> str:
    """The model family of a run, a shipped one's name or module:name: the task's if the run says auto. ConfigError as
    `form_of`."""
    return form_of(run.data).family if run.model.family == "auto" else run.model.family
