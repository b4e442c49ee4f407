"""The in-place cross-entropy against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ranvier.tensor.split.loss import ClassLoss, SpanLoss, next_token_loss
from tests.errors import raises

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def case(dtype, shape=(3, 7, 50), ignored=5):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(shape[-1], shape[:-1], generator=generator)
    targets.view(-1)[torch.randperm(targets.numel(), generator=generator)[:ignored]] = -100
    return logits.to(dtype), targets


def reference(logits, targets):
    """Sum of the losses and its gradient, by torch.nn.functional.cross_entropy."""
    logits = logits.clone().requires_grad_()
    total = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total.detach(), torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("shape", [(3, 7, 50), (2, 40, 20_000), (1, 3, 300_000), (1, 1, 2), (6, 9)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sum_weight_and_gradient_are_cross_entropys(shape, dtype):
    logits, targets = case(dtype, shape, ignored=1 if len(shape) < 3 or shape[1] > 1 else 0)
    expected_total, expected = reference(logits, targets)
    leaf = logits.clone().requires_grad_()
    total, weight = next_token_loss(leaf * 1, targets)
    total.backward()
    assert total.dtype == dtype and not weight.requires_grad
    assert weight == (targets != -100).sum()
    torch.testing.assert_close(total.detach(), expected_total, rtol=TOLERANCE[dtype], atol=0)
    assert (leaf.grad - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    assert torch.all(leaf.grad[targets == -100] == 0)


@pytest.mark.parametrize("scale", [0.0, -3.0, 1 / 1024])
def test_upstream_gradients_scale(scale):
    logits, targets = case(torch.float64)
    leaf = logits.clone().requires_grad_()
    (next_token_loss(leaf * 2, targets)[0] * scale).backward()
    expected = reference(logits * 2, targets)[1] * 2 * scale
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-15)


def test_gradient_takes_the_logits_memory():
    logits, targets = case(torch.float32)
    expected = reference(logits, targets)[1]
    leaf = logits.clone().requires_grad_()
    output = leaf * 1
    seen = []
    output.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    next_token_loss(output, targets)[0].backward()
    assert seen == [output.data_ptr()]
    torch.testing.assert_close(output.detach(), expected)


def test_a_second_backward_is_refused_not_wrong():
    logits, targets = case(torch.float32)
    total, _ = next_token_loss(logits.requires_grad_() * 1, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("no_grad", [False, True])
def test_evaluation_leaves_logits_alone(no_grad):
    logits, targets = case(torch.float64)
    before = logits.clone()
    with torch.set_grad_enabled(not no_grad):
        total, _ = next_token_loss(logits.requires_grad_(no_grad), targets)
    assert torch.equal(logits, before) and not total.requires_grad
    torch.testing.assert_close(total, reference(before, targets)[0], rtol=1e-12, atol=0)


def test_through_a_linear_head_and_non_contiguous_logits():
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(6, 9, bias=False).double()
    targets = torch.randint(9, (2, 5))
    next_token_loss(head(hidden), targets)[0].backward()
    ours = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    torch.testing.assert_close(ours, (hidden.grad, head.weight.grad), rtol=1e-12, atol=1e-14)

    logits, targets = case(torch.float64, (5, 3, 8))
    leaf = logits.clone().requires_grad_()
    next_token_loss(leaf.transpose(0, 1), targets.t())[0].backward()
    torch.testing.assert_close(leaf.grad, reference(logits, targets)[1], rtol=1e-12, atol=1e-14)


def test_all_ignored_gives_zero_weight_and_zero_gradient():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    total, weight = next_token_loss(logits * 1, torch.full((2, 3), -100))
    total.backward()
    assert total == 0 and weight == 0 and torch.all(logits.grad == 0)


def test_large_logits_stay_finite():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    total, _ = next_token_loss(logits * 1, torch.tensor([[1]]))
    total.backward()
    assert total == 2e4
    assert logits.grad.tolist() == [[[1.0, -1.0, 0.0]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_fp32(dtype):
    logits, targets = case(dtype)
    expected_total, expected = reference(logits.float(), targets)
    leaf = logits.clone().requires_grad_()
    total, _ = next_token_loss(leaf * 1, targets)
    total.backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.detach(), expected_total, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad.float(), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("loss", "shape"), [(next_token_loss, (3, 7, 200)), (ClassLoss(), (3, 200)),
                                             (SpanLoss(), (3, 200, 2))])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_narrow_targets_are_numbers_like_others(loss, shape, dtype):
    """156 as uint8 is not `IGNORED`."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    targets = torch.full(shape[:-1] if len(shape) == 3 and shape[-1] > 2 else shape[:1], 156)
    found, expected = (loss(logits * 1, {"start": one, "end": one} if shape[-1] == 2 else one)
                       for one in (targets.to(dtype), targets))
    assert found[0] == expected[0] and found[1] == expected[1] == targets.numel()


@pytest.mark.parametrize("targets", [torch.zeros(3, 6, dtype=torch.int64), torch.zeros(3, 7), None, [1, 2]])
def test_targets_that_do_not_fit_are_named(targets):
    with raises("targets-do-not-fit-logits", 3, 7, 50):
        next_token_loss(torch.zeros(3, 7, 50), targets)


@pytest.mark.gpu
def test_on_cuda():
    logits, targets = case(torch.float32, (2, 40, 20_000))
    expected_total, expected = reference(logits, targets)
    leaf = logits.cuda().requires_grad_()
    total, _ = next_token_loss(leaf * 1, targets.cuda())
    total.backward()
    torch.testing.assert_close(total.detach().cpu(), expected_total, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad.cpu(), expected, rtol=1e-4, atol=1e-6)
