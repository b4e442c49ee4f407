"""The models of CUDA and NCCL run, agree with their references, and detect deliberate misuse."""

import queue
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.gpu.models import devices, launches, nccl, run_ahead
from ranvier.comm import nccl_transport
from ranvier.comm.message import Message, MessageKind, encode_head
from ranvier.comm.nccl_transport import NcclTransport
from ranvier.errors import TransportError
from ranvier.schedule.policies import policy_named
from ranvier.schedule.simulator import StageTimes, simulate
from tests.errors import raises

# ---------------------------------------------------------------------- NCCL

class HostLoopOnly(NcclTransport):
    """Posts sends and receives only in the engine's thread."""

    def connect(self, sources, destinations, capacity_bytes):
        self._threads = [threading.Thread(target=lambda: None)]
        self._threads[0].start()
        super().connect(sources, destinations, capacity_bytes)
        while not all(edge.free for edge in self._destinations.values()):
            self._take_announcement(self._host.wait(10.0))

    def progress(self):
        while not self._packing.empty():
            event, edge, outgoing = self._packing.get()
            assert event.query()
            outgoing.is_ready = True
            self._send_waiting(edge)
        while (message := self._host.wait(0.001)) is not None:
            self._take_announcement(message)
        super().progress()

    def send(self, destination, message):
        super().send(destination, message)
        _, edge, outgoing = self._packing.get()
        outgoing.is_ready = True
        self._send_waiting(edge)


@pytest.mark.parametrize("synchronizing", [[], [1], [0, 1]])
def test_neighbours_that_send_at_once_get_their_messages(synchronizing):
    """Also if both wait for their entire devices, as in a cudaFree or the first use of a kernel."""
    assert nccl.exchange(synchronizing) == ["synchronized" if rank in synchronizing else "received" for rank in (0, 1)]


def test_what_the_transport_refuses():
    """A destination that was not named, and any call after it is closed."""
    devices = nccl.Devices(1)
    with devices.installed(), devices.as_rank(0):
        transport = nccl._transport(0, [queue.SimpleQueue()], NcclTransport)
        transport.connect([], [], 1 << 16)
        with raises("edge-not-connected", 0, 1, "pipeline"):
            transport.send(1, Message(MessageKind.CREDIT, 1, 0))
        assert transport.poll() == [] and transport.wait(0.0) is None and transport.flush(1.0)
        transport.close()
        for call in (transport.poll, lambda: transport.wait(0.0), lambda: transport.send(1, None)):
            with raises("transport-closed"):
                call()


def test_a_peer_that_is_lost_is_told_to_the_waiting_thread_and_beside_it():
    """The second thread gets the error; the engine's thread raises it, and `on_lost` is called in case that thread is
    blocked."""
    lost, devices = [], nccl.Devices(2)
    error = TransportError("is gone", where="rank 1 on 'pipeline'", remedy="Look there.")

    class Host(nccl._Host):
        def wait(self, seconds):
            if self.closed or not self.sent:
                return super().wait(seconds)
            raise error

        sent = False

        def send(self, destination, message):
            self.sent = True

    with devices.installed(), devices.as_rank(0):
        devices.irecv(torch.zeros(1), group_src=0, group=SimpleNamespace(rank=1))
        group = SimpleNamespace(rank=0)
        transport = NcclTransport(Host(0, [queue.SimpleQueue() for _ in range(2)]), torch.device("cpu"), rising=group,
                                  falling=group, on_lost=lost.append)
        transport.connect([], [1], 1 << 16)
        transport.send(1, Message(MessageKind.CREDIT, 1, 0))
        with pytest.raises(TransportError, match="is gone"):
            transport.wait(20.0)
        transport._threads[0].join(20.0)
        assert lost == [str(error)]
        transport.close()


def test_memory_that_nccl_still_writes_is_not_given_back(monkeypatch):
    """After an error a transport may be closed with a receive on the device, whose memory must not be reused."""
    kept, devices = [], nccl.Devices(2)
    monkeypatch.setattr(nccl_transport, "_left_behind", kept)
    with devices.installed(), devices.as_rank(0):
        devices.isend(torch.zeros(1), group_dst=0, group=SimpleNamespace(rank=1))  # of the peer, for its communicator
        transport = nccl._transport(0, [queue.SimpleQueue() for _ in range(2)], NcclTransport)
        transport.connect([1], [], 1 << 16)
        message = Message(MessageKind.FORWARD, 1, 0, {"": torch.ones(9)})
        head = {nccl_transport._PART: torch.tensor([0, 0, 9]), nccl_transport._HEAD: encode_head(message)}
        transport._take_announcement(Message(MessageKind.FORWARD, 1, 0, head, source=1))
        transport.close()
        assert kept == [(transport._destinations, transport._sources)]


