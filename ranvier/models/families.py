"""The model family of a run, and queries of its properties by the rest of the run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ranvier.block import Model, State, untrained_layers
from ranvier.config.named_object import blame_user_code, is_object_name, load_object
from ranvier.config.run import Run, Transformer
from ranvier.config.task_form import family_name, form_of
from ranvier.errors import ConfigError, ModelError, RanvierError
from ranvier.models.family import FAMILY_ATTRIBUTES, ModelFacts, ModelFamily, Targets
from ranvier.models.lora import with_adapters
from ranvier.models.packed_sequences import two_segments
from ranvier.tensor.split.loss import vocabulary_of
from ranvier.tensor.split.preference_loss import PreferenceLoss

_SETTING = "model.family"
_MODULES = {"gpt": "gpt", "llama": "llama", "bert": "bert", "vit": "vit", "transformers": "any_transformers"}
"""Shipped family -> its module, which defines it under its name in capital letters."""


def family_named(name: str, options: tuple[str, ...] = ()) -> ModelFamily:
    """The family of this name, imported on first use. ConfigError if a user's object is not a family."""
    if name in _MODULES:
        shipped: ModelFamily = getattr(importlib.import_module(f"ranvier.models.{_MODULES[name]}"), name.upper())
        return shipped
    if not is_object_name(name):
        raise ConfigError(f"must be {', '.join(_MODULES)} or module:function", code="unknown-family", where=_SETTING,
                          value=name, remedy="Name a shipped family or one of your own.")
    found: ModelFamily = load_object(name, _SETTING, FAMILY_ATTRIBUTES, options)  # type: ignore[assignment]  # checked
    return found


def family_of(run: Run) -> ModelFamily:
    """The run's family. ConfigError if a user's object is not a family."""
    return family_named(family_name(run), run.model.options if is_object_name(run.model.family) else ())


def config_of(run: Run) -> Transformer:
    """The model's settings with the family auto replaced by the actual one."""
    return replace(run.model, family=family_name(run))


def head_of(run: Run) -> str:
    """Kind of the last block's output in this run: "tokens", "score", "classes", "span", or a user's task's name."""
    return form_of(run.data).head


def problems(run: Run) -> list[RanvierError]:
    """All problems of the model's settings, and reasons why its layers cannot be frozen. Problems of the task itself
    are found by `ranvier.data.prepare`."""
    try:
        form_of(run.data)
    except RanvierError:
        return []
    try:
        return _model_problems(run) or _layer_problems(run)
    except RanvierError as problem:
        return [problem]


def _model_problems(run: Run) -> list[RanvierError]:
    form = form_of(run.data)
    family, name = family_of(run), family_name(run)
    if not is_object_name(name) and not is_object_name(run.data.task) and name not in (form.family, *form.others):
        return [ConfigError(f"does not support the task {run.data.task}, which "
                            f"{' and '.join((form.family, *form.others))} {'do' if form.others else 'does'}",
                            code="family-without-task", where=_SETTING, value=name,
                            remedy="Name a model of that family in `--model.pretrained`, or another `--data.task`."
                            if run.model.pretrained else "Set `--model.family auto`, or another `--data.task`.")]
    if name == "transformers" and run.data.packing:
        return [ConfigError("packs samples, which transformers' modules cannot keep apart",
                            code="packing-without-segments", where="data.packing", value=True,
                            remedy="Leave it out, or choose a model of another `--model.family`.")]
    with blame_user_code(name, _SETTING, "`problems`"):
        found = list(family.problems(run.model, form.head))
    if is_object_name(name) and not found:
        found = _contract_problems(run, _build(family, name, run.model, form.head, torch.float32))
    return found


