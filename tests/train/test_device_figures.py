"""Figures of a CUDA device: its peak, its memory apart from tensors, pinned memory, deterministic algorithms."""

from types import SimpleNamespace

import pytest
import torch

from ranvier.checkpoint.files import host_copies
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.resolve import resolve
from ranvier.config.run import Checkpoint, Launch, Optim, Run, Transformer
from ranvier.cost.device_overhead import CONTEXT_BYTES, LIBRARY_BYTES, with_overhead
from ranvier.cost.memory import RankMemory
from ranvier.cost.published_peaks import published_peak
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.system import pinned_memory
from ranvier.system.pinned_memory import pinned_bytes, pinned_zeros
from ranvier.train import metrics
from ranvier.train.determinism import deterministic_algorithms
from ranvier.train.metrics import PeakRate, matrix_product_rate, peak_rate
from tests.errors import raises
from tests.fake_cuda import FakeCuda

DEVICE = torch.device("cuda", 1)


@pytest.mark.parametrize(("name", "precision", "peak"), [
    ("NVIDIA H200", "bf16", 989.4e12), ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
    ("NVIDIA H100 PCIe", "bf16", 756e12),
    ("NVIDIA A100-SXM4-80GB", "bf16", 312e12), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12), ("Tesla T4", "fp16", 65e12),
    ("NVIDIA L40S", "bf16", 362e12), ("NVIDIA L40", "bf16", 181e12), ("NVIDIA B200", "bf16", 2250e12),
    ("NVIDIA GB200", "fp64", 40e12), ("NVIDIA GB300", "fp64", 1.25e12), ("NVIDIA B300 SXM6 AC", "bf16", 2250e12),
    ("NVIDIA A10G", "bf16", 70e12), ("NVIDIA A10", "bf16", 125e12), ("Tesla V100-PCIE-32GB", "fp16", 112e12),
    ("Tesla V100S-PCIE-32GB", "fp16", 130e12), ("Tesla V100-SXM2-16GB", "fp16", 125e12),
    ("NVIDIA H200", "fp64", 67e12), ("Some other device", "bf16", None)])
def test_published_peaks_by_name(name, precision, peak):
    assert published_peak(name, precision) == peak


def test_products_are_measured_on_data_that_varies(monkeypatch):
    """The measurement uses the given device, and leaves the run's random numbers as they are."""
    seen, multiply = [], torch.mm

    def mm(a, b, out=None):
        seen.append((a, b))
        return multiply(a, b, out=out) if out is not None else multiply(a, b)

    monkeypatch.setattr(torch, "mm", mm)
    state = torch.get_rng_state()
    assert matrix_product_rate(torch.device("cpu"), torch.float32, seconds=0.0) > 0
    assert torch.equal(torch.get_rng_state(), state)
    a, b = seen[0]
    assert a.std() > 0.2 and b.std() > 0.2 and len(a[3].unique()) > 400 and not torch.equal(a, b)


def test_a_devices_peak_is_measured_there(monkeypatch):
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda size, **options: arange(min(size, 64), **options))
    with FakeCuda(devices=2) as cuda:
        assert matrix_product_rate(DEVICE, torch.bfloat16, seconds=0.0) > 0
        assert cuda.calls["synchronize", 1] >= 2 and not cuda.calls["synchronize", 0]


def test_utilisation_is_of_the_published_peak_where_there_is_one(monkeypatch):
    monkeypatch.setattr(metrics, "matrix_product_rate", lambda device, dtype: torch.full(
        (), 7e14, dtype=torch.float64, device=device).item())
    group = InProcessWorld(1).backend(0).group("all", [[0]])
    with FakeCuda(devices=2):
        found = peak_rate(group, DEVICE, "bf16")
        assert torch.cuda.max_memory_allocated(DEVICE) == 0  # memory of the measurement does not count as the run's
        assert found.reference == 989.4e12 and found.facts()["model_flops_utilisation_of"] == "published peak"
    with FakeCuda(devices=2, name="Unknown"):
        assert peak_rate(group, DEVICE, "bf16") == PeakRate(700e12, None)
    found = peak_rate(group, torch.device("cpu"), "fp32")
    assert found.reference == 700e12 and found.facts()["model_flops_utilisation_of"] == "measured matrix products"


def test_overhead_beside_tensors():
    entry = RankMemory(pipeline_rank=0, ranks=1, device={"parameters": 1000, "gradients": 1000})
    assert with_overhead(entry).device == {"parameters": 1000, "gradients": 1000, "allocator": 100,
                                           "context and libraries": LIBRARY_BYTES}
    assert with_overhead(entry, context=True).device["context and libraries"] == LIBRARY_BYTES + CONTEXT_BYTES


# ---------------------------------------------------------------------- pinned memory

@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (1000, 1024), (1 << 20, 1 << 20), (1 << 30, 1 << 30),
                                              ((1 << 30) + 1, (1 << 30) + 1), (21_581_000_000, 21_581_000_000)])
def test_bytes_that_pinned_memory_takes(asked, taken):
    assert pinned_bytes(asked) == taken


class Runtime:
    def __init__(self, status=0):
        self.status, self.registered = status, {}

    def cudaHostRegister(self, address, size, flags):  # CUDA's own name
        self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def test_large_pinned_tensors_are_registered_at_their_own_size(monkeypatch):
    """And unregistered when their last view is gone."""
    monkeypatch.setattr(pinned_memory, "GRANULE", 1 << 10)
    runtime = Runtime()
    with FakeCuda():
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime, raising=False)
        small, large = pinned_zeros(100, torch.float32), pinned_zeros(1001, torch.float32)
        assert runtime.registered == {large.data_ptr(): 4004} and not small.any() and not large.any()
        view = large[10:20]
        del large
        assert runtime.registered
        del view
        assert not runtime.registered


