"""Our own optimizer on every mesh: equal to torch's, whether offloaded, sharded, clipped or skipped."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Guard, Memory, Optim, Pipeline
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.optim.loss_scale import LossScale
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import chosen, covering, label, pairwise, quick
from tests.errors import raises
from tests.pipeline.parity import IGNORED, SEED, chain, frozen, on_mesh, points, share, small_gpt, squared, tokens
from tests.pipeline.test_parity import of_blocks, residuals
from tests.pipeline.test_training import assert_same_weights, batch_of, three_ends, weights

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
MESHES = [Mesh(), Mesh(pipe=3), Mesh(data=3), Mesh(data=2, pipe=2)]


def optim(**options):
    return Optim(**{"weight_decay": 0.1, "bucket_size": 30, "chunk_buckets": 2, **options})


def partly_frozen():
    return frozen(residuals(), of_blocks(0, 1, 4, 7))


@pytest.mark.parametrize(("make", "mesh", "offload", "shard"), quick(6, pairwise(
    [small_gpt, three_ends, partly_frozen], MESHES,
    [("none", False), ("none", True), ("stream", True), ("host", False)])), ids=label)
def test_steps_equal_those_of_torch(make, mesh, offload, shard):
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=ADAMW)
    batches = [batch_of(make, mesh, seed) for seed in range(2)]
    expected = [reference.train_batch([one for replica in batch for one in replica]) for batch in batches]

    def work(engine):
        results = [engine.train_batch(share(engine, batch)) for batch in batches]
        return [result.loss for result in results], [result.grad_norm for result in results], weights(engine)

    losses, norms, parameters = zip(*on_mesh(make, mesh, work, optim=optim(offload=offload, shard=shard),
                                             learning_rate=1e-2), strict=True)
    assert all(loss == pytest.approx(expected, rel=1e-12) for loss in losses)
    assert all(norm == pytest.approx(norms[0], rel=1e-14) for norm in norms)
    assert_same_weights(parameters, reference, mesh)


@pytest.mark.parametrize(("mesh", "clip_norm", "shard"), chosen(
    [(Mesh(pipe=3), 0.01, True), (Mesh(data=2, pipe=2), 0.01, False)],
    MESHES, [(0.01, False), (1e6, True), (0.01, True), (1e6, False)]), ids=str)
def test_clipping_by_the_global_norm_is_torchs(mesh, clip_norm, shard):
    """The norm over all stages, with each parameter counted once, including the tied one."""
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    optimizer = ADAMW(reference.parameters.values())
    batches = [batch_of(small_gpt, mesh, seed) for seed in range(2)]
    norms = []
    for batch in batches:
        reference.forward_backward([one for replica in batch for one in replica])
        norms.append(float(nn.utils.clip_grad_norm_(list(reference.parameters.values()), clip_norm)))
        optimizer.step()

    def work(engine):
        found = [engine.train_batch(share(engine, batch)).grad_norm for batch in batches]
        return found, weights(engine)

    found, parameters = zip(*on_mesh(small_gpt, mesh, work, optim=optim(clip_norm=clip_norm, shard=shard),
                                     learning_rate=1e-2), strict=True)
    assert all(norm == pytest.approx(norms, rel=1e-12) for norm in found), "before clipping"
    assert_same_weights(parameters, reference, mesh)


@pytest.mark.parametrize("options", quick(1, [
    {"optim": optim(clip_norm=0.01)}, {"optim": optim()}, {"optim": optim(shard=True, offload="stream")},
    {"optim": optim(clip_norm=0.01), "optimizer": ADAMW}]))
def test_gradients_and_their_step_apart(options):
    """forward_backward gives full, unclipped gradients; step does the rest of train_batch."""
    mesh, batch = Mesh(data=2, pipe=2), batch_of(small_gpt, Mesh(data=2), 0)
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    reference.forward_backward([one for replica in batch for one in replica])
    expected = reference.gradients()

    def work(engine, apart):
        if not apart:
            engine.train_batch(share(engine, batch))
            return weights(engine)
        result = engine.forward_backward(share(engine, batch))
        for name, gradient in engine.gradients().items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)
        engine.step(result)
        return weights(engine)

    one, two = (on_mesh(small_gpt, mesh, partial(work, apart=apart), learning_rate=1e-2, **options)
                for apart in (False, True))
    for mine, theirs in zip(one, two, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-13, atol=1e-15)


def test_a_batch_without_a_valid_target_updates_nothing():
    def work(engine):
        before = weights(engine)
        result = engine.train_batch(share(engine, tokens([[2], [1]], ignored=1.0)))
        assert not result.stepped and not result.overflow and engine.flat_optimizer.steps == 0
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())

    with pytest.warns(UserWarning, match="step 1 is skipped: no valid target in the global batch"):
        on_mesh(small_gpt, Mesh(data=2), work, optim=optim())


@pytest.mark.parametrize(("optimizer", "guard"), [
    (None, Guard(bad_step="skip")), (partial(torch.optim.SGD, lr=0.1), None)], ids=("own", "torchs"))
def test_a_step_without_a_target_leaves_the_norm_by_which_the_next_one_is_clipped(optimizer, guard):
    sgd = {} if optimizer else {"algorithm": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    batches = [points([[2]], seed=seed) for seed in range(3)]
    batches[1][0][0].targets.fill_(IGNORED)

    def work(engine):
        norms, before = [], []
        for batch in batches:
            norms.append(engine.train_batch(share(engine, batch)).grad_norm)
            before.append({name: value.detach().clone() for name, value in engine.named_parameters().items()})
        moved = sum((one - before[1][name]).square().sum() for name, one in before[2].items()).sqrt()
        return norms, float(moved), engine.last_norm

    with pytest.warns(UserWarning, match="step 2 is skipped"):
        (norms, moved, last), = on_mesh(
            lambda: chain(lambda: nn.Linear(4, 4)), Mesh(), work, guard=guard, optimizer=optimizer,
            optim=Optim(clip_norm=0.01, clip_from="previous-step", **sgd))
    assert moved == pytest.approx((0.1 if optimizer else 1e-3) * norms[2] * 0.01 / norms[0], rel=1e-4)
    assert last == pytest.approx(norms[2])


def test_groups_that_fit_nothing_are_refused():
    with raises("parameter-group-without-match", "typo:1:0"):
        on_mesh(small_gpt, Mesh(), lambda engine: None, optim=optim(groups=("*.bias:1:0", "typo:1:0")))


def test_a_stage_without_trainable_parameters():
    model = partial(lambda: frozen(residuals(), of_blocks(0, 1, 2, 3)))
    on_mesh(model, Mesh(data=2, pipe=2), lambda engine: engine.train_batch(share(engine, points([[1, 2], [2]]))).loss,
            optim=optim(offload="stream", shard=True), pipeline=Pipeline(boundaries=(4,)))


# ---------------------------------------------------------------------- half precision

class Grow(nn.Module):
    """y = x w, so that the gradient of w is the sum of the inputs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.w


