"""Counted bytes against the bytes that are really sent: in a network that carries each message, in the buffers that MPI
gets, and in what the kernel's sockets have received."""

import contextlib
import os
import queue
import socket
import struct
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.comm.collectives import CheckedGroup, CompletedWork, TwoRoundWork, reduce_into
from ranvier.comm.fp32_sums import Fp32Sums
from ranvier.comm.sum_algorithms import choose_algorithm, ring_bytes
from ranvier.testing.ranks import run_processes
from tests.covering import examples
from tests.mpi import NEEDS_MPI

HERE = "tests.comm.test_wire"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool)
OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


class Network:
    """Messages between members, each counted where it arrives."""

    def __init__(self, size):
        self.queues = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
        self.arrived = [0] * size

    def receive(self, source, member):
        tensor = self.queues[source, member].get(timeout=30)
        self.arrived[member] += tensor.nbytes
        return tensor


class Done:
    def __init__(self, step):
        self.step = step

    def done(self):
        self.wait()
        return True

    def wait(self):
        if self.step is not None:
            step, self.step = self.step, None
            step()


class WireGroup(CheckedGroup):
    """A member whose library uses textbook algorithms: rings, and messages from each member to each."""

    def __init__(self, network, size, index, library):
        super().__init__("wire", range(size), index)
        self.network, self._library, self._under_way = network, library, []

    def library(self, device_type):
        return self._library

    def _do(self, step):
        """Collectives run one after another, in call order, when one of them is waited for."""
        self._under_way.append(step)

        def until():
            while step in self._under_way:
                self._under_way.pop(0)()
        return Done(until)

    def _pass_on(self, tensor):
        """Hand `tensor` to the next member, and return what arrives from the previous one."""
        members = len(self.ranks)
        self.network.queues[self.index, (self.index + 1) % members].put(tensor.clone())
        return self.network.receive((self.index - 1) % members, self.index)

    def _reduced_shares(self, tensor, op):
        shares = list(tensor.clone().tensor_split(len(self.ranks)))
        for step in range(1, len(self.ranks)):
            mine = (self.index - step - 1) % len(shares)
            came = self._pass_on(shares[(mine + 1) % len(shares)])
            reduce_into(shares[mine], came, op)
        return shares

    def _spread(self, shares):
        for step in range(1, len(self.ranks)):
            shares[(self.index - step) % len(shares)] = self._pass_on(shares[(self.index - step + 1) % len(shares)])
        return shares

    def _all_reduce(self, tensor, op):
        return self._do(lambda: tensor.copy_(torch.cat(self._spread(self._reduced_shares(tensor, op)))))

    def _reduce_scatter(self, output, tensor):
        return self._do(lambda: output.copy_(self._reduced_shares(tensor, "sum")[self.index]))

    def _all_gather(self, output, tensor):
        def step():
            shares = list(output.view(len(self.ranks), -1).clone())
            shares[self.index] = tensor.clone()
            output.copy_(torch.cat(self._spread(shares)))
        return self._do(step)

    def _reduce(self, tensor, root):
        def step():
            if (behind := (self.index - root) % len(self.ranks)) != 1:
                tensor.add_(self.network.receive((self.index - 1) % len(self.ranks), self.index))
            if behind:
                self.network.queues[self.index, (self.index + 1) % len(self.ranks)].put(tensor.clone())
        return self._do(step)

    def _broadcast(self, tensor, root):
        def step():
            if self.index != root:
                tensor.copy_(self.network.receive((self.index - 1) % len(self.ranks), self.index))
            if (self.index + 1) % len(self.ranks) != root:
                self.network.queues[self.index, (self.index + 1) % len(self.ranks)].put(tensor.clone())
        return self._do(step)

    def _all_to_all(self, output, tensor, received, sent):
        def step():
            for member, piece in enumerate(tensor.split(sent)):
                if member != self.index:
                    self.network.queues[self.index, member].put(piece.clone())
            for member, place in enumerate(output.split(received)):
                place.copy_(tensor.split(sent)[member] if member == self.index
                            else self.network.receive(member, self.index))
        return self._do(step)