def model_of(run: Run, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of the run's model, its loss and its initial values. RanvierError for invalid settings."""
    for problem in _model_problems(run):
        raise problem
    head = head_of(run)
    model = _build(family_of(run), family_name(run), run.model, head, dtype)
    if run.data.task == "preference":
        model = replace(model, loss=PreferenceLoss(vocabulary_of(model.loss) or run.model.vocab, run.preference))
    if not run.lora.rank:
        return model
    train_head = head != "tokens" if run.lora.train_head == "auto" else run.lora.train_head
    return with_adapters(model, replace(run.lora, train_head=train_head), seed=run.seed)


def _build(family: ModelFamily, name: str, settings: Transformer, head: str, dtype: torch.dtype) -> Model:
    with blame_user_code(name, _SETTING, "`model`"):
        model = family.model(settings, head, dtype=dtype)
    if not isinstance(model, Model):
        raise ModelError("has a `model` that does not return a ranvier.Model", code="family-model-type", where=_SETTING,
                         value=type(model).__name__, remedy=f"Correct `model` of {name}.")
    return model


def _contract_problems(run: Run, model: Model) -> list[RanvierError]:
    """Problems of a user's model whose layers contradict the run's settings."""
    count = len(model.layers)
    if count and count != run.model.num_layers:
        return [ConfigError(f"is not the number of layers that {run.model.family} declares, {count}",
                            code="num-layers-differ", where="model.num-layers", value=run.model.num_layers,
                            remedy=f"Set `--model.num-layers {count}`, or declare as many in Model(layers=...) as "
                                   "settings.num_layers.")]
    return []


def _layer_problems(run: Run) -> list[RanvierError]:
    """Why layers cannot be frozen: the model declares none, or each has trainable parameters. RanvierError if the model
    cannot have the adapters of the section [lora]."""
    if run.elastic.freeze == "none" and not run.lora.rank:
        return []
    model = model_of(run)
    if run.elastic.freeze != "none" and not model.layers:
        return [ConfigError(f"needs layers, and {family_name(run)} declares none", code="freezing-needs-layers",
                            where="elastic.freeze", value=run.elastic.freeze,
                            remedy="Set `--elastic.freeze none`, or declare them: Model(layers=...).")]
    if run.elastic.freeze == "untrained" and not untrained_layers(model):
        return [ConfigError("freezes no layer: the first one has trainable parameters", code="nothing-to-freeze",
                            where="elastic.freeze", value="untrained",
                            remedy="Give adapters to upper layers only, for example "
                                   f"`--lora.targets 'layer{len(model.layers) - 1}.*'`, or choose another policy.")]
    return []


def with_own_head(settings: Transformer) -> Transformer:
    """The settings of a shipped family's model whose projection onto the vocabulary is not its token embedding."""
    return replace(settings, tied=False) if settings.family == "llama" else replace(settings, untied=True)


def num_blocks(run: Run) -> int:
    """Number of blocks of the run's model."""
    return _outline(family_name(run), run.model, head_of(run))[0]


def layers_of(run: Run) -> tuple[tuple[str, ...], ...]:
    """Names of the blocks of each layer (`Model.layers`)."""
    return _outline(family_name(run), run.model, head_of(run))[1]


@lru_cache(maxsize=32)
def _outline(name: str, settings: Transformer, head: str) -> tuple[int, tuple[tuple[str, ...], ...]]:
    """Number of blocks, and layers. Cached, since planners ask for them thousands of times."""
    family = family_named(name, settings.options if is_object_name(name) else ())
    model = _build(family, name, settings, head, torch.float32)
    return len(model.blocks), model.layers


def tokens_of(run: Run) -> int:
    """Number of positions of one sample: tokens of a sequence, or patches of an image and the tokens before them."""
    return _facts(run).tokens


def text(run: Run) -> str:
    """The model in words."""
    return _facts(run).text


def _facts(run: Run) -> ModelFacts:
    with blame_user_code(family_name(run), _SETTING, "`describe`"):
        return family_of(run).describe(run.model)


def flops_per_sample(run: Run, *, recomputed: bool = False) -> float:
    """FLOPs of training on one sample, forward and backward."""
    with blame_user_code(family_name(run), _SETTING, "`flops_per_sample`"):
        scores = family_name(run) == "llama" and head_of(run) != "tokens"
        model = replace(run.model, vocab=2) if scores else run.model  # a head of negligible size
        return family_of(run).flops_per_sample(model, recomputed=recomputed)


def sample_of(run: Run, count: int) -> tuple[State, Targets]:
    """Inputs and targets of `count` samples, on the device of the context."""
    with blame_user_code(family_name(run), _SETTING, "`sample`"):
        inputs, targets = family_of(run).sample(run.model, head_of(run), count)
    if run.data.task != "preference":
        packs = run.data.packing and "data.packing" not in form_of(run.data).unused
        return two_segments(inputs) if packs and isinstance(inputs, Tensor) else inputs, targets
    assert isinstance(inputs, Tensor) and isinstance(targets, Tensor)  # of the head "tokens"
    return two_segments(inputs), {
        "tokens": targets, "rejected_from": torch.full_like(targets[:, 0], inputs.shape[1] // 2),
        "reference": torch.zeros(count, 2, dtype=torch.float64)}