def grows(world, values, mesh, **options):
    """Train two blocks in fp16 on inputs of these values; returns overflows, scales and weights, and skipped steps."""
    engine = Engine(chain(Grow, Grow, loss=lambda output, targets: (output.sum(), 4.0)), world, mesh=mesh,
                    dtype=torch.float16, learning_rate=0.1, nominal_weight=4.0,
                    optim=Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, bucket_size=3, **options))
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(1.0)
    seen = []
    for value in values:
        own = value if engine.coordinates.data == 0 else 1.0
        result = engine.train_batch([Microbatch(torch.full((1, 4), own, dtype=torch.float16), torch.zeros(1))])
        assert result.stepped != result.overflow
        seen.append((result.overflow, engine.loss_scale.scale, float(engine.parameters()[0][0].detach())))
    scale = engine.loss_scale
    engine.close()
    return seen, scale.skipped_steps


@pytest.mark.parametrize(("mesh", "options"), covering(
    [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)],
    [{}, {"shard": True}, {"offload": "stream", "accumulate": "half"}, {"reduce_dtype": "fp32"}, {"clip_norm": 1e6}]),
    ids=str)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(mesh, options):
    """The second batch overflows on replica 0 alone."""
    options = {"initial_loss_scale": 8.0, "loss_scale_window": 2, **options}
    outcomes = run_ranks(partial(grows, values=[1.0, 60000.0, 1.0, 1.0], mesh=mesh, **options), mesh.size)
    for seen, skipped in outcomes:
        assert [overflow for overflow, _, _ in seen] == [False, True, False, False] and skipped == 1
        assert [scale for _, scale, _ in seen] == [8.0, 4.0, 4.0, 8.0], "halved, and doubled after two good steps"
        values = [value for _, _, value in seen]
        assert values[0] == values[1] != values[2] != values[3]


def test_loss_scale():
    scale = LossScale(scale=4.0, window=3)
    for overflow in (False, False, True, False, False, False, False):
        scale.update(overflow)
    assert (scale.scale, scale.good_steps, scale.skipped_steps) == (4.0, 1, 1)
    for _ in range(100):
        scale.update(True)
    assert scale.scale == 2.0**-14 and scale.skipped_steps == 101


@pytest.mark.parametrize(("mesh", "options", "dtype"), chosen(
    [(Mesh(), {"offload": "host", "reduce_dtype": "fp32"}, torch.float16)],
    [Mesh(data=2), Mesh(data=2, pipe=2), Mesh()],
    [{}, {"accumulate": "half"}, {"offload": "stream", "shard": True}, {"offload": "host", "reduce_dtype": "fp32"}],
    [torch.bfloat16, torch.float16]), ids=str)
