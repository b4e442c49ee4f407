"""Injected faults: each acts once, when and where it should, and ends a run with the message that a user reads."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import ranvier
from ranvier.cli import faults
from ranvier.comm import edges
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.message import Message, MessageKind
from ranvier.config.run import Pipeline
from ranvier.errors import ConfigError, TransportError
from ranvier.testing.faults import faulty, flip_bit, parse
from ranvier.testing.ranks import RanksFailed, run_processes, run_ranks
from ranvier.train.memory import is_out_of_memory
from ranvier.world import World
from tests import tiny_runs
from tests.comm import conformance
from tests.comm.conformance import everyone, receive
from tests.errors import raises
from tests.mpi import MPI
from tests.pipeline.parity import points, squared
from tests.pipeline.test_unusual_blocks import Plain
from tests.processes import processes_with

HERE = "tests.testing_tools.test_fault_injection"

# ---------------------------------------------------------------------- as text

EXAMPLES = ["kill:rank=1,call=200", "stop:rank=0,seconds=2.5", "delay:rank=3,message=7,for=1.5",
            "drop:rank=2,message=1", "corrupt:rank=0,message=3,bit=77", "allocation:rank=0,call=1",
            "disk:rank=0,seconds=0.0,for=3.0,bytes=10", "drop:rank=2,message=1,of=command",
            "kill:rank=1,call=7,of=transition", "slow:rank=0,call=2,for=0.1"]


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_there_and_back(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(("text", "what"), [
    ("", "needs a rank"), ("kill", "needs a rank"), ("kill:call=3", "needs a rank"),
    ("burn:rank=1,call=3", "there is no kind 'burn'"), ("kill:rank=1", "needs exactly one of call"),
    ("kill:rank=1,call=3,seconds=1", "needs exactly one of call"),
    ("kill:rank=1,cal=3", "'cal=3' is not one of rank=, call=, "),
    ("kill:rank", "'rank' is not one of"), ("kill:rank=x,call=1", "rank is not a whole number"),
    ("kill:rank=1,call=1.5", "call is not a whole number"), ("kill:rank=1,seconds=soon", "seconds is not a number"),
    ("kill:rank=1,rank=2,call=1", "rank is given twice"), ("kill:rank=-1,call=1", "rank must be at least 0"),
    ("kill:rank=1,call=0", "call must be at least 1"), ("drop:rank=1,message=0", "message must be at least 1"),
    ("kill:rank=1,seconds=nan", "seconds must be at least 0, and finite"),
    ("kill:rank=1,seconds=inf", "seconds must be at least 0, and finite"),
    ("delay:rank=1,message=1", "a delay needs for=SECONDS"), ("slow:rank=1,call=1", "slow needs for=SECONDS"),
    ("kill:rank=1,call=1,for=3", "for has no effect on kill"),
    ("drop:rank=1,call=1,bit=3", "bit has no effect on drop"), ("kill:rank=1,call=1,bytes=3", "bytes has no effect"),
    ("drop:rank=1,message=1,of=gossip", "of must be one of state, command, transition"),
    ("drop:rank=1,call=1,of=state", "of=state needs message=")])
def test_what_is_no_fault_is_refused(text, what):
    with pytest.raises(ConfigError, match=rf"^fault: {what}.* Write KIND:rank=R,call=N .*kill, stop, delay, slow, "):
        parse(text)


def test_a_fault_of_a_rank_that_is_not_there():
    with raises("malformed-fault", 0, 1, where="fault", value="drop:rank=2,message=1"):
        run_ranks(lambda world: faulty(world, [parse("drop:rank=2,message=1")]), 2)


def test_what_was_started_with_the_world_sees_that_ranks_are_lost():
    """A rank's end waits for all ranks of the world that it was started with, so that world must see that ranks are
    lost."""
    def sizes(world):
        kept = world
        faulty(world, [parse("kill:rank=0,call=1000000")]).change(InProcessWorld(1).backend(0), ("0",))
        return kept.size

    assert run_ranks(sizes, 2) == [1, 1]


# ---------------------------------------------------------------------- messages


def test_without_a_fault_nothing_changes():
    cases = [*conformance.MESSAGES, *conformance.COLLECTIVES]
    run_ranks(lambda world: conformance.run_cases(faulty(world, [parse("kill:rank=0,call=1000000")]), cases), 2)


def numbered(number: int, tensor: torch.Tensor) -> Message:
    return Message(MessageKind.FORWARD, 0, number, {"": tensor})


def sends(world: World, *faults: str, count: int = 6, size: int = 2) -> list:
    """On rank 1, the received messages of 0, 1, ... from rank 0; on rank 0, how long it took to send each."""
    world = faulty(world, [parse(fault) for fault in faults])
    transport, _ = everyone(world, "pipe")
    group = world.backend.group("data", [range(size)])
    group.barrier()
    taken = []
    if world.rank == 0:
        for number in range(count):
            began = time.monotonic()
            transport.send(1, numbered(number, torch.full((4,), float(number))))
            taken.append(time.monotonic() - began)
        transport.flush()
    group.barrier()
    if world.rank == 0:
        return taken
    arrived = []
    while (got := transport.wait(0.2)) is not None:
        arrived.append((got.microbatch, got.tensors[""].tolist()))
    return arrived


def numbers(arrived):
    return [number for number, _ in arrived]


@pytest.mark.parametrize(("fault", "arrived"), [
    ("drop:rank=0,message=1", [1, 2, 3]), ("drop:rank=0,message=3", [0, 1, 3]),
    ("drop:rank=0,call=3", [0, 2, 3]),  # the barrier is the first call
    ("drop:rank=0,call=1", [1, 2, 3]),  # a barrier cannot be dropped: the next message is
    ("drop:rank=1,message=1", [0, 1, 2, 3]), ("drop:rank=0,seconds=0", [1, 2, 3]),
    ("drop:rank=0,seconds=100", [0, 1, 2, 3])])
def test_one_message_is_dropped(fault, arrived):
    assert numbers(run_ranks(lambda world: sends(world, fault, count=4), 2)[1]) == arrived


@pytest.mark.parametrize(("fault", "arrived"), [
    ("drop:rank=0,message=2,of=state", [0, 1, 2, 4]), ("drop:rank=0,message=1,of=command", [0, 1, 2, 3, 4]),
    ("drop:rank=0,message=2,of=transition", [0, 1, 2, 4]), ("drop:rank=0,call=3,of=transition", [0, 1, 2, 3])])
def test_faults_that_are_aimed(fault, arrived):
    """Messages 1 and 3 carry state; a transition begins before message 2."""
    def work(world):
        world = faulty(world, [parse(fault)])
        transport, _ = everyone(world, "pipe")
        for number in range(5 if world.rank == 0 else 0):
            if number == 2:
                world.backend.subset(1)
            kind = MessageKind.STATE if number % 2 else MessageKind.FORWARD
            transport.send(1, replace(numbered(number, torch.zeros(1)), kind=kind))
        if world.rank == 1:
            world.backend.subset(1)
        world.backend.group("data", [range(2)]).barrier()
        return [] if world.rank == 0 else [message.microbatch for message in transport.poll()]

    assert run_ranks(work, 2)[1] == arrived


def test_several_faults_of_one_rank():
    _, arrived = run_ranks(lambda world: sends(world, "drop:rank=0,message=2", "drop:rank=0,message=4"), 2)
    assert numbers(arrived) == [0, 2, 4, 5]


def test_a_message_is_delayed():
    taken, arrived = run_ranks(lambda world: sends(world, "delay:rank=0,message=3,for=0.3"), 2)
    assert numbers(arrived) == list(range(6))
    assert taken[2] >= 0.3 and sum(taken) - taken[2] < 0.3


def test_from_a_message_on_all_are_slow():
    taken, arrived = run_ranks(lambda world: sends(world, "slow:rank=0,message=3,for=0.2"), 2)
    assert numbers(arrived) == list(range(6))
    assert max(taken[:2]) < 0.2 <= min(taken[2:])


def test_one_bit_of_one_message_is_flipped():
    _, arrived = run_ranks(lambda world: sends(world, "corrupt:rank=0,message=3,bit=63"), 2)
    changed = [pair for pair in arrived if pair[1] != [float(pair[0])] * 4]
    assert changed == [(2, [2.0, -2.0, 2.0, 2.0])]


def test_what_has_no_tensors_is_not_corrupted():
    def run(world):
        transport, _ = everyone(faulty(world, [parse("corrupt:rank=0,message=1,bit=31")]), "pipe")
        if world.rank == 0:
            transport.send(1, Message(MessageKind.CREDIT, 0, 0))
            transport.send(1, numbered(1, torch.ones(1)))
            transport.flush()
            return None
        assert receive(transport).tensors == {}
        return receive(transport).tensors[""].item()

    assert run_ranks(run, 2)[1] == -1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_flipping_changes_one_bit_of_a_copy(dtype):
    sent = Message(MessageKind.FORWARD, 0, 0, {
        "a": torch.arange(6).to(dtype).reshape(2, 3).T, "none": torch.empty(0), "b": torch.tensor(5).to(dtype)})
    before = [bits(tensor) for tensor in sent.tensors.values()]
    found = set()
    for bit in range(8 * sent.payload_bytes):
        after = [bits(tensor) for tensor in flip_bit(sent, bit).tensors.values()]
        assert [bits(tensor) for tensor in sent.tensors.values()] == before
        changed = [(name, place) for name, (old, new) in enumerate(zip(before, after, strict=True))
                   for place in range(len(old)) if old[place] != new[place]]
        assert len(changed) == 1
        found.update(changed)
    assert len(found) == 8 * sent.payload_bytes
    assert torch.equal(flip_bit(sent, 8 * sent.payload_bytes).tensors["a"], flip_bit(sent, 0).tensors["a"])


def bits(tensor):
    return [byte >> bit & 1 for byte in tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for bit in range(8)]


def damage_a_head(world: World) -> str:
    """Rank 0 sends a message with a wrong microbatch number, as if a bit had been flipped on the way. Returns rank 1's
    error."""
    encode = edges.encode
    transport, _ = everyone(world, "pipe")
    text = ""
    if world.rank == 0:
        edges.encode = lambda message: damaged(encode(message))
        transport.send(1, numbered(3, torch.ones(4)))
        transport.flush()
    else:
        try:
            text = f"arrived: {transport.wait(20.0)}"
        except TransportError as error:
            text = str(error)
    world.store.set(f"seen {world.rank}", text)
    return world.store.get(f"seen {1 - world.rank}").decode() or text


def damaged(wire):
    wire[9] ^= 1
    return wire


def say_and_fail(world: World) -> None:
    print(f"printed by {world.rank}")
    text = damage_a_head(world)
    if world.rank == 1:
        raise ValueError(text)


DAMAGED = re.compile(r"rank 0 on 'pipe': sent an invalid message \(got 'the header of this message was corrupted in "
                     r"transit'\)\. Install the same version")


@pytest.mark.slow
def test_a_damaged_head_is_a_clear_error_and_a_failing_process_is_shown_with_its_output():
    """Both in one pair of processes, which take long to start."""
    with pytest.raises(RanksFailed, match="rank 1 of 2") as failure:
        run_processes(f"{HERE}:say_and_fail", 2, "torch")
    text = str(failure.value)
    assert not failure.value.hung
    assert "ValueError: rank 0 on" in text and DAMAGED.search(text)
    assert "printed by 1" in text and "printed by 0" not in text


@pytest.mark.slow
@pytest.mark.parametrize("transport", [MPI])
def test_a_damaged_head_over_mpi(transport):
    assert all(map(DAMAGED.match, run_processes(f"{HERE}:damage_a_head", 2, transport)))


# ---------------------------------------------------------------------- memory, disk, processes


def test_an_allocation_fails_as_torchs_own_do():
    def run(world):
        world = faulty(world, [parse("allocation:rank=1,call=3")])
        group = world.backend.group("data", [range(2)])
        for count in range(4):
            try:
                group.all_reduce(torch.ones(1))
            except RuntimeError as error:
                assert is_out_of_memory(error)
                return count
        return None

    assert run_ranks(run, 2) == [None, 2]


def fill_a_disk(world: World, folder: str) -> list:
    faulty_world = faulty(world, [parse("disk:rank=0,call=1,bytes=100,for=0.5")])
    seen = []
    for name in ("before", "during", "after"):
        path = os.path.join(folder, name)
        try:
            with open(path, "wb", buffering=0) as file:
                seen.append(sum(file.write(bytes(60)) for _ in range(3)))
        except OSError as error:
            seen.append(error.strerror)
        if name == "before":
            faulty_world.backend.group("data", [range(1)]).barrier()
        else:
            time.sleep(0.7)
    return [*seen, resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY]


@pytest.mark.slow
def test_a_disk_is_full_for_a_while(tmp_path):
    ((before, during, after, restored),) = run_processes(f"{HERE}:fill_a_disk", 1, "torch", args=[str(tmp_path)])
    assert (before, during, after, restored) == (180, "File too large", 180, True)
    assert (tmp_path / "during").stat().st_size == 100


def meet(world: World, *faults: str) -> int:
    group = faulty(world, [parse(fault) for fault in faults]).backend.group("data", [range(world.size)])
    for _ in range(50):
        group.all_reduce(torch.ones(1)).wait()
        time.sleep(0.01)
    return 50


@pytest.mark.parametrize("moment", ["call=3", "seconds=0.05"])
def test_a_rank_is_told_to_die(monkeypatch, moment):
    """At that call, or by the clock also outside of calls, and only that rank."""
    told = []
    monkeypatch.setattr(os, "kill", lambda *asked: told.append(asked))
    assert run_ranks(lambda world: meet(world, f"kill:rank=1,{moment}"), 2) == [50, 50]
    assert told == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.slow
def test_a_rank_is_killed():
    began = time.monotonic()
    with pytest.raises(Exception, match=r"rank 0 of 2 .* failed"):
        run_processes(f"{HERE}:meet", 2, "torch", args=["kill:rank=1,call=3"], may_fail=[1])
    assert time.monotonic() - began < 50


# ---------------------------------------------------------------------- a run


def train(world: World, *faults: str, steps: int = 3, **options) -> list[float]:
    world = faulty(world, [parse(fault) for fault in faults])
    blocks, generator = [Plain() for _ in range(4)], torch.Generator().manual_seed(0)
    for parameter in (parameter for block in blocks for parameter in block.parameters()):
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    engine = ranvier.Engine(blocks, world, mesh=ranvier.Mesh(pipe=2), loss=squared,
                            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), timeout_seconds=1.0,
                            dtype=torch.float64,
                            **options)
    losses = [engine.train_batch(points([[1] * 4])[0]).loss for _ in range(steps)]
    engine.close()
    return losses


def test_a_late_message_changes_nothing():
    assert run_ranks(lambda world: train(world, "delay:rank=0,message=3,for=0.4"), 2) == run_ranks(train, 2)


def test_a_lost_message_ends_in_a_report_of_who_waits_for_whom():
    with raises("message-late"):
        run_ranks(lambda world: train(world, "drop:rank=0,message=4", pipeline=Pipeline(policy="gpipe", in_flight=4)),
                  2)


def test_memory_that_runs_out_in_a_step():
    with pytest.raises(RuntimeError, match=r"can't allocate memory|not enough memory") as caught:
        run_ranks(lambda world: train(world, "allocation:rank=1,message=6"), 2)
    assert is_out_of_memory(caught.value) and "on rank 1 of 2" in caught.value.__notes__


def test_a_flipped_bit_of_a_tensor_goes_unnoticed():
    """Flipped bits of tensors are not looked for: guards on losses and gradients find those that matter."""
    assert run_ranks(lambda world: train(world, "corrupt:rank=0,message=2,bit=62"), 2) != run_ranks(train, 2)


# ---------------------------------------------------------------------- the command


def command(*args, cwd=None):
    return subprocess.run([sys.executable, "-m", "ranvier.cli.faults", *map(str, args)], capture_output=True,
                          text=True, cwd=cwd, timeout=200, check=False)


@pytest.fixture
def tiny(tmp_path):
    return ["train", "gpt-tiny", *tiny_runs.flags(
        tmp_path, mesh__data=1, mesh__pipe=2, model__num_layers=1, batch__global_size=4, train__steps=200,
        train__sample_tokens=2, run_dir=tmp_path / "run")]


def test_the_command_refuses_what_is_no_fault():
    done = CliRunner().invoke(faults.command, ["--fault", "kill:rank=1", "--", "doctor"])
    assert done.exit_code == 2 and "Error: fault: needs exactly one of call" in done.stderr


def test_the_command_runs_any_other():
    done = CliRunner().invoke(faults.command, ["--fault", "kill:rank=1,call=1", "--", "--version"])
    assert (done.exit_code, done.stderr) == (0, "") and done.stdout.startswith("ranvier, version")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_a_command_whose_rank_is_killed(tiny, transport):
    """The command passes the faults to every rank."""
    done = command("--fault", "kill:rank=1,call=150", "--", *tiny, "--comm.transport", transport)
    assert done.returncode == 1
    assert "ranvier: rank 1 (data 0, pipe 1, row 0, col 0) was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_command_that_runs_out_of_memory(tiny):
    done = command("--fault", "allocation:rank=0,call=150", "--", *tiny, "--comm.transport", "torch")
    assert done.returncode == 2
    assert re.search(r"ranvier: error: rank 0: ran out of memory\npredicted memory, MiB:", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_a_command_whose_rank_hangs(tiny, transport):
    """The other rank names the rank that hangs, which is ended although it does not react to signals."""
    done = command("--fault", "stop:rank=1,message=60", "--", *tiny, "--comm.transport", transport,
                   "--comm.timeout-seconds", "3", "--launch.stopped-seconds", "0")
    assert done.returncode == 2
    assert re.search(r"comm.timeout-seconds: a message did not come\npipe 0 waits \d s for .* from pipe 1, which is ",
                     done.stderr), done.stderr
    assert not processes_with(tiny[-1])
