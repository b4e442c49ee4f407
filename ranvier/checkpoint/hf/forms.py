"""The forms of Hugging Face models that Ranvier reads and writes, by `model_type` in config.json."""

from __future__ import annotations

from collections.abc import Mapping

from ranvier.checkpoint.hf.any_transformers import ANY
from ranvier.checkpoint.hf.bert import BERT
from ranvier.checkpoint.hf.form import Form
from ranvier.checkpoint.hf.gpt2 import GPT2
from ranvier.checkpoint.hf.llama import LLAMA_FORMS, model_type
from ranvier.checkpoint.hf.vit import DINOV2, VIT
from ranvier.config.run import Transformer
from ranvier.errors import ModelError

_FORMS: Mapping[str, Form] = {"gpt2": GPT2, "bert": BERT, "vit": VIT, "dinov2": DINOV2, **LLAMA_FORMS}


def form_of_type(model_type: object) -> Form:
    """The form of a model_type in config.json. ModelError if it is not known."""
    if not isinstance(model_type, str) or model_type not in _FORMS:
        *others, last = _FORMS
        raise ModelError(f"must be {', '.join(others)} or {last}", code="unknown-model-type",
                         where="model_type in config.json", value=model_type,
                         remedy="Name one of these, or train any language model that transformers builds with "
                                "`--model.family transformers`, and generate or evaluate from the run's folder; "
                                "`ranvier.from_transformers(model)` trains it in a loop of your own.")
    return _FORMS[model_type]


def check_head(config: Transformer, head: str) -> None:
    """ModelError for scores of an architecture that has no such class in transformers."""
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
    return form_of_type({"auto": "gpt2", "gpt": "gpt2"}.get(config.family, config.family))
