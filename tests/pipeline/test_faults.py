"""Messages for the user when a rank fails or a message never arrives, on in-process ranks."""

import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from ranvier.comm import board as boards_of_ranks
from ranvier.comm.board import EXIT_THREAD, Board, call_with_timeout, find_silent_ranks, read_actions
from ranvier.comm.message import MessageKind
from ranvier.config.run import Pipeline
from ranvier.errors import MessageTimeout, ModelError, RanvierError
from ranvier.mesh import Mesh
from tests.errors import raises
from tests.pipeline.parity import chain, on_mesh, points, share, squared
from tests.pipeline.test_unusual_blocks import Plain


class FailsAt(Plain):
    """Raises in the forward or the backward of the microbatch whose first number is 99."""

    def __init__(self, where):
        super().__init__()
        self._where = where

    def forward(self, x):
        y = super().forward(x)
        if (x[0, 0] > 50).item():
            if self._where == "forward":
                raise ValueError("no such thing")
            y = _FailsInBackward.apply(y)
        return torch.cat([x[:, :1], y[:, 1:]], 1)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no way back")


class Passes(Plain):
    def forward(self, x):
        return torch.cat([x[:, :1], super().forward(x)[:, 1:]], 1)


def marked(counts, number):
    """Points whose microbatch `number` on replica 0 makes `FailsAt` fail."""
    batches = points(counts)
    for one in (one for replica in batches for one in replica):
        one.inputs[:, 0] = 0.0
    batches[0][number].inputs[:, 0] = 99.0
    return batches


def train(make, batches, mesh, **options):
    on_mesh(make, mesh, lambda engine: engine.forward_backward(share(engine, batches)), **options)


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=3), Mesh(data=2, pipe=3)], ids=str)
def test_a_forward_that_raises(mesh):
    started = time.monotonic()
    with pytest.raises(ValueError, match="no such thing") as caught:
        train(partial(chain, Passes, partial(FailsAt, "forward"), Passes), marked([[1] * 4] * mesh.data, 2), mesh,
              pipeline=Pipeline(policy="1f1b"))
    assert time.monotonic() - started < 30.0, "the others must not wait for their timeouts"
    text = text_of(caught.value)
    assert "in block b1, forward of microbatch 2" in text
    actions = {1: "F0 B0 F1 B1 >F2<", 3: "F0 F1 B0 >F2<"}[mesh.pipe]
    assert f"actions so far: {actions}" in text
    if mesh.pipe > 1:
        assert f"{'data 0, ' if mesh.data > 1 else ''}pipe 1: actions so far" in text


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=3)], ids=str)
def test_a_backward_that_raises(mesh):
    with pytest.raises(ValueError, match="no way back") as caught:
        train(partial(chain, Passes, partial(FailsAt, "backward"), Passes), marked([[1] * 4], 1), mesh,
              pipeline=Pipeline(policy="1f1b"))
    text = text_of(caught.value)
    assert "in the backward of microbatch 1" in text
    assert re.search(r"actions so far: F0 (F1 )?(F2 )?B0 (F1|F2|F3) >B1<", text), text


def test_a_deferred_product_that_raises(monkeypatch):
    def broken(self, microbatch, product):
        raise ValueError("no product")

    monkeypatch.setattr("ranvier.tensor.weight_gradients.WeightGradients.run", broken)
    with pytest.raises(ValueError, match="no product") as caught:
        train(partial(chain, Plain, Plain), points([[1]]), Mesh(), pipeline=Pipeline(defer_bytes=1 << 30))
    assert "actions so far: F0 B0 >W0<" in text_of(caught.value)


def without_loss(outputs, targets):
    if (outputs[0, 0] > 50).item():
        raise ValueError("no loss")
    return squared(outputs, targets)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_a_loss_that_raises(mesh):
    with pytest.raises(ValueError, match="no loss") as caught:
        train(partial(chain, Passes, Passes, loss=without_loss), marked([[1] * 3], 1), mesh,
              pipeline=Pipeline(policy="gpipe"))
    text = text_of(caught.value)
    assert "in the loss of microbatch 1" in text and "actions so far: F0 >F1<" in text


def test_a_failure_of_ones_own_kind_keeps_its_words():
    """A RanvierError keeps its message, with the actions appended."""
    def wrong(outputs, targets):
        raise ModelError("is odd", where="loss", remedy="Even it out.")

    with pytest.raises(ModelError, match=r"^loss: is odd. Even it out.\n") as caught:
        train(partial(chain, Plain, Plain, loss=wrong), points([[1]]), Mesh(pipe=2))
    assert "pipe 1: actions so far: >F0<" in text_of(caught.value)


# ---------------------------------------------------------------------- messages that never come

def losing(kind, microbatch, then=lambda engine: None):
    """Returns a function that makes a rank's transport lose one message."""
    def prepare(engine):
        send = engine._connections.transport.send

        def sending(destination, message):
            if (message.kind, message.microbatch) != (kind, microbatch):
                send(destination, message)
        engine._connections.transport.send = sending
        then(engine)
    return prepare


