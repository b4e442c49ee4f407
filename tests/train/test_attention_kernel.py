"""The attention kernel: measured, agreed on by all ranks, preferred, reported. On a fake device."""

import json

import pytest
import torch
from torch.nn import functional

from ranvier.comm.inprocess import InProcessWorld
from ranvier.config.resolve import resolve
from ranvier.config.run import Run, Transformer
from ranvier.testing.ranks import run_ranks
from ranvier.train import attention_kernel
from ranvier.train.attention_kernel import KERNELS, choose_kernel, kernel_seconds, preferred_kernel
from tests.errors import raises
from tests.fake_cuda import FakeCuda
from tests.test_cuda_branches import DEVICE, small_peak, whole_run

__all__ = ["small_peak"]
SMALL = Transformer(num_layers=1, hidden=16, heads=2, vocab=300, sequence=16)


def run_of(kernel="auto", **changed):
    return resolve(Run(precision="bf16", model=Transformer(**{**vars(SMALL), "attention_kernel": kernel, **changed})))


def chosen(seconds, monkeypatch, kernel="auto"):
    """Choice of ranks that have measured these seconds; all ranks must make the same one."""
    monkeypatch.setattr(attention_kernel, "kernel_seconds", lambda run, device: seconds[device.index])

    def rank(world):
        return choose_kernel(run_of(kernel), world.backend.group("all", [tuple(range(world.size))]),
                             torch.device("cuda", world.rank))

    first, *others = run_ranks(rank, len(seconds))
    assert all(one == first for one in others)
    return first


def test_all_ranks_take_the_one_whose_slowest_rank_is_fastest(monkeypatch):
    seconds = [{"flash": 1e-3, "cudnn": 5e-4, "math": 9e-3}, {"flash": 1e-3, "cudnn": 2e-3, "math": 9e-3}]
    kernel, text = chosen(seconds, monkeypatch)
    assert kernel == "flash"
    assert text == "flash (forward and backward of a microbatch: flash 1.00 ms, cudnn 2.00 ms, math 9.00 ms)"


def test_one_that_a_rank_lacks_is_not_taken(monkeypatch):
    seconds = [{"flash": 1e-3, "math": 9e-3}, {"math": 9e-3}]
    assert chosen(seconds, monkeypatch)[0] == "math"
    assert chosen(seconds[:1], monkeypatch, kernel="math")[0] == "math"
    with raises("attention-kernel-not-usable", 1):
        chosen(seconds, monkeypatch, kernel="flash")


def test_a_device_measures_the_kernels_that_it_has():
    with FakeCuda(devices=2) as cuda:
        found = kernel_seconds(run_of(), DEVICE)
        assert cuda.calls["synchronize", 1] and not cuda.calls["synchronize", 0]
        used = torch.cuda.max_memory_allocated(DEVICE)
        choose_kernel(run_of(), InProcessWorld(1).backend(0).group("all", [(0,)]), DEVICE)
        assert torch.cuda.max_memory_allocated(DEVICE) == 0 < used  # not counted as the run's
    assert {"flash"} <= set(found) <= set(KERNELS) and all(seconds > 0 for seconds in found.values())
    assert kernel_seconds(run_of(family="somewhere:model"), DEVICE) == {}


def test_a_cpu_has_no_choice(monkeypatch):
    monkeypatch.setattr(attention_kernel, "kernel_seconds", None)
    assert run_ranks(lambda world: choose_kernel(run_of(), world.backend.group("all", [(0,)]), world.device), 1) == [
        ("auto", "")]


def test_others_stay_for_what_the_preferred_one_cannot_compute():
    before = torch._C._get_sdp_priority_order()
    q = torch.randn(1, 2, 4, 8)
    with preferred_kernel("cudnn"):
        assert torch._C._get_sdp_priority_order()[0] == int(KERNELS["cudnn"])
        y = functional.scaled_dot_product_attention(q, q, q)
    assert torch._C._get_sdp_priority_order() == before
    assert torch.allclose(y, functional.scaled_dot_product_attention(q, q, q), atol=1e-6)


def test_a_run_tells_and_records_it(tmp_path, small_peak, monkeypatch):
    monkeypatch.setattr(attention_kernel, "kernel_seconds", lambda run, device: {"math": 2e-3, "efficient": 1e-3})
    with FakeCuda(devices=2):
        whole_run(tmp_path, DEVICE)
    assert 'attention_kernel = "efficient"' in (tmp_path / "run" / "run.toml").read_text()
    started = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert "efficient (forward and backward of a microbatch: efficient 1.00 ms" in json.dumps(started)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_device_computes_with_each_kernel(name):
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = functional.scaled_dot_product_attention(*(one.double() for one in (q, k, v)), is_causal=True)
    with preferred_kernel(name):
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(y.double(), expected, atol=0.05)
