"""Any mesh loads what any other mesh has saved: all state is bit-identical, and training continues without a
difference."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.manifest import Saved
from ranvier.config.run import Optim, TensorParallel
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.anywhere import CONFIG, LLAMA, assert_same, engine_on, everything, on, train
from tests.covering import first, quick
from tests.pipeline.parity import frozen

MESHES = [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(data=3), Mesh(row=2), Mesh(pipe=4), Mesh(col=2),
          Mesh(data=2, pipe=2),
          Mesh(row=2, col=2), Mesh(data=4), Mesh(data=2, row=2), Mesh(pipe=2, col=2), Mesh(data=2, pipe=2, col=2),
          Mesh(pipe=3), Mesh(data=2, pipe=2, row=2), Mesh(col=4), Mesh(row=2, col=4)]
WAYS = [{}, {"shard": True}, {"offload": "stream"}, {"offload": "stream", "shard": True}, {"offload": "host"},
        {"offload": "host", "shard": True}, {"offload": "hybrid"}, {"offload": "hybrid", "shard": True},
        {"algorithm": "sgd", "shard": True}]
DTYPES = [torch.bfloat16, torch.float32]


def round_trip(tmp_path, first, second, *, before=None, after=None, dtype=torch.float32):
    """Save on one mesh, load on another, and save there."""
    def save(engine):
        train(engine, 2)
        checkpoints = Checkpoints(engine, tmp_path / "first")
        checkpoints.save({"samples": 16})
        assert [(one.step, one.error) for one in checkpoints.wait()] == [(2, None)]

    def load(engine):
        loaded = Checkpoints(engine, tmp_path / "first").load()
        assert (loaded.step, loaded.about["samples"], engine.steps) == (2, 16, 2)
        again = Checkpoints(engine, tmp_path / "second")
        again.save()
        assert [one.error for one in again.wait()] == [None]

    on(first, save, dtype=dtype, **(before or {}))
    on(second, load, dtype=dtype, **(after or before or {}))
    saved = everything(tmp_path / "first" / "step-2")
    assert_same(saved, everything(tmp_path / "second" / "step-2"))
    return saved


@pytest.mark.parametrize("way", quick(1, ["stream", "none", "host"]))
def test_between_a_hybrid_placement_and_another(tmp_path, way):
    for number, (before, after) in enumerate((("hybrid", way), (way, "hybrid"))):
        round_trip(tmp_path / str(number), Mesh(data=2), Mesh(pipe=2), before={"offload": before, "shard": True},
                   after={"offload": after, "offload_share": 0.8}, dtype=torch.bfloat16)


@pytest.mark.parametrize("number", first([0, 13], range(len(MESHES))))
def test_around_all_meshes_and_ways(tmp_path, number):
    """Every mesh saves and loads, with offloading and sharding on one side or both."""
    ways = [way for way in WAYS if "algorithm" not in way]
    saved = round_trip(tmp_path, MESHES[number], MESHES[(number + 5) % len(MESHES)],
                       before=ways[number % len(ways)], after=ways[number // 2 % len(ways)],
                       dtype=DTYPES[number % 2])
    kinds = {kind for kind, _ in saved}
    assert kinds == {"parameter", "exp_avg", "exp_avg_sq"} | ({"master"} if number % 2 == 0 else set())


@pytest.mark.parametrize(("first", "second"), [
    (Mesh(col=4), Mesh(pipe=2, row=2)), pytest.param(Mesh(pipe=2, col=2), Mesh(data=2, col=4), marks=pytest.mark.slow)],
    ids=str)
def test_a_llama_whose_heads_of_keys_columns_share(tmp_path, first, second):
    """Each of four columns holds both heads of keys; each of two columns holds one."""
    round_trip(tmp_path, first, second, before={"model": llama(LLAMA)}, after={"model": llama(LLAMA), "shard": True})


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MESHES, 2)), ids=str)
def test_every_mesh_to_every_other(tmp_path, first, second):
    number = MESHES.index(first) * len(MESHES) + MESHES.index(second)
    way = WAYS[number % len(WAYS)]
    other = way if "algorithm" in way else WAYS[number // 7 % 6]
    round_trip(tmp_path, first, second, before=way, after=other, dtype=DTYPES[number % 2])


def halves(tmp_path, first, second, *, before=None, after=None, **options):
    """Losses of four steps on `first`, and of four of which the last two follow a checkpoint, on `second`."""
    def whole(engine):
        return train(engine, 4)

    def start(engine):
        losses = train(engine, 2)
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        train(engine, 1)  # must not change the checkpoint that is being written
        checkpoints.wait()
        return losses

    def rest(engine):
        train(engine, 1)  # the load must replace any earlier state
        Checkpoints(engine, tmp_path).load()
        return train(engine, 2)

    reference = on(first, whole, **options, **(before or {}))[0]
    return reference, (on(first, start, **options, **(before or {}))[0]
                       + on(second, rest, **options, **(after or before or {}))[0])


@pytest.mark.parametrize(("mesh", "options"), [*first([
    (Mesh(), {"dtype": torch.float16})], [
    (Mesh(), {"dtype": torch.float16}), (Mesh(row=2), {"dtype": torch.bfloat16}),
    (Mesh(data=2, pipe=2), {"dtype": torch.bfloat16, "shard": True}),
    (Mesh(data=2), {"offload": "stream", "clip_norm": 0.1}), (Mesh(pipe=2), {"offload": "host"}),
    (Mesh(row=2, col=2), {"shard": True}), (Mesh(data=2, row=2), {"dtype": torch.bfloat16, "shard": True}),
    (Mesh(col=2), {"scheme": "megatron"}), (Mesh(data=2), {"algorithm": "sgd"})]),
    (Mesh(pipe=2), {"clip_norm": 0.01, "clip_from": "previous-step"})], ids=str)
def test_on_the_same_mesh_to_the_bit(tmp_path, mesh, options):
    whole, resumed = halves(tmp_path, mesh, mesh, **options)
    assert whole == resumed


@pytest.mark.parametrize(("first", "second"), quick(1, [
    (Mesh(data=2, pipe=2), Mesh(pipe=3)), (Mesh(pipe=2), Mesh(row=2, col=2)), (Mesh(row=2, col=2), Mesh(data=3)),
    (Mesh(), Mesh(data=2, pipe=2, col=2)), (Mesh(data=4), Mesh())]), ids=str)
def test_on_another_mesh_to_rounding(tmp_path, first, second):
    whole, resumed = halves(tmp_path, first, second, dtype=torch.float64,
                            before={"shard": True}, after={"offload": "host"})
    assert resumed == pytest.approx(whole, rel=1e-9)


def test_in_another_precision_from_the_masters(tmp_path):
    """bf16 parameters are rounded: fp32 continues from the master copies, which were updated."""
    def save(engine):
        train(engine, 2)
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()

    def load(engine):
        Checkpoints(engine, tmp_path).load()
        return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}

    on(Mesh(), save, dtype=torch.bfloat16)
    saved = Saved(tmp_path / "step-2")
    for name, parameter in on(Mesh(), load, dtype=torch.float32)[0].items():
        assert torch.equal(parameter, saved.read("master", name))
        assert torch.equal(parameter.bfloat16(), saved.read("parameter", name))


def test_a_users_own_optimizer(tmp_path):
    """States of torch's AdamW, including its step counts."""
    def run(world, mesh, steps, *, save=False, load=False):
        engine = Engine(gpt(CONFIG, dtype=torch.float64), world, mesh=mesh, seed=3, dtype=torch.float64,
                        optimizer=partial(torch.optim.AdamW, lr=1e-2))
        checkpoints = Checkpoints(engine, tmp_path)
        if load:
            checkpoints.load()
        losses = train(engine, steps)
        if save:
            checkpoints.save()
            checkpoints.wait()
        engine.close()
        return losses

    whole = run_ranks(lambda world: run(world, Mesh(data=2), 4), 2)[0]
    first = run_ranks(lambda world: run(world, Mesh(data=2), 2, save=True), 2)[0]
    rest = run_ranks(lambda world: run(world, Mesh(pipe=3), 2, load=True), 3)[0]
    assert first + rest == pytest.approx(whole, rel=1e-9)