def test_half_precision_follows_fp32(mesh, options, dtype):
    """Losses over 6 steps stay near those of fp32."""
    batches = [tokens([[4]] * mesh.data, seed=seed) for seed in range(6)]
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64, optimizer=ADAMW)
    expected = [reference.train_batch([one for replica in batch for one in replica]) for batch in batches]

    def rank(world):
        engine = Engine(small_gpt(), world, mesh=mesh, seed=SEED, dtype=dtype, learning_rate=1e-2,
                        nominal_weight=24.0 * mesh.data, optim=optim(**options))
        losses = [engine.train_batch(share(engine, batch)).loss for batch in batches]
        engine.close()
        return losses

    for losses in run_ranks(rank, mesh.size):
        assert losses == pytest.approx(expected, rel=0.02)


# ---------------------------------------------------------------------- update in backward

@pytest.mark.parametrize(("make", "mesh", "checkpoint", "options"), quick(5, pairwise(
    [small_gpt, three_ends, partly_frozen], MESHES,
    [("none", {}), (2, {"offload": "stream", "shard": True}), ("none", {"offload": "host"})])), ids=label)
def test_updates_in_the_backward_equal_those_after_it(make, mesh, checkpoint, options):
    batches = [(tokens if make is small_gpt else points)([[2]] * mesh.data, seed=seed) for seed in range(2)]
    assert_norms_and_weights(make, mesh, batches, checkpoint, update_in_backward=True, **options)


def assert_norms_and_weights(make, mesh, batches, checkpoint, **options):
    """Compare norms and weights after a step with each batch. options: of `Optim`."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=ADAMW)
    norms = []
    for batch in batches:
        reference.train_batch([one for replica in batch for one in replica])
        norms.append(sum(float((gradient ** 2).sum()) for gradient in reference.gradients().values()) ** 0.5)

    def work(engine):
        return [engine.train_batch(share(engine, batch)).grad_norm for batch in batches], weights(engine)

    found, parameters = zip(*on_mesh(make, mesh, work, optim=optim(**options), learning_rate=1e-2,
                                     memory=Memory(recompute=checkpoint)), strict=True)
    assert all(norm == pytest.approx(norms, rel=1e-10) for norm in found)
    assert_same_weights(parameters, reference, mesh)


class Split(nn.Module):
    """Makes a state of two tensors from one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return {"x": self.a(x), "t": self.b(x)}


class Carry(nn.Module):
    """Passes one tensor on unchanged, and also uses it if `uses`."""

    def __init__(self, uses):
        super().__init__()
        self.a, self.uses = nn.Linear(4, 4), uses

    def forward(self, state):
        return {"x": torch.tanh(self.a(state["x"])) + (state["t"] if self.uses else 0.0), "t": state["t"]}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, state):
        return self.a(state["x"])


@pytest.mark.parametrize(("mesh", "uses", "checkpoint", "options"), pairwise(
    [Mesh(), Mesh(data=2), Mesh(pipe=2)], [True, False], ["none", 1, 2],
    [{}, {"update_in_backward": True}, {"update_in_backward": True, "shard": True}]), ids=str)
def test_states_of_several_tensors(mesh, uses, checkpoint, options):
    """Boundaries whose tensors get their gradients at different times, late, or never."""
    make = partial(chain, Split, *[partial(Carry, uses)] * 3, Join)
    batches = [points([[2]] * mesh.data, seed=seed) for seed in range(2)]
    assert_norms_and_weights(make, mesh, batches, checkpoint, **options)


