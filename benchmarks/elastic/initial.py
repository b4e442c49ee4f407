"""The common start of all contenders: the pretrained weights and the seed's head, as transformers reads them."""

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
from ranvier.checkpoint.hf.peft import Adapters
from ranvier.checkpoint.hf.peft import write as write_adapters
from ranvier.config.resolve import resolve
from ranvier.config.run import Elastic, Run
from ranvier.elastic.freezing import NONE_FROZEN
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.models.lora import is_adapter
from ranvier.precision import DTYPES
from ranvier.testing.ranks import run_ranks
from ranvier.train.runtime import build_engine
from ranvier.train.setup import prepare_run
from ranvier.world import World

ADAPTERS = "adapters"


def write_initial(run: Run, folder: Path) -> Run:
    """Write our engine's initial weights to `folder`, in Hugging Face's format (BERT, Llama, or ViT also for a DINOv2),
    and adapters in PEFT's format to `folder`/adapters. Returns the run with the settings of its data and its pretrained
    model."""
    def build(world: World) -> tuple[Run, dict[str, Tensor], list[str]]:
        world.mesh = Mesh()
        alone, data, pretrained = prepare_run(replace(run, mesh=Mesh(), elastic=Elastic()), world, io.StringIO())
        engine = build_engine(resolve(alone), world, data.weight, frozen=NONE_FROZEN, fresh=True)
        if pretrained is not None:
            load_pretrained(engine, pretrained)
        parameters = engine.named_parameters()
        values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad and not is_adapter(name)]
        engine.close()
        return alone, values, trained

    (alone, values, trained), = run_ranks(build, 1, timeout_seconds=600.0)
    config = families.config_of(alone)
    form, head = form_of(config), families.head_of(alone)
    tensors = {there: tensor for name, place in form.places(config, head).items()
               for there, tensor in zip(place.names, hf.tensors_there(place, values[name]), strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(form.write(config, head)) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if alone.lora.rank:
        (folder / ADAPTERS).mkdir(exist_ok=True)
        names = frozenset(name.rpartition(".lora.")[0] for name in values if is_adapter(name))
        write_adapters(folder / ADAPTERS, Adapters(config=config, head=head, lora=alone.lora, names=names,
                                                   read=values.__getitem__), values.__getitem__,
                       dtype=DTYPES[run.precision], base=str(folder), trained=trained)
    return replace(run, model=alone.model, train=alone.train)
