"""Tensors of a CUDA device over MPI, with device addresses and without, on a fake device and a fake MPI: the values
arrive, the host never waits, and MPI gets no memory that the device still uses."""

from collections import deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ranvier.comm import mpi_backend
from ranvier.comm.message import Message, MessageKind
from ranvier.comm.mpi_backend import MPIGroup
from ranvier.comm.mpi_transport import MPITransport
from tests.fake_cuda import FakeCuda, FakeEvent

DEVICE = torch.device("cuda", 1)


class Request:
    def __init__(self, step):
        self._step = step

    def Test(self):
        if self._step is not None and self._step():
            self._step = None
        return self._step is None

    def __bool__(self):
        return True

    Cancel = Wait = lambda self: None


class Null(Request):
    def __bool__(self):
        return False


NULL = Null(None)


def finished(requests):
    return [place for place, one in enumerate(requests) if one and one.Test() and not requests.__setitem__(place, NULL)
            ] or None


MPI = SimpleNamespace(SUM=0, MAX=1, MIN=2, IN_PLACE="in place", REQUEST_NULL=NULL, Exception=ZeroDivisionError,
                      Request=SimpleNamespace(Testsome=finished,
                                              Testall=lambda requests: all(one.Test() for one in requests)))


def bytes_of(buffer):
    return torch.from_numpy(buffer) if isinstance(buffer, numpy.ndarray) else buffer


class Comm:
    """One rank of two, and what each has sent to the other. moved: where MPI's buffers for reads and writes are."""

    def __init__(self, cuda, rank, lines):
        self._cuda, self._rank, self._lines, self.moved = cuda, rank, lines, []

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return 2

    def Iprobe(self):
        pass

    def Isend(self, buffer, destination):
        self.moved.append(self._cuda.place(buffer) if isinstance(buffer, torch.Tensor) else None)
        with _disable_current_modes():
            self._lines[self._rank, destination].append(bytes_of(buffer).clone())
        return Request(lambda: True)

    def Irecv(self, buffer, source):
        line, place = self._lines[source, self._rank], self._cuda.place(buffer) if isinstance(
            buffer, torch.Tensor) else None
        self.moved.append(place)

        def arrives():
            if not line:
                return False
            sent = line.popleft()
            with _disable_current_modes():
                bytes_of(buffer)[:len(sent)].copy_(sent)
            return True
        return Request(arrives)