class Counting(nn.Module):
    """A block with a buffer and torch's own dropout."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(self.linear(x), 0.5)


def test_buffers_and_torchs_own_generator(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(Counting(), nn.Linear(4, 1))

    def run(world, steps, *, save=False, load=False):
        engine = Engine(model(), world, loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()), optim=Optim(),
                        learning_rate=1e-2)
        checkpoints = Checkpoints(engine, tmp_path)
        torch.manual_seed(7 if not load else 8)
        if load:
            checkpoints.load()
        x = torch.ones(4, 4)
        losses = [engine.train_batch([(x, x[:, :1])]).loss for _ in range(steps)]
        if save:
            checkpoints.save()
            checkpoints.wait()
        return losses, int(engine.named_buffers()["0.calls"])

    (whole, count), = run_ranks(lambda world: run(world, 4), 1)
    (first, _), = run_ranks(lambda world: run(world, 2, save=True), 1)
    (rest, counted), = run_ranks(lambda world: run(world, 2, load=True), 1)
    assert (first + rest, counted) == (whole, count)


def test_frozen_parameters_stay_frozen(tmp_path):
    """Parameters that were frozen from the start have no state; those frozen later keep theirs."""
    def model(dtype=torch.float32):
        return frozen(gpt(CONFIG, dtype=dtype), lambda name: name.startswith("embedding.position"))

    def save(engine):
        train(engine, 1)
        for name, parameter in engine.named_parameters().items():
            if name.startswith("layer0"):
                parameter.requires_grad_(False)
        train(engine, 1)
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()
        return train(engine, 2)

    def load(engine):
        Checkpoints(engine, tmp_path).load()
        trained = {name for name, parameter in engine.named_parameters().items() if parameter.requires_grad}
        assert not any(name.startswith(("layer0", "embedding.position")) for name in trained)
        return train(engine, 2)

    def load_frozen(engine):
        engine.named_parameters()["layer1.mlp.fc1.bias"].requires_grad_(False)
        with pytest.warns(UserWarning, match=r"1 parameter that .*, such as layer1\.mlp\.fc1\.bias, stay frozen"):
            Checkpoints(engine, tmp_path).load()

    expected = on(Mesh(data=2, pipe=2), save, model=model())
    manifest = Saved(tmp_path / "step-2").manifest
    assert "embedding.position.weight" in manifest.frozen and "layer0.mlp.fc1.bias" in manifest.frozen
    assert on(Mesh(data=2, pipe=2), load, model=model())[0] == expected[0]
    assert on(Mesh(), load)[0] == pytest.approx(expected[0], rel=1e-5)  # built with everything trainable
    on(Mesh(), load_frozen)


@pytest.mark.parametrize("mesh", quick(1, [Mesh(col=2), Mesh(row=2, col=2)]), ids=str)
def test_ties_whose_ends_are_cut_differently(tmp_path, mesh):
    tied = partial(gpt, CONFIG, dtype=torch.float64)
    whole, resumed = halves(tmp_path, mesh, Mesh(pipe=2), dtype=torch.float64, model=tied())
    assert resumed == pytest.approx(whole, rel=1e-9)


def test_weights_that_a_column_keeps_are_gathered_anew(tmp_path):
    def rank(world):
        engine = engine_on(world, Mesh(row=2))
        kept = Engine(gpt(CONFIG), world, mesh=Mesh(row=2), seed=3, optim=Optim(),
                      tensor=TensorParallel(keep_weights=True), nominal_weight=64.0)
        train(kept, 1)
        checkpoints = Checkpoints(kept, tmp_path)
        checkpoints.save()
        checkpoints.wait()
        expected = train(kept, 2)
        checkpoints.load()
        again = train(kept, 2)
        for one in (engine, kept):
            one.close()
        return expected, again

    for expected, again in run_ranks(rank, 2):
        assert expected == again