def timeout(mesh, batches, prepare, seconds=0.5, make=None, **options):
    def work(engine):
        prepare(engine)
        engine.forward_backward(share(engine, batches))

    with pytest.raises(MessageTimeout) as caught:
        on_mesh(make or partial(chain, *[Plain] * 4), mesh, work, timeout_seconds=seconds, **options)
    return str(caught.value)


@pytest.fixture
def quick_board(monkeypatch):
    """A board that is updated ten times as often."""
    init = Board.__init__
    monkeypatch.setattr(Board, "__init__",
                        lambda self, store, rank, mesh, **options: init(self, store, rank, mesh, 0.1))


def test_a_forward_that_never_comes(quick_board):
    """`pipe 1 waits 31 s for the forward of microbatch 5 from pipe 0, which is in backward 2`, and all the others."""
    text = timeout(Mesh(pipe=2), points([[1] * 3]), losing(MessageKind.FORWARD, 2),
                   pipeline=Pipeline(in_flight=4, policy="gpipe"))
    assert text.startswith("Engine(timeout_seconds=...): a message did not come\n")
    assert re.search(r"\npipe 1 waits \d s for the forward of microbatch 2 from pipe 0, which is in a wait for the "
                     r"backward of microbatch 0 from pipe 1\n", text) or re.search(
        r"\npipe 0 waits \d s for the backward of microbatch 0 from pipe 1, which is in a wait for the forward of "
        r"microbatch 2 from pipe 0\n", text), text
    assert text.endswith("(got 0.5). Check which rank is behind, or raise Engine(timeout_seconds=...).")


def test_a_rank_with_adjacent_stages_waits_for_another_rank(quick_board):
    """pipe 1 has stages 1 and 2, which both wait for forward 0: stage 2 for that of stage 1."""
    text = timeout(Mesh(pipe=2), points([[1]]), losing(MessageKind.FORWARD, 0),
                   pipeline=Pipeline(stages_per_rank=2, placement="v-shape"))
    assert re.search(r"pipe 1 .*wait.* for the forward of microbatch 0 from pipe 0", text), text


def test_a_gap_between_messages_is_noticed_at_once():
    with raises("message-lost", 0, 1, 2):
        on_mesh(partial(chain, *[Plain] * 4), Mesh(pipe=2), lambda engine: (
            losing(MessageKind.FORWARD, 1)(engine), engine.forward_backward(share(engine, points([[1] * 3])))),
            pipeline=Pipeline(in_flight=3, policy="gpipe"))


def test_a_gap_between_returns_is_noticed_at_once():
    with raises("message-lost", 1, 0):
        on_mesh(partial(chain, *[Plain] * 4), Mesh(pipe=2), lambda engine: (
            losing(MessageKind.BACKWARD, 0)(engine), engine.forward_backward(share(engine, points([[1] * 3])))),
            pipeline=Pipeline(in_flight=3, policy="gpipe"))


def test_a_backward_that_never_comes(quick_board):
    text = timeout(Mesh(pipe=3), points([[1] * 2]), losing(MessageKind.BACKWARD, 1))
    assert re.search(r"pipe \d waits \d s for the backward of microbatch 1 from pipe \d, which is in ", text), text
    assert len(re.findall(r"^  pipe \d \(rank \d\): ", text, re.M)) == 2


def test_a_rank_that_computes_for_long(quick_board):
    """The report names the action that the rank computes."""
    sleeping = threading.Event()

    class Slow(Plain):
        def forward(self, x):
            sleeping.wait(2.0)
            return super().forward(x)

    try:
        text = timeout(Mesh(pipe=2), points([[1] * 3]), lambda engine: None, make=partial(chain, Slow, Plain))
    finally:
        sleeping.set()
    assert re.search(r"\npipe 1 waits \d s for the forward of microbatch 0 from pipe 0, which is in forward 0\n", text)


def test_a_tied_gradient_that_never_comes(quick_board):
    make = partial(chain, *[Plain] * 4, tied=(("b0.linear.weight", "b3.linear.weight"),))
    text = timeout(Mesh(pipe=2), points([[1] * 3]), losing(MessageKind.TIED_GRADIENT, 1), make=make)
    assert re.search(r"pipe 0 waits \d s for the gradient of tied parameter b0.linear.weight from pipe 1", text)