def together(size, member):
    """Results of member(index), each in its own thread."""
    results, failures = [None] * size, []

    def run(index):
        try:
            results[index] = member(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    return results


def collective(group, operation, tensor, root=0):
    """The result of `operation` on [members * n] elements; None for members that `reduce` gives none."""
    members = len(group.ranks)
    share = tensor[:tensor.numel() // members].clone()
    match operation:
        case "all_reduce":
            whole = tensor.clone()
            group.all_reduce(whole).wait()
            return whole
        case "reduce":
            whole = tensor.clone()
            group.reduce(whole, root).wait()
            return whole if group.index == root else None
        case "reduce_scatter":
            group.reduce_scatter(share, tensor.clone()).wait()
            return share
        case "all_gather":
            whole = torch.empty_like(tensor)
            group.all_gather(whole, share).wait()
            return whole
        case "broadcast":
            whole = tensor.clone()
            group.broadcast(whole, root).wait()
            return whole
        case "all_to_all":
            whole = torch.empty_like(tensor)
            group.all_to_all(whole, tensor.clone()).wait()
            return whole


@examples(24)
@given(library=st.sampled_from(["gloo", "mpi", "nccl"]), size=st.integers(2, 5), share=st.sampled_from([1, 7, 20_000]),
       dtype=st.sampled_from(DTYPES), operation=st.sampled_from(OPERATIONS), root=st.integers(0, 4), wide=st.booleans())
def test_what_is_counted_has_arrived(library, size, share, dtype, operation, root, wide):
    """For every library, collective and format, on each member; and the sums are right."""
    network, root = Network(size), root % size
    brought = [torch.randint(0, 3, (size * share,), generator=torch.Generator().manual_seed(member)).to(dtype)
               for member in range(size)]
    total = torch.stack(brought).double().sum(0).to(dtype)

    def member(index):
        group = WireGroup(network, size, index, library)
        asked = Fp32Sums(group) if wide else group
        result = collective(asked, operation, brought[index], root)
        if operation in ("all_reduce", "reduce") and result is not None:
            assert torch.equal(result, total)
        if operation == "reduce_scatter":
            assert torch.equal(result, total.view(size, share)[index])
        return group.bytes_received

    assert together(size, member) == network.arrived


def test_sums_of_sixteen_bits_take_half_the_bytes_of_fp32():
    """In every library; and twice as many if the user wants sums in fp32."""
    for library in ("gloo", "mpi", "nccl"):
        for operation in ("all_reduce", "reduce", "reduce_scatter"):
            found = {}
            for dtype, wide in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
                network = Network(3)

                def member(index, dtype=dtype, wide=wide, network=network, library=library, operation=operation):
                    group = WireGroup(network, 3, index, library)
                    collective(Fp32Sums(group) if wide else group, operation, torch.ones(60_000, dtype=dtype))

                together(3, member)
                found[dtype, wide] = sum(network.arrived)
            assert found[torch.float32, False] == found[torch.bfloat16, True] == 2 * found[torch.bfloat16, False]


def test_libraries_reduce_and_scatter_where_they_can():
    large = 1 << 20
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_algorithm("nccl", "reduce_scatter", dtype, large, 4) == "library"
        assert choose_algorithm("nccl", "all_reduce", dtype, 8, 4) == "library"
    assert choose_algorithm("mpi", "reduce_scatter", torch.float32, large, 17) == "library"
    assert choose_algorithm("mpi", "reduce_scatter", torch.bfloat16, large, 17) == "exchanged", "MPI has no bfloat16"
    assert choose_algorithm("mpi", "reduce_scatter", torch.float32, large, 16) == "exchanged", "one round, not several"


# ---------------------------------------------------------------------- real libraries


def received_by_sockets():
    """Bytes that the kernel has received for this process on open connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=duplicate) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("=Q", info, 128)[0]
        except OSError:
            with contextlib.suppress(OSError):
                os.close(duplicate)
    return total


def over_sockets(world):
    group, found = world.backend.group("wire", [range(world.size)]), []
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        for operation in OPERATIONS:
            tensor = torch.ones(world.size * 200_000, dtype=dtype)
            group.barrier()
            counted, arrived = group.bytes_received, received_by_sockets()
            for root in range(world.size):
                collective(group, operation, tensor, root)
            group.barrier()
            found.append([f"{dtype} {operation}", group.bytes_received - counted, received_by_sockets() - arrived])
    return found


class CountingComm:
    """An MPI communicator that counts the bytes that it is told to receive or to transfer."""

    def __init__(self, comm):
        self._comm, self.size, self.index, self.bytes = comm, comm.Get_size(), comm.Get_rank(), 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Irecv(self, buffer, source):
        self.bytes += buffer.nbytes
        return self._comm.Irecv(buffer, source)

    def Iallreduce(self, place, buffer, op):
        self.bytes += ring_bytes("all_reduce", self.size, buffer.nbytes)
        return self._comm.Iallreduce(place, buffer, op)

    def Ireduce_scatter_block(self, whole, output):
        self.bytes += ring_bytes("reduce_scatter", self.size, whole.nbytes)
        return self._comm.Ireduce_scatter_block(whole, output)

    def Ireduce(self, *args):
        raise AssertionError("goes to one root in one round")

    def Ibcast(self, buffer, root):
        self.bytes += 0 if self.index == root else buffer.nbytes
        return self._comm.Ibcast(buffer, root)


def over_mpi(world):
    group, found = world.backend.group("wire", [range(world.size)]), []
    group.comm = CountingComm(group.comm)
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        for operation in OPERATIONS:
            for elements in (10, 50_000):
                counted, handed = group.bytes_received, group.comm.bytes
                collective(group, operation, torch.ones(world.size * elements, dtype=dtype), world.size - 1)
                found.append([f"{dtype} {operation} {elements}", group.bytes_received - counted,
                              group.comm.bytes - handed])
    group.comm = group.comm._comm
    return found


@pytest.mark.slow
@pytest.mark.mpi
@NEEDS_MPI
def test_mpi_is_handed_what_is_counted():
    for rank in run_processes(f"{HERE}:over_mpi", 3, "mpi"):
        for name, counted, handed in rank:
            assert handed == counted, name


def test_a_second_round_begins_in_wait_and_once_also_where_what_follows_it_fails():
    begun = []

    def begin():
        begun.append(True)
        return CompletedWork()

    def fail():
        raise ValueError("after the second round")

    work = TwoRoundWork(CompletedWork(), begin, fail)
    assert not work.done() and not begun
    with pytest.raises(ValueError, match="after the second round"):
        work.wait()
    work.wait()
    assert work.done() and begun == [True]
