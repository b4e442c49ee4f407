"""Small models in Hugging Face's form, written without transformers, and checkpoints of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ranvier.checkpoint.hf import gpt2 as hf_gpt2
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.manifest import Saved, encode
from ranvier.config.run import Transformer
from tests.checkpoint.anywhere import write_manifest

SMALL = Transformer(family="gpt", num_layers=2, hidden=24, heads=3, vocab=300, sequence=16)


def parameters(config=SMALL, dtype=torch.float32, seed=0):
    """Random tensors of a complete model under Hugging Face's names, all different."""
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=generator) * 0.3).to(dtype)
            for place in hf_gpt2.places(config).values()
            for name, shape in zip(place.names, place.shapes, strict=True)}


def write_model(folder: Path, tensors=None, config=SMALL, **settings) -> Path:
    """Write config.json and model.safetensors; `settings` override those of `config`, and None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {**hf_gpt2.write(config), **settings}
    (folder / "config.json").write_text(json.dumps(document))
    save_file(parameters(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_checkpoint(folder: Path, tensors=None, config=SMALL, precision=None) -> Path:
    """Write a run's folder with step-0."""
    model = write_model(folder.with_name(folder.name + "-model"), tensors, config)
    import_model(model, folder, precision=precision, tell=lambda line: None)
    return folder


def edit_manifest(step: Path, edit) -> None:
    """Change the manifest of a checkpoint: `edit` modifies its JSON document in place."""
    document = json.loads(encode(Saved(step).manifest))
    edit(document)
    write_manifest(step, document)
