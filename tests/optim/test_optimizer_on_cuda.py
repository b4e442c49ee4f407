"""The optimizer on a CUDA device: several streams compute what one stream does, and the allocator's own figures."""

import pytest
import torch

from ranvier.optim.optimizer import storage_bytes, tensors_by_category
from tests.optim.test_optimizer import OFFLOADS, gradients_like, make, parameters_of, step

pytestmark = pytest.mark.gpu

SHAPES = ((300, 501), (77,), (), (64, 32, 5), (1000, 999))


def on_device(dtype):
    return [torch.nn.Parameter(parameter.detach().cuda()) for parameter in parameters_of(SHAPES, dtype)]


def trained(dtype, **options):
    parameters = on_device(dtype)
    gradients, optimizer = make(parameters, bucket_size=1 << 14, chunk=1 << 16, **options)
    for number in range(5):
        values = [value.cuda() for value in gradients_like(parameters, number)]
        step(gradients, optimizer, values, factor=0.5)
    optimizer.placement.synchronize()
    torch.cuda.synchronize()
    return [parameter.detach().cpu() for parameter in parameters], optimizer


@pytest.mark.parametrize("in_flight", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_placements_agree(offload, dtype, in_flight):
    accumulate = torch.float32 if dtype is torch.bfloat16 else None
    expected, resident = trained(dtype, offload="none", accumulate=accumulate)
    found, other = trained(dtype, offload=offload, accumulate=accumulate, buckets_in_flight=in_flight)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for one, two in zip(found, expected, strict=True):
        if offload == "host":  # the host's kernel rounds differently
            torch.testing.assert_close(one, two, **tolerance)
        else:
            assert torch.equal(one, two)
    if offload != "host":
        for one, two in zip(resident.slices(), other.slices(), strict=True):
            assert all(torch.equal(state.cpu(), two.states[name].cpu()) for name, state in one.states.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["lion", "muon", "adafactor"])
def test_other_rules_agree(algorithm, dtype):
    """Streaming states is bit-identical to states on the device; states on the host agree but for rounding."""
    accumulate = torch.float32 if dtype is torch.bfloat16 else None
    expected, _ = trained(dtype, offload="none", accumulate=accumulate, algorithm=algorithm)
    found, _ = trained(dtype, offload="stream", accumulate=accumulate, algorithm=algorithm)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    on_host, _ = trained(dtype, offload="host", accumulate=accumulate, algorithm=algorithm)
    for one, two in zip(on_host, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_allocators_figures(in_flight):
    """4 phi + (12 d + 4) bsize, measured by torch.cuda.max_memory_allocated."""
    phi, bsize = 8_000_000, 1_000_000
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    parameter = torch.nn.Parameter(torch.zeros(phi, dtype=torch.float16, device="cuda"))
    gradients, optimizer = make([parameter], offload="stream", bucket_size=bsize, buckets_in_flight=in_flight)
    gradients.begin()
    gradients.all_passed()
    torch.cuda.reset_peak_memory_stats()
    optimizer.prefetch()
    optimizer.begin(1e-3)
    for chunk in gradients.reduced():
        for _ in optimizer.update(chunk, 0.5):
            pass
    torch.cuda.synchronize()
    used, expected = torch.cuda.max_memory_allocated() - before, 4 * phi + (12 * in_flight + 4) * bsize
    assert used == pytest.approx(expected, rel=0.02)
    host = tensors_by_category([parameter], gradients, optimizer)["host"]
    assert all(tensor.is_pinned() for tensors in host.values() for tensor in tensors)
    assert sum(map(storage_bytes, host.values())) == 12 * phi
