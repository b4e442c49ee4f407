"""Messages of which each column sends a part: gradients, bytes, and the messages that are sent in full."""

from functools import partial

import pytest
import torch

from ranvier.comm.message import Message, MessageKind
from ranvier.config.run import Memory, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline import connections
from ranvier.pipeline.connections import ColumnParts
from tests.pipeline.parity import frozen
from tests.tensor.split_parity import SCHEMES, assert_parity, gradients_on, on_tensor_mesh, tiny_gpt, token_batches

BETWEEN_NODES = Mesh(pipe=2, col=2)


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(ColumnParts, "_is_worthwhile", lambda parts, destination: True)
    monkeypatch.setattr(connections, "SMALLEST_IN_PARTS", 64)


def received(engine):
    return engine._connections.bytes_received_by_axis


@pytest.mark.parametrize(("mesh", "options", "is_frozen"), [
    (BETWEEN_NODES, {"pipeline": Pipeline(policy="gpipe")}, True),
    pytest.param(Mesh(pipe=2, col=4), {"memory": Memory(recompute=1)}, False, marks=pytest.mark.slow),
    (Mesh(data=2, pipe=2, col=2), {"pipeline": Pipeline(stages_per_rank=2)}, False)],
    ids=["gpipe, frozen", "recomputed", "two stages a rank"])
def test_gradients_are_those_of_whole_messages(in_parts, mesh, options, is_frozen):
    """Frozen blocks return no gradients, and send credits."""
    def make():
        model = tiny_gpt(num_layers=3, dropout=0.0)
        return frozen(model, lambda name: name.startswith(("embedding", "layer0"))) if is_frozen else model

    assert_parity(make, token_batches(mesh, count=3), mesh, scheme="megatron", **options)


def test_a_stage_receives_half_over_two_columns_and_the_other_half_from_its_column(monkeypatch):
    make, batches = partial(tiny_gpt, num_layers=2, dropout=0.0), token_batches(BETWEEN_NODES, count=3)
    found = []
    monkeypatch.setattr(connections, "SMALLEST_IN_PARTS", 64)
    for pays in (False, True):
        monkeypatch.setattr(ColumnParts, "_is_worthwhile", lambda parts, destination, pays=pays: pays)
        counts = gradients_on(make, batches, BETWEEN_NODES, scheme="megatron", also=received).others
        found.append([(count()["pipe"], count()["col"]) for count in counts])
    for (whole, before), (half, after) in zip(*found, strict=True):
        assert 0 < half == whole // 2 and after - before == half


@pytest.mark.parametrize("scheme", ["megatron", "stationary", "sequence"])
def test_what_is_small_or_split_or_no_activation_is_sent_whole(in_parts, scheme):
    def work(mesh):
        parts = ColumnParts(mesh, BETWEEN_NODES, None)
        activation, tiny = torch.arange(24.0).view(2, 12), torch.ones(2)
        state = {"x": activation, "tiny": tiny, "odd": torch.ones(9, 3), "ids": torch.ones(64, dtype=torch.int64),
                 "heads|columns share dim 1 of 24": activation}
        message = Message(MessageKind.FORWARD, 1, 0, state, frozenset({"x", "odd"}))
        sent = parts.cut(message, 2)
        assert parts.cut(Message(MessageKind.TIED_VALUE, 1, 0, state), 2).tensors is state
        cut = [name for name in sent.tensors if name not in state]
        assert len(cut) == (scheme == "megatron") and sent.requires_grad == {"odd", *(cut or ["x"])}
        if cut:
            assert torch.equal(sent.tensors[cut[0]], activation.flatten()[12 * mesh.col:12 * mesh.col + 12])
        assert connections.whole_names(sent.requires_grad) == {"x", "odd"}
        whole = parts.gather(sent.tensors)
        assert list(whole) == list(state) and all(torch.equal(whole[name], state[name]) for name in state)

    on_tensor_mesh(1, 2, SCHEMES[scheme], work)
