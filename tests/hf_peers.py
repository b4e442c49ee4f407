"""Small random transformers models, saved as a user would save them, and their outputs and gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.block import Initial, Model
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.tensor.split.loss import IGNORED, ClassLoss

BERT = dict(vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
            max_position_embeddings=12)
VIT = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=12,
           patch_size=4)
DINOV2 = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=2, image_size=12, patch_size=4)


def peer(kind: str, dtype: torch.dtype = torch.float64, seed: int = 1, **settings) -> nn.Module:
    """transformers' model of this class with random parameters, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    family = next(family for family in ("Bert", "ViT", "Dinov2", "GPT2", "Llama", "Mistral", "Qwen2", "Qwen3",
                                     "Gemma2", "Gemma3", "Gemma", "Olmo2", "Olmo3", "Phi3",
                                     "SmolLM3", "Granite") if kind.startswith(family))
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, kind)(config(**settings)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def saved(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def gradients_as_ours(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The gradients of transformers' parameters, converted to our names and layout like values."""
    carrier = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, source in zip(carrier.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    found = Pretrained(saved(carrier, folder))
    return {ours: found.read(ours) for ours in found.places}


def blocks_of(model: Model, pretrained: Pretrained) -> dict[str, nn.Module]:
    """All blocks, with the parameters of the folder, in evaluation mode."""
    blocks = {name: build().eval() for name, build in model.blocks.items()}
    with torch.no_grad():
        for name, parameter in parameters(blocks).items():
            parameter.copy_(pretrained.read(name))
    return blocks


def parameters(blocks: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{block}.{name}": parameter for block, module in blocks.items()
            for name, parameter in module.named_parameters()}


def forward(blocks: dict[str, nn.Module], state):
    for block in blocks.values():
        state = block(state)
    return state


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def assert_gradients(blocks: dict[str, nn.Module], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Check every parameter's gradient, relative to its norm or to a thousandth of the largest norm if that is more."""
    ours = {name: parameter.grad for name, parameter in parameters(blocks).items()}
    assert ours.keys() == expected.keys()
    scale = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < tolerance * max(gradient.norm(), 1e-3 * scale), name


def assert_classes(blocks: dict[str, nn.Module], inputs, model: nn.Module, expected: Tensor, folder: Path) -> None:
    """Check that logits, loss and gradients are those of transformers' `model`, whose logits are `expected`."""
    logits, targets = forward(blocks, inputs), torch.tensor([1, IGNORED, 0])
    assert relative(logits, expected) < 1e-10
    total, weight = ClassLoss()(logits, targets)
    loss = functional.cross_entropy(expected, targets, reduction="sum")
    assert weight == 2 and relative(total, loss) < 1e-12
    total.backward()
    loss.backward()
    assert_gradients(blocks, gradients_as_ours(model, folder))


def assert_starts(model: Model, inputs, targets) -> dict[str, nn.Module]:
    """The blocks that `model` builds. Checks that they run two samples and have a loss, and that names, layers and
    initial values are those of a transformer with two layers."""
    blocks = {name: build() for name, build in model.blocks.items()}
    total, weight = model.loss(forward(blocks, inputs), targets)
    assert total.isfinite() and weight == 2
    assert model.layers == (("layer0.attention", "layer0.mlp"), ("layer1.attention", "layer1.mlp"))
    assert list(model.blocks) == ["embedding", *(name for layer in model.layers for name in layer), "head"]
    for name in parameters(blocks):
        constant = 0.0 if name.endswith(".bias") else 1.0 if ".norm." in name else None
        assert model.initial(name) == (Initial("normal", 0.02) if constant is None else Initial("constant", constant))
    return blocks


def every_place(pretrained: Pretrained) -> list[str]:
    return [name for place in form_of(pretrained.config).places(pretrained.config, pretrained.head).values()
            for name in place.names]