def test_a_tied_value_that_never_comes(quick_board):
    make = partial(chain, *[Plain] * 4, tied=(("b0.linear.weight", "b3.linear.weight"),))

    def work(engine):
        losing(MessageKind.TIED_VALUE, 0)(engine)
        for _ in range(2):
            engine.train_batch(share(engine, points([[1]])))

    with raises("message-late", "b0.linear.weight", 0):
        on_mesh(make, Mesh(pipe=2), work, timeout_seconds=0.5, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


# ---------------------------------------------------------------------- ranks that do not agree

def uneven(first, second, calls=1):
    """Different numbers of microbatches on the two stages of one replica."""
    def work(engine):
        for _ in range(calls):
            engine.forward_backward(share(engine, points([[1] * (first if engine.is_first_stage else second)])))

    on_mesh(partial(chain, Plain, Plain), Mesh(pipe=2), work, timeout_seconds=0.5, pipeline=Pipeline(in_flight=5))


@pytest.mark.parametrize(("first", "second", "calls"), [(2, 3, 1), (3, 2, 1), (3, 2, 2), (1, 0, 2), (0, 1, 1)])
def test_other_numbers_of_microbatches_on_two_stages(quick_board, first, second, calls):
    """One of the two ranks names the number, or the rank that it waits for; it never hangs or fails an assertion."""
    with pytest.raises(RanvierError) as caught:
        uneven(first, second, calls)
    text = str(caught.value)
    assert (f"has {second} microbatches here, but pipe 0 sends number {second}" in text
            or re.search(r"waits \d s for the", text) or "belongs to a batch that has ended here" in text), text


def test_names_of_ranks_on_the_board():
    """Only the axes that the mesh uses are named."""
    for mesh, rank, expected in [(Mesh(), 0, "rank 0"), (Mesh(pipe=2), 1, "pipe 1"), (Mesh(data=2), 1, "data 1"),
                                 (Mesh(data=2, pipe=2, col=2), 7, "data 1, pipe 1, col 1")]:
        board = Board(HashStore(), 0, mesh)
        assert board.name(rank) == expected
        board.close()


def test_ranks_that_say_nothing_any_more_are_told_from_busy_ones():
    """And from a rank that has not reported yet, since it may still be starting."""
    store = HashStore()
    boards = [Board(store, rank, Mesh(pipe=4), 0.05) for rank in range(3)]
    while len(read_actions(store, range(4))) < 3:
        time.sleep(0.01)
    assert find_silent_ranks(store, range(4), 0.4) == []
    boards[0].action = "backward 3"
    boards[1].close()
    assert find_silent_ranks(store, range(4), 0.4) == [1]
    assert read_actions(store, [0])[0][1] == "backward 3"
    for board in boards:
        board.close()


def test_calls_with_a_timeout_while_the_interpreter_shuts_down(monkeypatch):
    """Python 3.12 starts no thread during shutdown, so the thread for these calls must exist before."""
    def refuses(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    EXIT_THREAD.start()
    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert call_with_timeout(lambda: 3) == 3
    assert call_with_timeout(lambda: 1 // 0) is None
    assert call_with_timeout(lambda: time.sleep(0.5), 0.01) is None
    assert call_with_timeout(lambda: 4) == 4, "the call that took too long has ended"


def test_boards_that_nobody_closed_are_closed_before_the_interpreter_ends(monkeypatch):
    at_exit = []
    monkeypatch.setattr(boards_of_ranks, "_OPEN", weakref.WeakSet())
    monkeypatch.setattr(boards_of_ranks.atexit, "register", at_exit.append)
    one = Board(HashStore(), 0, Mesh(), 0.001)
    at_exit[-1]()
    assert not one._thread.is_alive()


@pytest.mark.slow
def test_boards_that_nobody_closed_do_not_bring_the_interpreter_down():
    """A thread inside a store's C++ code at interpreter shutdown would abort the process."""
    program = ("import time; from torch.distributed import HashStore; from ranvier.comm.board import Board\n"
               "from ranvier.mesh import Mesh\n"
               "boards = [Board(HashStore(), 0, Mesh(), 0.0002) for _ in range(40)]; time.sleep(0.1)\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Deaf:
    """A store behind a dead connection."""

    def __init__(self):
        self.ended = threading.Event()

    def check(self, names):
        self.ended.wait(60)

    set = get = lambda self, *args: self.check([])


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("ranvier.comm.board._STORE_SECONDS", 0.2)
    store = Deaf()
    began = time.monotonic()
    board = Board(store, 0, Mesh(pipe=2), 0.05)
    assert call_with_timeout(store.get, 0.2) is None and find_silent_ranks(store, [1], 0.1) is None
    assert "from pipe 1, which is not heard from: the store cannot be reached\n" in board.report("news", 1, 3.0)
    assert time.monotonic() - began < 20
    store.ended.set()
    board.close()


def test_no_thread_is_left_when_engines_are_closed():
    before = {thread for thread in threading.enumerate() if thread.name.startswith("ranvier")}
    on_mesh(partial(chain, Plain, nn.Tanh), Mesh(pipe=2), lambda engine: None)
    assert {thread for thread in threading.enumerate() if thread.name.startswith("ranvier")} <= before


def test_an_engine_that_a_program_loses_leaves_no_thread():
    """As in a notebook in which a failed cell is run again."""
    lost = []

    def lose(engine):
        lost.append(engine._connections.board._thread)
        engine.close = lambda: None

    on_mesh(partial(chain, Plain, nn.Tanh), Mesh(pipe=2), lose)
    gc.collect()
    for thread in lost:
        thread.join(60)
    assert len(lost) == 2 and not any(thread.is_alive() for thread in lost)