@pytest.mark.parametrize("accumulate", ["fp32", "half"])
def test_gradients_that_autograd_makes_early_are_widened(accumulate):
    """Also in bf16, where a new gradient has another dtype than its place in the buffer."""
    def rank(world, **options):
        engine = Engine(chain(Split, *[partial(Carry, True)] * 3, Join), world, seed=SEED, dtype=torch.bfloat16,
                        learning_rate=1e-2, optim=optim(accumulate=accumulate, **options))
        engine.train_batch([Microbatch(inputs=torch.ones(2, 4, dtype=torch.bfloat16), targets=torch.zeros(2, 4))])
        return weights(engine)

    one, two = (run_ranks(partial(rank, update_in_backward=early), 1)[0] for early in (False, True))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("options", [{}, {"offload": "stream"}, {"offload": "host", "shard": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_loaded_later_stay(dtype, options):
    """Master copies follow values that are written into parameters; others keep their bits below the parameter's."""
    def rank(world):
        engine = Engine(chain(Grow, Grow, loss=squared), world, dtype=dtype, learning_rate=1e-3, optim=optim(
            algorithm="sgd", momentum=0.0, weight_decay=0.0, **options))
        batch = [(torch.ones(2, 4, dtype=dtype), torch.ones(2, 4))]
        for _ in range(3):
            engine.train_batch(batch)
        kept = [{name: state.clone() for name, state in one.states.items()} for one in engine.flat_optimizer.slices()
                if one.parameter == "b0.w"]
        with torch.no_grad():
            engine.named_parameters()["b1.w"].fill_(5.0)
        engine.learning_rate = 0.0
        engine.train_batch(batch)
        assert torch.equal(engine.named_parameters()["b1.w"], torch.full((4,), 5.0, dtype=dtype))
        now = [one.states for one in engine.flat_optimizer.slices() if one.parameter == "b0.w"]
        assert all(torch.equal(new["master"], old["master"]) for new, old in zip(now, kept, strict=True)
                   if "master" in new)
        engine.close()
        assert engine.named_parameters()["b0.w"].grad is None and engine.parameters()[0].grad_dtype is dtype

    run_ranks(rank, 2)


def test_fp16_gradients_are_not_unscaled_in_fp16():
    def rank(world, **options):
        engine = Engine(chain(Grow, loss=squared), world, dtype=torch.float16, **options)
        engine.forward_backward([(torch.ones(2, 4, dtype=torch.float16), torch.zeros(2, 4))])

    with raises("half-accumulation-in-fp16"):
        run_ranks(partial(rank, optim=optim(accumulate="half")), 1)
    run_ranks(partial(rank, optim=optim()), 1)


def test_one_block_of_gradients_at_a_time():
    """The buffer is as large as the largest block; tied gradients keep places of their own."""
    def work(engine):
        engine.train_batch(share(engine, tokens([[2]])))
        assert all(parameter.grad is None for name, parameter in engine.named_parameters().items() if "layer" in name)
        return len(engine._updater.gradients.flat), engine._updater.gradients.size

    (small, whole), = on_mesh(small_gpt, Mesh(), work, optim=optim(update_in_backward=True))
    mlp, tied, all_of_them = 2 * 8 * 32 + 32 + 8 + 16, 13 * 8, 3 * (2 * 8 * 32 + 56 + 4 * 64 + 48) + 13 * 8 + 6 * 8 + 16
    assert (small, whole) == (mlp + tied, all_of_them)


@pytest.mark.parametrize(("options", "message"), [
    ({"optim": optim(update_in_backward=True, clip_norm=1.0)}, "cannot clip by a norm"),
    ({"optim": optim(update_in_backward=True), "optimizer": ADAMW}, "needs Ranvier's own optimizer")])
def test_what_update_in_backward_cannot_do(options, message):
    with pytest.raises(ConfigError, match=rf"Optim\(update_in_backward=...\): {message}"):
        on_mesh(small_gpt, Mesh(), lambda engine: None, **options)


def test_update_in_backward_is_for_one_microbatch_of_ones_own_format():
    def work(engine):
        with raises("in-backward-batch", "Optim"):
            engine.train_batch(share(engine, tokens([[1, 1]])))
        with raises("in-backward-keeps-no-gradients", "Optim"):
            engine.forward_backward(share(engine, tokens([[1]])))

    on_mesh(small_gpt, Mesh(), work, optim=optim(update_in_backward=True))
    with raises("in-backward-loss-scale"):
        run_ranks(lambda world: Engine(small_gpt(), world, dtype=torch.float16,
                                       optim=optim(update_in_backward=True)), 1)


@pytest.mark.parametrize("setting", [dict(algorithm="sgd"), dict(shard=True), dict(offload="stream"),
                                     dict(weight_decay=0.5)], ids=label)
def test_settings_of_our_optimizer_beside_one_of_torch_are_told(setting):
    with pytest.warns(UserWarning, match=f"{next(iter(setting))}=...\\) has no effect with optimizer="):
        on_mesh(small_gpt, Mesh(), weights, optimizer=ADAMW, optim=Optim(**setting))


@pytest.mark.parametrize("known", [True, False])
def test_muon_without_layers_is_told(known):
    """It cannot distinguish embeddings and heads from other matrices."""
    model = small_gpt() if known else replace(small_gpt(), layers=())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_mesh(lambda: model, Mesh(), lambda engine: None, optim=Optim(algorithm="muon"))
    assert any("embeddings and heads" in str(one.message) for one in told) is not known


def test_an_optimizer_of_another_model_is_told():
    """It would update the other model and not this one; or it has copies, which it writes back."""
    other = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="has none of the parameters"):
        on_mesh(small_gpt, Mesh(pipe=2), weights, optimizer=lambda _: ADAMW(other.parameters()))