def test_copies_of_a_checkpoint_are_pinned_together(monkeypatch):
    """Three tensors of 1.2 KB would take 2 KB each; copies of other tensors take another piece, once the first is
    free."""
    monkeypatch.setattr(pinned_memory, "GRANULE", 1 << 10)
    runtime, room = Runtime(), []
    with FakeCuda():
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime, raising=False)
        tensors = [torch.arange(300.0, device=DEVICE), torch.arange(5), torch.zeros(0, device=DEVICE),
                   torch.ones(20, 15, device=DEVICE), torch.full((), 7, device=DEVICE),
                   torch.ones(3, 200, dtype=torch.bfloat16, device=DEVICE)]
        for again in range(2):
            copies = host_copies(tensors, room)
            assert sum(runtime.registered.values()) == 3 * 1216 + 64 and len(runtime.registered) == 1
            assert [one.dtype for one in copies] == [one.dtype for one in tensors]
            assert all(torch.equal(copy, one.to("cpu")) for copy, one in zip(copies, tensors, strict=True))
            tensors[0].add_(1.0)
            assert again or copies[0] is room[0]
        del copies
        copies = host_copies(tensors[:1], room)
        assert torch.equal(copies[0], tensors[0].to("cpu")) and list(runtime.registered.values()) == [1216]


def test_copies_that_cannot_be_pinned(monkeypatch):
    monkeypatch.setattr(pinned_memory, "GRANULE", 1 << 10)
    with FakeCuda():
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(status=2), raising=False)
        with raises("memory-not-pinned", "--checkpoint.background"):
            host_copies([torch.ones(1000, device=DEVICE)], [])


@pytest.mark.parametrize("background", [True, False])
def test_pinned_copies_of_a_checkpoint_are_predicted(background):
    """Also with optimizer states on the device."""
    run = resolve(Run(model=Transformer(num_layers=2, hidden=64, heads=4, vocab=128, sequence=16),
                      optim=Optim(offload="none"), mesh=Mesh(), launch=Launch(device="cuda"),
                      checkpoint=Checkpoint(background=background)))
    (entry,) = laid_out(run)[1]
    copied = entry.host["checkpoint"]
    assert entry.host.get("rounding", 0) == (pinned_bytes(copied) - copied if background else 0)
    assert background or copied == 4 * 64 * 256, "the largest parameter"


def test_memory_that_cannot_be_pinned(monkeypatch):
    monkeypatch.setattr(pinned_memory, "GRANULE", 1 << 10)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(status=2), raising=False)
    with raises("memory-not-pinned", 2):
        pinned_zeros(1001, torch.float32)


# ---------------------------------------------------------------------- the rest

def test_deterministic_algorithms_are_used_inside_only(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    import os
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_communicators_are_warmed_and_aborted_on_their_device(monkeypatch):
    """NCCL builds them at their first use, which is before the first step; a rank that ends aborts them."""
    from ranvier.comm import torch_backend

    used, aborted = [], []

    class Group:
        def _get_backend(self, device):
            return SimpleNamespace(abort=lambda: aborted.append(device))

    backend = object.__new__(TorchBackend)
    backend._device, backend._nccl_groups, backend._groups = DEVICE, [Group(), None], []
    monkeypatch.setattr(torch_backend.dist, "all_reduce", lambda tensor, group: used.append(tensor.device))
    with FakeCuda(devices=2):
        backend._warm_up(Group())
        backend._warm_up(None)
    assert used == [DEVICE]
    backend.abort_communicators()
    assert aborted == [DEVICE]
    backend._device = torch.device("cpu")
    backend.abort_communicators()
    assert aborted == [DEVICE]


def test_the_next_batch_is_made_ahead_and_taken_only_by_who_asks_for_it():
    """Samples are the same as without prefetching; after a change of sizes, or a rollback, the batch is made again."""
    from ranvier.data.loader import Loader
    from ranvier.data.sampler import Sampler
    from tests.checkpoint.anywhere import SAMPLES

    def loader(device):
        return Loader(SAMPLES, Sampler(len(SAMPLES), 3), global_size=8, microbatch_size=2, device=device)

    def values(batch):
        return [(one.inputs.tolist(), one.targets.tolist(), one.samples.tolist()) for one in batch]

    plain = loader("cpu")
    plain.prefetch(0)  # does nothing on a CPU
    assert plain._ahead is None
    with FakeCuda(devices=2):
        ahead = loader(DEVICE)
        reads = []
        read = ahead._read
        ahead._read = lambda step: (reads.append(step), read(step))[1]
        for step in range(3):
            found = ahead.microbatches(step)
            ahead.prefetch(step + 1)
            assert all(one.inputs.device == DEVICE for one in found)
            assert values(found) == values(plain.microbatches(step))
        assert reads == [0, 1, 2, 3]
        ahead.microbatch_size = plain.microbatch_size = 4
        assert values(ahead.microbatches(3)) == values(plain.microbatches(3)) and reads[4:] == [3]
        ahead.prefetch(4)
        assert values(ahead.microbatches(1)) == values(plain.microbatches(1)) and reads[5:] == [4, 1]


def test_samples_go_to_a_device_without_a_wait():
    from ranvier.data.loader import Loader

    loader = object.__new__(Loader)
    loader.device = DEVICE
    with FakeCuda(devices=2) as cuda:
        moved = loader._on_device({"tokens": torch.arange(4)})
        assert moved["tokens"].device == DEVICE and not cuda.host_reads