class SlowEvent(FakeEvent):
    """Completed at its third query."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 2


@pytest.fixture
def cuda(monkeypatch):
    with FakeCuda(devices=2) as cuda:
        monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
        torch.cuda.set_sync_debug_mode("error")
        yield cuda
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("aware", [False, True])
def test_messages(cuda, aware):
    """Small and large messages, without tensors and with tensors of the host, arrive in order."""
    lines = {(0, 1): deque(), (1, 0): deque()}
    comms = [Comm(cuda, rank, lines) for rank in range(2)]
    ends = [MPITransport(MPI, comm, "pipeline", DEVICE, aware) for comm in comms]
    ends[0].connect([], [1], 1 << 9)
    ends[1].connect([0], [], 1 << 9)
    sizes = [10, 1000, 0, 3, 500]
    for number, size in enumerate(sizes):
        tensor = torch.full((size,), float(number), device=DEVICE)
        ends[0].send(1, Message(MessageKind.FORWARD, 1, number, {"": tensor, "more": tensor.to(torch.int64)[:2]}))
        assert number or not comms[0].moved  # the device has not computed the tensor yet
        if size:
            tensor.fill_(-1.0)
    ends[0].send(1, Message(MessageKind.CREDIT, 1, 9))
    ends[0].send(1, Message(MessageKind.STATE, 1, 9, {"": torch.arange(3)}))
    arrived, rounds = [], 0
    while len(arrived) < len(sizes) + 2:
        rounds += 1
        assert rounds < 100
        ends[0].progress()
        arrived += ends[1].poll()
    assert ends[0].sends_in_flight == 0 and ends[0].bytes_sent > 4 * sum(sizes)
    for number, (size, message) in enumerate(zip(sizes, arrived, strict=False)):
        found = message.tensors[""]
        assert (message.kind, message.microbatch, found.numel()) == (MessageKind.FORWARD, number, size)
        assert found.is_cuda and torch.equal(found.to("cpu", non_blocking=True), torch.full((size,), float(number)))
        assert message.tensors["more"].dtype is torch.int64
    assert [one.kind for one in arrived[-2:]] == [MessageKind.CREDIT, MessageKind.STATE]
    devices = [place for comm in comms for place in comm.moved if place is not None]
    assert devices == [1] * (2 * 4 if aware else 0)  # a message without bytes has no second part
    assert not cuda.host_reads
    for end in ends:
        end.close()


def test_a_thread_beside_the_engines_neither_allocates_nor_frees_device_memory(cuda):
    """It would wait for a cudaFree, which waits for the device, which may wait for data that this thread sends."""
    lines = {(0, 1): deque(), (1, 0): deque()}
    comms = [Comm(cuda, rank, lines) for rank in range(2)]
    ends = [MPITransport(MPI, comm, "pipeline", DEVICE, True) for comm in comms]
    ends[0].connect([], [1], 1 << 9)
    ends[1].connect([0], [], 1 << 9)
    ends[0].send(1, Message(MessageKind.FORWARD, 1, 0, {"": torch.ones(50, device=DEVICE)}))
    live = torch.cuda.memory_allocated(DEVICE)
    for _ in range(5):
        for end in ends:
            end.advance_sends()
    assert not ends[0].sends_in_flight and len(lines[0, 1]) == 2 and comms[1].moved == [None]
    assert torch.cuda.memory_allocated(DEVICE) == live
    ends[0].progress()
    assert torch.cuda.memory_allocated(DEVICE) < live
    while not (arrived := ends[1].poll()):
        pass
    assert arrived[0].tensors[""].shape == (50,)


@pytest.mark.parametrize("aware", [False, True])
def test_collectives(cuda, aware):
    """Collectives begin in call order, each after its tensors are computed."""
    begun = []

    def broadcast(out, root):
        assert root == 1 and isinstance(out, torch.Tensor) is aware
        begun.append(len(out))
        with _disable_current_modes():
            bytes_of(out).fill_(64)
        return Request(lambda: True)

    group = MPIGroup(MPI, SimpleNamespace(Ibcast=broadcast), "test", [0, 1], 0, aware, 1.0, False)
    tensors = [torch.ones(size, device=DEVICE) for size in (4, 2)]
    works = [group.broadcast(tensors[0], 1)]
    assert not begun
    works.append(group.broadcast(tensors[1], 1))
    works[1].wait()
    works[0].wait()
    assert begun == [16, 8]
    assert all((tensor.to("cpu", non_blocking=True) > 3).all() for tensor in tensors)


def library(kinds="", query=None, monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(mpi_backend.ctypes, "CDLL", lambda path: SimpleNamespace(
            **{} if query is None else {"MPIX_Query_cuda_support": query}))
    info = SimpleNamespace(Get=lambda name: kinds if name == "mpi_memory_alloc_kinds" else None)
    return SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=lambda: info), __file__="mpi.so")


def test_what_a_library_says(monkeypatch):
    """MPI 4.1's info, or the function of Open MPI and MPICH; variables that switch the support off take precedence."""
    for name in mpi_backend._SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert mpi_backend._cuda_aware(library("system,cuda:device"))
    assert not mpi_backend._cuda_aware(library("system", None, monkeypatch))
    assert not mpi_backend._cuda_aware(library("", lambda: 0, monkeypatch))
    assert mpi_backend._cuda_aware(library("", lambda: 1, monkeypatch))
    for name, value in (("MPIR_CVAR_ENABLE_GPU", "0"), ("OMPI_MCA_opal_cuda_support", "false")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not mpi_backend._cuda_aware(library("system,cuda:device"))


@pytest.mark.parametrize("peer", [0, 1])
def test_all_ranks_agree(monkeypatch, peer):
    """If one rank's library takes no device addresses, as on a node with another module, all ranks use host memory."""
    def reduce(in_place, least, op):
        least[0] = min(least[0], peer)
        return SimpleNamespace(Test=lambda: True)

    world = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Set_errhandler=lambda handler: None,
                            Iallreduce=reduce)
    module = SimpleNamespace(**vars(MPI), ERRORS_RETURN=0, COMM_WORLD=None)
    monkeypatch.setattr(mpi_backend, "_load_mpi", lambda: (module, False))
    monkeypatch.setattr(mpi_backend, "_cuda_aware", lambda mpi: True)
    assert mpi_backend.MPIBackend(DEVICE, comm=world)._aware is bool(peer)
