"""Keyed dropout as one Triton kernel: with Triton's interpreter on a CPU, and on a device with -m gpu."""

import importlib

import pytest
import torch

from ranvier import keyed_random
from ranvier.tensor import keyed_dropout


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel(request, monkeypatch):
    """The kernel's module, and the device for its tensors."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if request.param == "interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.reload(importlib.import_module("ranvier.tensor.dropout_kernel")), torch.device(
        "cuda" if request.param == "cuda" else "cpu")


def dropped(call, x, samples=(5, 99, 123_456)):
    """y and dx for dy = 0, 1, ..., x.numel() - 1."""
    x = x.clone().requires_grad_()
    with keyed_random.scope(1, 2, torch.tensor(samples), "block"):
        y = call(x)
    y.backward(torch.arange(x.numel(), device=x.device).reshape(x.shape).to(x.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("probability", [0.1, 0.37])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_masks_and_values_are_those_of_torchs_operations(dtype, probability, kernel):
    module, device = kernel
    x = torch.randn(3, 50, 11, dtype=torch.float64).to(dtype)
    expected = dropped(lambda x: keyed_random.dropout(x, probability, True), x)
    found = dropped(lambda x: module.dropout(x, keyed_random.next_sample_keys(3, x.device), probability,
                                             module.place_of(x.shape[1:], (0, 0), x.shape[1:])), x.to(device))
    for one, other in zip(found, expected, strict=True):
        if dtype is torch.bfloat16 and device.type == "cpu":  # the interpreter does not round to nearest
            assert torch.equal(one == 0, other == 0) and torch.allclose(one, other, rtol=2**-7)
        else:
            assert torch.equal(one.cpu(), other)


def test_a_shard_drops_what_the_whole_drops(kernel):
    module, device = kernel
    x = torch.randn(3, 6, 8)
    whole, _ = dropped(lambda x: keyed_random.dropout(x, 0.3, True), x)
    part = (slice(None), slice(2, 5), slice(4, 8))
    found, _ = dropped(lambda x: module.dropout(x, keyed_random.next_sample_keys(3, x.device), 0.3, module.place_of(
        (3, 4), (2, 4), (6, 8))), x[part].to(device))
    assert torch.equal(found.cpu(), whole[part])
    assert module.place_of((2, 3, 4), (0, 0, 4), (2, 3, 8)) is None and module.place_of((4,), (4,), (8,)) == (
        1, 4, 0, 4, 8)


@pytest.mark.gpu
def test_a_device_uses_the_kernel():
    x = torch.randn(2, 9, 5, device="cuda")
    with keyed_random.scope(1, 2, torch.tensor([3, 4])):
        y = keyed_dropout.dropout(x.requires_grad_(), 0.5, True)
    assert "Dropped" in y.grad_fn.name()
    with keyed_random.scope(1, 2, torch.tensor([3, 4])):
        assert torch.equal(y.cpu(), keyed_random.dropout(x.cpu(), 0.5, True))
