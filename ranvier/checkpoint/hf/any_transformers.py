"""The family `transformers` in Hugging Face's format: names and settings of the folder that its run started from.

Tensors have the names of transformers' own modules, under which it reads them, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ranvier.checkpoint.hf.form import Form, TensorMapping, same
from ranvier.config.run import Transformer
from ranvier.errors import ModelError
from ranvier.models.any_transformers import CONFIG_BYTES, CutModel, cut_model
from ranvier.system.untrusted_file import member, read_json


def _cut(config: Transformer) -> CutModel:
    assert config.pretrained is not None, "a problem of the family"
    return cut_model(config.pretrained, torch.float32)


def _places(config: Transformer, head: str) -> dict[str, TensorMapping]:
    cut = _cut(config)
    found = {ours: same(there, *cut.shapes[ours]) for ours, there in cut.names.items()}
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