def test_receives_that_only_the_host_loop_posts_block_both(monkeypatch):
    monkeypatch.setattr(nccl, "QUIET_SECONDS", 2.0)
    assert nccl.exchange([], HostLoopOnly) == ["received", "received"]
    assert nccl.exchange([0, 1], HostLoopOnly) == ["blocked", "blocked"]


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 10_000), marks=[
    pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["20", "10000"])
def test_random_programs_with_device_wide_waits_end(seeds):
    """Four ranks: sends of many sizes, receives, collectives, and synchronizations at any place."""
    for seed in seeds:
        assert nccl.run_program(nccl.random_program(seed)) == {"ended": 4}, f"seed {seed}"


@pytest.mark.parametrize("posts_first", [False, True])
def test_a_device_that_waits_for_a_receive_that_nobody_posts(posts_first, monkeypatch):
    """Two ranks send and synchronize: they are blocked unless they have posted their receives before."""
    monkeypatch.setattr(nccl, "QUIET_SECONDS", 0.5)
    devices, ended = nccl.Devices(2), ["", ""]

    def rank(number):
        with devices.as_rank(number):
            group = SimpleNamespace(rank=number)
            if posts_first:
                devices.irecv(torch.zeros(3), group_src=1 - number, group=group)
            devices.isend(torch.ones(3), group_dst=1 - number, group=group)
            try:
                devices.synchronize()
                ended[number] = "synchronized"
            except nccl.Blocked:
                ended[number] = "blocked"

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ended == ["synchronized" if posts_first else "blocked"] * 2


def test_nccl_prints_a_table(capsys):
    assert nccl.main(["--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 ended" in lines[-1] and not any("blocked" in line for line in lines)


# ---------------------------------------------------------------------- running ahead

@pytest.mark.parametrize("policy", ["message-driven", "1f1b"])
def test_completion_without_launches_is_the_simulator(policy):
    """With hosts that wait and launches that take no time, the model agrees with the planner's simulator."""
    pipeline = run_ahead.Pipeline(stages=4, microbatches=8, policy=policy, launch=0.0, hop=0.25)
    simulated = simulate([StageTimes(forward=1.0, backward=1.0, weight=1.0)] * 4, 8, policy_named(policy),
                         4, hop=0.25, defer_bytes="auto" if policy == "message-driven" else 0)
    ran = run_ahead.run(pipeline)
    assert ran.seconds == pytest.approx(simulated.seconds, rel=0.05)


def test_choices_far_ahead_lose_where_times_vary():
    """A host that chooses long before the device gets there chooses worse; a limit of one action ahead fixes that."""
    pipeline = run_ahead.Pipeline(stages=8, microbatches=32, jitter=0.5)
    found = run_ahead.efficiencies(pipeline, range(3))
    assert found["launch"] < found["completion"] < found["launch, 1"]
    even = run_ahead.efficiencies(replace(pipeline, jitter=0.0), [0])
    assert even["launch"] >= even["launch, 1"] > even["completion"]


# ---------------------------------------------------------------------- launches

def test_launches_and_host_reads_are_counted():
    """A layer that reads a number back is detected; views and allocations launch nothing."""
    linear, x = nn.Linear(3, 3), torch.ones(2, 3)
    with launches.Launches() as counted:
        y = linear(x.view(2, 3)).transpose(0, 1)
        torch.empty(3)
    assert counted.counts == {"addmm": 1}
    with launches.Launches() as counted:
        assert bool((y * 0 == 0).all())
    assert counted.counts[launches.HOST_READ] == 1


@pytest.mark.slow
def test_launches_of_a_step_are_whole_numbers_of_layers():
    found = launches.parts()
    assert sum(found.by_name.values()) == found.layer > 30 and found.microbatch > 0 and found.step > 0
    assert found.by_name["mm"] == 8 and found.by_name["native_layer_norm"] == 2 and found.dropout > 0


def test_calls_of_an_update():
    """One segment a bucket if all parameters have the same decay, more if vectors have none."""
    alike, apart = (launches.update_calls(2, 256, 4, decay) for decay in ("all", "matrices"))
    assert alike.calls == alike.buckets < apart.calls and alike.parameters == apart.parameters


def test_launches_of_a_small_step():
    counts = launches.step_launches(1, 1)
    assert counts["native_layer_norm"] == 3 and counts[launches.HOST_READ] > 0


# ---------------------------------------------------------------------- devices

@pytest.mark.parametrize("job", devices.JOBS, ids=lambda job: job.name)
def test_ranks_have_the_devices_that_fit_the_job(job):
    assert devices.fits(job, devices.choices(job)), devices.choices(job)


def test_a_choice_that_does_not_fit_is_told(monkeypatch, capsys):
    monkeypatch.setattr(devices, "choices", lambda job: ["GPU-0"] * len(job.visible))
    devices.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines and all(line.split()[-1] == "NO" for line in lines if line.strip())
