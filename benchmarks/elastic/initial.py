"""The start that all contenders have: the pretrained weights and the seed's head, as transformers reads them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.from_pretrained import load_pretrained
from ranvier.config.resolve import resolve
from ranvier.config.run import Elastic, Run
from ranvier.elastic.freezing import NONE_FROZEN
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.testing.ranks import run_ranks
from ranvier.train.runtime import build_engine
from ranvier.train.setup import prepare_run
from ranvier.world import World


def write_initial(run: Run, folder: Path) -> Run:
    """Write what our engine starts from to `folder`, in Hugging Face's form (BERT, or ViT also for a DINOv2). Returns
    the run with what its data and its pretrained model say."""
    def build(world: World) -> tuple[Run, dict[str, Tensor]]:
        world.mesh = Mesh()
        alone, data, pretrained = prepare_run(replace(run, mesh=Mesh(), elastic=Elastic()), world, io.StringIO())
        engine = build_engine(resolve(alone), world, data.weight, frozen=NONE_FROZEN, fresh=True)
        if pretrained is not None:
            load_pretrained(engine, pretrained)
        values = {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}
        engine.close()
        return alone, values

    (alone, values), = run_ranks(build, 1, timeout_seconds=600.0)
    config = replace(alone.model, family=families.family_name(alone))
    form, head = form_of(config), families.head_of(alone)
    tensors = {there: tensor for name, place in form.places(config, head).items()
               for there, tensor in zip(place.names, hf.tensors_there(place, values[name]), strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(form.write(config, head)) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(run, model=alone.model, train=alone.train)
