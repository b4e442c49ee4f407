"""State that moves from layout to layout during a run does not change what the run computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ranvier.checkpoint.state import pieces_held
from ranvier.comm.inprocess import InProcessTransport
from ranvier.comm.message import MessageKind
from ranvier.config.run import Optim, Pipeline, TensorParallel
from ranvier.data.lm import Sequences
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.elastic import transition
from ranvier.elastic.freezing import FrozenLayers
from ranvier.elastic.transition import hand_over, take
from ranvier.layout import box_size
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.pipeline.engine import Engine
from ranvier.testing.faults import flip_bit
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, LLAMA, SEED, TOKENS
from tests.covering import covering, quick
from tests.errors import raises

HAND_OVER_SECONDS = 30.0
SAMPLES = Sequences(TOKENS, CONFIG.sequence)
MESHES = [Mesh(data=data, pipe=pipe, row=row, col=col) for data in (1, 2, 4) for pipe in (1, 2, 4) for row in (1, 2)
          for col in (1, 2) if data * pipe * row * col <= 4]
NUM_BLOCKS = 2 + 2 * CONFIG.num_layers


class Layouts:
    """One run on `world`, whose engine moves from mesh to mesh; ranks that a mesh does not use are idle. frozen: a
    number of layers, or FrozenLayers."""

    def __init__(self, world, mesh, *, frozen=0, boundaries=None, per_rank=1, placement="v-shape", **options):
        self.world, self.options = world, {name: value for name, value in options.items() if name != "model"}
        self.placement = placement
        self.model = options.get("model") or gpt(CONFIG, dtype=options.get("dtype", torch.float64))
        self.engine = self.backend = None
        self.moved = []
        self.build(mesh, frozen, boundaries, per_rank)

    def build(self, mesh, frozen, boundaries, per_rank=1):
        self.backend = self.world.backend.subset(mesh.size)
        if self.backend is not None:
            here = replace(self.world, backend=self.backend, mesh=mesh)
            frozen = frozen if isinstance(frozen, FrozenLayers) else FrozenLayers(frozen)
            options = {"dtype": torch.float64, "optim": Optim(bucket_size=64, chunk_buckets=2), **self.options}
            self.engine = Engine(self.model, here, mesh=mesh, seed=SEED, learning_rate=1e-2, frozen=frozen.prefix,
                                 frozen_above=frozen.above, nominal_weight=float(GLOBAL_SIZE * CONFIG.sequence),
                                 pipeline=Pipeline(boundaries=boundaries, stages_per_rank=per_rank,
                                                   placement=self.placement), **options)

    def move(self, mesh, frozen=0, boundaries=None, per_rank=1):
        held = None
        if self.engine is not None:
            held = take(self.engine)
            self.engine.close()
            self.backend.close()
        self.engine = None
        self.build(mesh, frozen, boundaries, per_rank)
        self.moved.append(hand_over(held, self.engine, self.world.backend, timeout_seconds=HAND_OVER_SECONDS))

    def step(self, step):
        if self.engine is None:
            return None
        mesh, at = self.engine.mesh, self.engine.coordinates
        loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=2,
                        replica=at.data, num_replicas=mesh.data, part=at.row, num_parts=mesh.row,
                        needs_inputs=self.engine.is_first_stage, needs_targets=self.engine.is_last_stage)
        assert self.engine.steps == step
        result = self.engine.train_batch(loader.microbatches(step))
        return result.loss, result.grad_norm

    def close(self):
        if self.engine is not None:
            self.engine.close()
            self.backend.close()


def trained(meshes, steps=2, size=4, freezing=None, cuts=None, per_rank=None, **options):
    """Losses and norms of `steps` steps on each mesh, and the bytes moved. steps: for each mesh, or one number for all.
    For each mesh, freezing: frozen layers; cuts: boundaries (None: by cost); per_rank: stages of a rank."""
    per_rank = per_rank or [1] * len(meshes)
    counts = [steps] * len(meshes) if isinstance(steps, int) else steps
    depths, cuts = freezing or [0] * len(meshes), cuts or [None] * len(meshes)

    def work(world):
        layouts, found, done = Layouts(world, meshes[0], frozen=depths[0], boundaries=cuts[0], per_rank=per_rank[0],
                                       **options), [], 0
        for number, mesh in enumerate(meshes):
            if number:
                layouts.move(mesh, depths[number], cuts[number], per_rank[number])
            found += [layouts.step(done + each) for each in range(counts[number])]
            done += counts[number]
        layouts.close()
        return found, layouts.moved

    results = run_ranks(work, size, timeout_seconds=120.0)
    return results[0][0], results[0][1], results


def assert_same_runs(one, other, tolerance=1e-12):
    for (loss, norm), (other_loss, other_norm) in zip(one, other, strict=True):
        assert loss == pytest.approx(other_loss, rel=tolerance)
        assert norm == pytest.approx(other_norm, rel=10 * tolerance)


@pytest.mark.parametrize(("mesh", "optim", "dtype"), quick(1, covering(
    [Mesh(data=4), Mesh(data=2, pipe=2), Mesh(pipe=4), Mesh(row=2, col=2), Mesh(pipe=2, col=2)],
    [Optim(bucket_size=64, offload="stream"), Optim(bucket_size=64), Optim(bucket_size=64, shard=True, clip_norm=0.1),
     Optim(algorithm="sgd", clip_norm=0.01, clip_from="previous-step"),
     Optim(bucket_size=64, offload="host", shard=True)],
    [torch.bfloat16, torch.float64, torch.float32, torch.float16])))
def test_a_transition_that_changes_nothing_changes_no_bit(mesh, optim, dtype):
    """Such a transition also moves nothing."""
    plain, moved, _ = trained([mesh] * 2, steps=[1, 1], optim=optim, dtype=dtype)
    assert moved == [0]

    def uninterrupted(world):
        layouts = Layouts(world, mesh, optim=optim, dtype=dtype)
        found = [layouts.step(step) for step in range(2)]
        layouts.close()
        return found

    assert plain == run_ranks(uninterrupted, 4, timeout_seconds=60.0)[0]


class Counting(torch.nn.Linear):
    """Its number of calls is extra state, not a buffer; it also has a complex buffer, as rotary embeddings do."""

    def __init__(self):
        super().__init__(2, 2, dtype=torch.float64)
        self.calls = 0
        self.register_buffer("turn", torch.tensor(1j))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        """The state has another shape after each call, and another number format after the first."""
        return torch.full((self.calls,), 0.5) if self.calls else torch.tensor(0)

    def set_extra_state(self, state):
        assert bool((state == 0.5).all())
        self.calls = len(state)


def test_extra_states_and_complex_buffers_go_along():
    """Each rank has its own modules, as processes do."""
    def work(world):
        layouts = Layouts(world, Mesh(pipe=2), model=[Counting() for _ in range(2)], optim=Optim(),
                          loss=lambda y, t: (y.sum(), float(len(y))))
        with torch.no_grad():
            for layer in layouts.engine.blocks.values():
                layer.turn.mul_(2)
        layouts.engine.train_batch([(torch.ones(1, 2, dtype=torch.float64), torch.zeros(1))] * 3)
        layouts.move(Mesh(data=2))
        found = [(layer.calls, layer.turn.item()) for layer in layouts.engine.blocks.values()]
        layouts.close()
        return found

    assert run_ranks(work, 2, timeout_seconds=60.0) == [[(3, 2j)] * 2] * 2


def test_what_does_not_leave_a_rank_in_time(monkeypatch):
    monkeypatch.setattr(InProcessTransport, "flush", lambda self, seconds=None: seconds != HAND_OVER_SECONDS)
    with raises("transition-send-late", where="transition", value=f"{HAND_OVER_SECONDS:g} s"):
        trained([Mesh(pipe=2), Mesh(data=2)], steps=1, size=2)


@st.composite
def ways(draw):
    """Meshes and, on each, steps (perhaps none), boundaries (None: by cost) and frozen layers."""
    meshes = draw(st.lists(st.sampled_from(MESHES), min_size=2, max_size=3))
    steps = [draw(st.integers(0, 1)) for _ in meshes]
    cuts = [draw(st.none() | st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=mesh.pipe - 1, max_size=mesh.pipe - 1,
                                      unique=True).map(lambda cut: tuple(sorted(cut)))) for mesh in meshes]
    depths = st.lists(st.integers(0, CONFIG.num_layers), min_size=len(meshes), max_size=len(meshes)).map(sorted)
    return meshes, steps, cuts, draw(st.none() | depths)


@settings(max_examples=4, deadline=None)
@given(ways(), st.sampled_from([False, True]), st.sampled_from(["none", "stream", "hybrid"]))
@example(([Mesh(pipe=2), Mesh(data=2)], [0, 2], [(1,), None], None), True, "none")  # before any step
def test_any_way_through_layouts_is_the_run_without(way, shard, offload):
    meshes, steps, cuts, freezing = way
    optim = Optim(bucket_size=64, chunk_buckets=2, shard=shard, offload=offload)
    found, _, results = trained(meshes, steps, freezing=freezing, cuts=cuts, optim=optim)
    if freezing is None:
        expected, _, _ = trained([Mesh()], steps=sum(steps), size=1)
    else:
        expected, _, _ = trained([Mesh()] * len(meshes), steps, size=1, freezing=freezing)
    assert_same_runs([each for each in found if each], expected)
    for rank, (told, _) in enumerate(results):  # ranks that a mesh does not use are idle, and come back
        assert [each is not None for each in told] == [
            rank < mesh.size for mesh, count in zip(meshes, steps, strict=True) for _ in range(count)]


@pytest.mark.parametrize(("placement", "freezing", "optim"), quick(1, covering(["v-shape", "interleaved"], [
    ([0, 0, 1, 1, 2], Optim(bucket_size=64, offload="stream")),
    (None, Optim(bucket_size=64, shard=True, clip_norm=0.1))])), ids=str)
def test_several_stages_on_a_rank(placement, freezing, optim):
    """Ranks get more and fewer stages, and replicas; embedding and head are tied, on one rank or on two."""
    meshes = [Mesh(pipe=2), Mesh(data=2, pipe=2), Mesh(pipe=2), Mesh(pipe=4), Mesh(pipe=2, col=2)]
    found, moved, _ = trained(meshes, steps=1, freezing=freezing, per_rank=[3, 2, 1, 1, 2], placement=placement,
                              cuts=[None, (1, 2, 5), None, None, None], optim=optim)
    expected, _, _ = trained([Mesh()] * 5, steps=1, size=1, freezing=freezing, optim=optim)
    assert_same_runs(found, expected)
    assert all(moved)


def held_after(meshes, **options):
    """What each rank holds on the last mesh, after a step on each of the others, and what moved."""
    def work(world):
        layouts = Layouts(world, meshes[0], **options)
        for number, mesh in enumerate(meshes[1:]):
            layouts.step(number)
            layouts.move(mesh)
        found = {} if layouts.engine is None else {
            (piece.kind, piece.name, piece.box): piece.tensor.clone() for piece in pieces_held(layouts.engine)}
        layouts.close()
        return found, layouts.moved

    return run_ranks(work, 4, timeout_seconds=120.0)


@pytest.mark.parametrize(("message_bytes", "round_bytes"), quick(1, [(1000, 3000), (50, 200)]))
def test_large_boxes_travel_in_pieces_and_many_of_them_in_rounds(monkeypatch, message_bytes, round_bytes):
    """Also if one index is larger than a message or a round should be: a row of most weights has 64 bytes, of others
    256."""
    meshes = [Mesh(pipe=4), Mesh(data=2, pipe=2), Mesh(row=2, col=2), Mesh(data=3)]
    optim = Optim(bucket_size=64, chunk_buckets=2, shard=True)
    whole = held_after(meshes, optim=optim)
    in_pieces, in_rounds = transition._split_move, transition._rounds
    pieces, rounds = [], []

    def cut(move, item_bytes):
        found = list(in_pieces(move, item_bytes))
        for piece in found:
            assert box_size(piece.box) * item_bytes <= message_bytes or piece.box[0][1] - piece.box[0][0] == 1
        pieces.append(len(found))
        return iter(found)

    def dealt(moves, source):
        found = list(in_rounds(moves, source))
        assert [entry for part in found for entry in part] == list(enumerate(moves))
        for part in found:
            for rank in range(4):
                sizes = [source.size_bytes(move) for _, move in part if rank == move.source != move.destination]
                assert sum(sizes) <= round_bytes or sum(size > 0 for size in sizes) == 1
        rounds.append(len(found))
        return iter(found)

    for name, value in (("MESSAGE_BYTES", message_bytes), ("ROUND_BYTES", round_bytes), ("_split_move", cut),
                        ("_rounds", dealt)):
        monkeypatch.setattr(transition, name, value)
    parts = held_after(meshes, optim=optim)
    assert max(pieces) > 2 and min(rounds) > 2
    for (one, moved), (other, also_moved) in zip(whole, parts, strict=True):
        assert moved == also_moved and one.keys() == other.keys()
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    assert {kind for kind, _, _ in whole[0][0]} >= {"parameter", "exp_avg", "exp_avg_sq"} and not whole[3][0]


def test_layers_that_freeze_on_the_way_are_the_frozen_ones_of_one_process():
    meshes, freezing = [Mesh(pipe=4), Mesh(data=2, pipe=2), Mesh(data=4)], [0, 1, 2]
    found, moved, results = trained(meshes, steps=1, freezing=freezing)
    expected, _, _ = trained([Mesh(), Mesh(), Mesh()], steps=1, size=1, freezing=freezing)
    assert_same_runs(found, expected)
    assert all(other == moved for _, other in results) and all(bytes_ > 0 for bytes_ in moved), "the same on every rank"


def test_what_is_frozen_travels_as_it_is():
    """Read from the engines themselves, as two runs that lose the same state would agree."""
    def parameters(engine):
        return {} if engine is None else {piece.name: piece.tensor.detach().clone()
                                          for piece in pieces_held(engine) if piece.kind == "parameter"}

    def work(world):
        layouts = Layouts(world, Mesh(pipe=2), frozen=1)
        layouts.step(0)
        before = parameters(layouts.engine)
        layouts.move(Mesh(), frozen=1)
        after = parameters(layouts.engine)
        layouts.close()
        return before, after

    (first, whole), (second, _) = run_ranks(work, 2, timeout_seconds=60.0)
    before = first | second
    assert before.keys() == whole.keys() and any(name.startswith("layer0") for name in before)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in before.items())


def test_a_users_own_optimizer_comes_along():
    def optimizer(parameters):
        return torch.optim.Adam(parameters, lr=1e-2)

    found, _, _ = trained([Mesh(pipe=2), Mesh(data=2), Mesh(pipe=2, data=2)], steps=1, optim=None, optimizer=optimizer)
    expected, _, _ = trained([Mesh()], steps=3, size=1, optim=None, optimizer=optimizer)
    assert_same_runs(found, expected)


@pytest.mark.slow
def test_schemes_of_the_tensor_mesh():
    expected, _, _ = trained([Mesh()], steps=3, size=1)
    for scheme in ("summa", "megatron"):
        found, _, _ = trained([Mesh(pipe=2), Mesh(col=2), Mesh(pipe=2, col=2)], steps=1,
                              tensor=TensorParallel(scheme=scheme))
        assert_same_runs(found, expected)


class Meddling:
    """A backend that replaces or drops its rank's first message of the state."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change
        self.name, self.rank, self.size, self.group, self.close = (
            inner.name, inner.rank, inner.size, inner.group, inner.close)

    def subset(self, count):
        inner = self.inner.subset(count)
        return inner and Meddling(inner, self.change)

    def transport(self, purpose, *, on_host=False):
        transport = self.inner.transport(purpose, on_host=on_host)
        send, done = transport.send, []

        def meddled(destination, message):
            changed = message
            if message.kind is MessageKind.STATE and not done:
                done.append(True)
                changed = self.change(message)
            if changed is not None:
                send(destination, changed)

        transport.send = meddled
        return transport


def moved_under(change):
    def work(world):
        layouts = Layouts(world, Mesh(pipe=2))
        layouts.step(0)
        layouts.world = replace(world, backend=Meddling(world.backend, change) if world.rank == 1 else world.backend)
        layouts.move(Mesh(data=2))

    run_ranks(work, 2, timeout_seconds=60.0)


def test_a_bit_that_changes_on_its_way_is_seen():
    with raises("invalid-message"):
        moved_under(lambda message: flip_bit(message, 12345))


def test_a_message_that_does_not_come_is_missed(monkeypatch):
    monkeypatch.setitem(globals(), "HAND_OVER_SECONDS", 0.5)
    with raises("transition-receive-late", 1):
        moved_under(lambda message: None)


@pytest.mark.slow
def test_a_llama_moves_between_columns_that_share_heads_of_keys_and_others():
    model = llama(LLAMA, dtype=torch.float64)
    meshes = [Mesh(col=4), Mesh(row=2, col=2), Mesh(col=4)]
    found, moved, _ = trained(meshes, steps=1, model=model)
    assert len(moved) == 2
    assert_same_runs(found, trained([Mesh()], steps=3, size=1, model=model)[0])
