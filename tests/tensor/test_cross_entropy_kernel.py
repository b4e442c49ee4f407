"""The Triton kernels of the cross-entropy: with Triton's interpreter on a CPU, and on a device with -m gpu."""

import importlib

import pytest
import torch

from ranvier.tensor.split import loss


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel(request):
    """The kernels' module, and the device for its tensors. On a CPU tests/conftest.py selects the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton decides when it is imported whether it interprets")
    return importlib.import_module("ranvier.tensor.cross_entropy_kernel"), torch.device(request.param)


@pytest.mark.parametrize("width", [5, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_compute_what_torchs_operations_compute(dtype, width, kernel):
    module, device = kernel
    padded = (torch.randn(6, width + 7) * 5).to(dtype)
    padded[3, :width] = -torch.inf
    padded[4, 1:width] = -torch.inf
    index = torch.tensor([0, -1, width - 1, -1, 0, 2])
    scale = torch.tensor([1.0, 0.5, -2.0, 0.0, 1.0, 3.0]).unsqueeze(1)
    expected, found = padded.clone()[:, :width], padded.to(device)[:, :width]
    statistics = loss._statistics(expected, index)
    for one, other in zip(module.statistics(found, index.to(device)), statistics, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
    log_sum = statistics[1][0].log() + statistics[0]
    log_sum[3] = 0.0
    loss._overwrite_with_gradient(expected, index, log_sum, scale)
    module.overwrite_with_gradient(found, index.to(device), log_sum.to(device), scale.to(device))
    rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=rounding, atol=1e-6)  # softmax - 1 cancels, times 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_uses_the_kernels(dtype):
    logits, targets = torch.randn(2, 9, 5000).to(dtype), torch.randint(5000, (2, 9))
    targets[0, 0] = loss.IGNORED
    found = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device, copy=True).requires_grad_()
        total, weight = loss.next_token_loss(leaf * 1, targets.to(device))
        total.backward()
        found.append((total.detach().cpu(), weight.cpu(), leaf.grad.cpu().float()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    targets[1, 1] = 5000
    assert loss.next_token_loss(logits.cuda(), targets.cuda())[0].isnan(), "a target outside the vocabulary"
