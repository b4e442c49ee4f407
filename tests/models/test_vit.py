"""The ViT against transformers' ViT and DINOv2: logits, features, raw gradients; how it is built and initialised."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Transformer
from ranvier.models import vit
from tests.errors import raises
from tests.hf_peers import (
    DINOV2,
    VIT,
    assert_classes,
    assert_starts,
    blocks_of,
    forward,
    parameters,
    peer,
    relative,
    saved,
)


def images_of(size=12, batch=3, seed=3):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("settings", [{}, {"image_size": 20, "patch_size": 5, "layer_norm_eps": 1e-6, "num_labels": 7}])
def test_equals_transformers_vit(tmp_path, settings):
    model = peer("ViTForImageClassification", **VIT | settings)
    found = Pretrained(saved(model, tmp_path / "model"))
    assert (found.missing, found.head, found.config.family) == ((), "classes", "vit")
    blocks = blocks_of(vit.vit(found.config, dtype=torch.float64), found)
    images = images_of(found.config.image_size)
    assert_classes(blocks, images, model, model(images).logits, tmp_path / "gradients")


def backbone_of(found: Pretrained) -> dict[str, nn.Module]:
    """All blocks except the classifier, which DINOv2 has in another form."""
    model = vit.vit(found.config, dtype=torch.float64)
    blocks = {name: build() for name, build in model.blocks.items()}
    blocks["head"] = blocks["head"].norm
    with torch.no_grad():
        for name, parameter in parameters(blocks).items():
            parameter.copy_(found.read(name.replace("head.", "head.norm.") if name.startswith("head.") else name))
    return blocks


@pytest.mark.parametrize("kind", ["Dinov2Model", "Dinov2ForImageClassification"])
def test_features_equal_transformers_dinov2(tmp_path, kind):
    model = peer(kind, **DINOV2)
    found = Pretrained(saved(model, tmp_path))
    assert found.missing == ("head.classifier.weight", "head.classifier.bias")
    assert found.left_out == (() if kind == "Dinov2Model" else ("classifier.bias", "classifier.weight"))
    assert (found.config.family, found.config.intermediate, found.config.num_classes) == ("vit", 48, "auto")
    images = images_of()
    theirs = (model if kind == "Dinov2Model" else model.dinov2)(images).last_hidden_state
    assert relative(forward(backbone_of(found), images), theirs) < 1e-10


def test_patches_are_those_of_a_convolution():
    images, weight = images_of(), torch.randn(8, 3, 4, 4, dtype=torch.float64)
    expected = functional.conv2d(images, weight, stride=4).flatten(2).transpose(1, 2)
    assert relative(vit.patches_of(images, 4) @ weight.flatten(1).t(), expected) < 1e-12


def tiny(**changed) -> Transformer:
    return Transformer(**dict(family="vit", num_layers=2, hidden=24, heads=3, image_size=12, patch_size=4) | changed)


def test_images_of_another_size_are_refused():
    blocks = {name: build() for name, build in vit.vit(tiny()).blocks.items()}
    with raises("image-shape", 3, 12, 16):
        forward(blocks, images_of(16).float())


def test_images_take_the_blocks_number_format():
    blocks = {name: build() for name, build in vit.vit(tiny(), dtype=torch.float64).blocks.items()}
    assert forward(blocks, images_of().float()).dtype is torch.float64


def test_sizes_that_cannot_be():
    assert vit.problems(tiny()) == []
    assert [str(problem) for problem in vit.problems(tiny(heads=5, image_size=99, patch_size=14))] == [
        "model.heads: does not divide model.hidden 24 (got 5). Set --model.heads 4.",
        "model.image_size: is not a multiple of model.patch_size 14 (got 99). Set --model.image-size 98."]
    with raises("heads-do-not-divide-hidden"):
        vit.vit(tiny(heads=5))


def test_samples_starts_and_names():
    config = tiny(num_classes=4)
    blocks = assert_starts(vit.vit(config), *vit.VIT.sample(config, "classes", 2))
    assert {name: tuple(one.shape) for name, one in parameters(blocks).items() if name.startswith("embedding.")} == {
        "embedding.patch.weight": (24, 48), "embedding.patch.bias": (24,), "embedding.patch.first": (24,),
        "embedding.position.weight": (10, 24)}
    assert blocks["head"].classifier.weight.shape == (4, 24) and vit.family.num_classes(tiny()) == 2


def test_flops_count_the_layers_products_and_the_patches():
    config = tiny(intermediate=40)
    blocks = {name: build() for name, build in vit.vit(config).blocks.items()}
    with FlopCounterMode(display=False) as counter:
        forward(blocks, vit.VIT.sample(config, "classes", 1)[0]).sum().backward()
    head = 3 * 2 * config.hidden * 2
    attention = 12 * config.num_layers * vit.num_tokens(config)**2 * config.hidden  # its CPU kernel may not be counted
    assert counter.get_total_flops() - head in (vit.flops_per_sequence(config),
                                                vit.flops_per_sequence(config) - attention)
    patches = 4 * 9 * 48 * 24
    assert vit.flops_per_sequence(config, recomputed=True) - patches == pytest.approx(
        4 / 3 * (vit.flops_per_sequence(config) - patches))
