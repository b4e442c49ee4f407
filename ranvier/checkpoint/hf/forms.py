"""The forms of Hugging Face models that Ranvier reads and writes, by `model_type` in config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ranvier.checkpoint.hf.bert import BERT
from ranvier.checkpoint.hf.form import Form, TensorMapping, same
from ranvier.checkpoint.hf.gpt2 import GPT2
from ranvier.checkpoint.hf.llama import LLAMA_FORMS, model_type
from ranvier.checkpoint.hf.vit import DINOV2, VIT
from ranvier.config.run import Transformer
from ranvier.errors import ModelError
from ranvier.models.any_transformers import CONFIG_BYTES, CutModel, cut_model
from ranvier.system.untrusted_file import member, read_json

_FORMS: Mapping[str, Form] = {"gpt2": GPT2, "bert": BERT, "vit": VIT, "dinov2": DINOV2, **LLAMA_FORMS}


def form_of_type(model_type: object) -> Form:
    """The form of a model_type in config.json. ModelError if it is not known."""
    if not isinstance(model_type, str) or model_type not in _FORMS:
        *others, last = _FORMS
        raise ModelError(f"must be {', '.join(others)} or {last}", code="unknown-model-type",
                         where="model_type in config.json", value=model_type,
                         remedy="Name one of these, or train any language model that transformers builds with "
                                "`--model.family transformers`, and generate or evaluate from the run's folder; "
                                "`ranvier.from_transformers(model)` trains it in your own loop.")
    return _FORMS[model_type]


def check_head(config: Transformer, head: str) -> None:
    """ModelError for a head with scores if transformers has no such class for the architecture."""
    form = form_of(config)
    if head in ("classes", "score") and head not in form.class_of:
        raise ModelError(f"has no form in transformers, whose {form.title} has no classifier",
                         code="no-classifier-in-hugging-face", where="data.task",
                         value="reward" if head == "score" else "classification",
                         remedy="Take a model of another architecture, such as Llama, Qwen or Gemma.")


def form_of(config: Transformer) -> Form:
    """The form in which models of a family are exported."""
    if config.family == "transformers":
        return ANY
    if config.family == "llama":
        return form_of_type(model_type(config))
    family = "gpt" if config.family == "auto" else config.family
    return form_of_type(next((name for name, form in _FORMS.items() if form.family == family), family))


# --- any model of transformers ----------------------------------------------------------------------------------------

# The family `transformers` in Hugging Face's format: names and settings of the folder that its run started from.
# Tensors have the names of transformers' own modules, under which it also reads them.


def _cut(config: Transformer) -> CutModel:
    assert config.pretrained is not None, "a problem of the family"
    return cut_model(config.pretrained, torch.float32)


def _places(config: Transformer, head: str) -> dict[str, TensorMapping]:
    cut = _cut(config)
    found = {ours: same(theirs, *cut.shapes[ours]) for ours, theirs in cut.names.items()}
    own = {other: owner for owner, *others in cut.blocks.tied for other in others} if config.untied else {}
    return found | {other: same(other.partition(".model.")[2], *cut.shapes[owner]) for other, owner in own.items()}


def _tied(config: Transformer) -> Mapping[str, str]:
    return {} if config.untied else {other: owner for owner, *others in _cut(config).blocks.tied for other in others}


def _read(document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    raise AssertionError("no model_type stands for it")


def _write(config: Transformer, head: str) -> dict[str, object]:
    assert config.pretrained is not None, "a problem of the family"
    try:
        found = read_json(member(Path(os.path.expanduser(config.pretrained)), "config.json"), CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", code="config-json-unreadable",
                         where=f"config.json in {config.pretrained}",
                         remedy="Put it back: the export has the settings of the folder that the run started from."
                         ) from error
    assert isinstance(found, dict), "transformers has built a model from it"
    return found | ({"tie_word_embeddings": False} if config.untied else {})


ANY = Form(title="a language model of transformers", family="transformers", prefix="", places=_places, read=_read,
           write=_write, per_layer=1, class_of={"tokens": "AutoModelForCausalLM"}, tied=_tied, aside=r"(?!)",
           any_head=False)
