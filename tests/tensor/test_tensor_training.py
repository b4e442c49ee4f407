"""Steps on a tensor mesh equal those of one process with torch's optimizers, also sharded, offloaded or clipped."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import Model
from ranvier.config.run import Optim
from ranvier.config.run import TensorParallel as Settings
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import layers
from ranvier.testing.reference import Reference
from tests.covering import chosen, first, quick
from tests.pipeline.parity import frozen
from tests.tensor.split_parity import (
    SEED,
    assemble,
    assert_close,
    every,
    on_mesh,
    share,
    tiny_gpt,
    token_batches,
    weights_of,
)

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
RUNS = [(Mesh(row=2, col=2), "stationary"), (Mesh(row=2, col=2), "summa"), (Mesh(row=2, col=3), "stationary"),
        (Mesh(row=2, col=3), "summa"), (Mesh(col=2), "megatron"), (Mesh(col=4), "sequence")]
SPREAD = [(Mesh(data=2, row=2), "stationary"), (Mesh(data=2, row=2, col=2), "summa"),
          (Mesh(data=2, pipe=2, row=2), "stationary"), (Mesh(data=2, col=2), "sequence"),
          (Mesh(data=2, col=2), "megatron")]


def optim(**options):
    return Optim(**{"weight_decay": 0.1, "bucket_size": 300, "chunk_buckets": 2, **options})


def trained(make, batches, clip_norm=0.0, optimizer=ADAMW):
    """Losses, norms and the reference after one step for each of `batches`."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    trainable = [parameter for parameter in reference.parameters.values() if parameter.requires_grad]
    optimizer = optimizer(trainable)
    losses, norms = [], []
    for batch in batches:
        losses.append(reference.forward_backward(every(batch)))
        norms.append(float(nn.utils.clip_grad_norm_(trainable, clip_norm or 1e30)))
        optimizer.step()
    return losses, norms, reference


def assert_trains(make, mesh, *, steps=2, clip_norm=0.0, count=2, tolerance=1e-8, **options):
    """Check losses, norms and all weights after `steps`; copies on several ranks are bit-identical."""
    batches = [token_batches(mesh, count=count, seed=seed) for seed in range(steps)]
    losses, norms, reference = trained(make, batches, clip_norm)

    def work(engine):
        results = [(engine.train_batch(share(engine, batch)), weights_of(engine)) for batch in batches]
        return ([result.loss for result, _ in results], [result.grad_norm for result, _ in results],
                [weights for _, weights in results], engine.layout)

    found, found_norms, weights, layouts = zip(*on_mesh(make, mesh, work, learning_rate=1e-2, **options), strict=True)
    for step in range(steps):
        whole = assemble([of_rank[step] for of_rank in weights], layouts[0])
    assert all(mine == pytest.approx(losses, rel=1e-9) for mine in found)
    assert all(mine == pytest.approx(norms, rel=1e-8) for mine in found_norms), "before clipping"
    assert_close(whole, reference.parameters, tolerance)


@pytest.mark.parametrize(("mesh", "scheme"), quick(1, RUNS), ids=str)
def test_steps_equal_torchs(mesh, scheme):
    assert_trains(tiny_gpt, mesh, scheme=scheme, optim=optim())


@pytest.mark.parametrize("mesh", quick(1, [Mesh(row=2, col=2), Mesh(data=2, row=2, col=2)]), ids=str)
def test_steps_with_a_users_optimizer(mesh):
    assert_trains(tiny_gpt, mesh, optimizer=ADAMW)


@pytest.mark.parametrize(("mesh", "scheme", "options"), chosen(
    [(Mesh(data=2, row=2), "stationary", {"shard": True, "offload": "stream"})],
    SPREAD, [{"shard": True}, {"shard": True, "offload": "stream"}, {"offload": "host"}]), ids=str)
def test_states_that_are_sharded_or_offloaded(mesh, scheme, options):
    assert_trains(tiny_gpt, mesh, scheme=scheme, optim=optim(**options))


@pytest.mark.parametrize(("mesh", "scheme", "options"), chosen(
    [(Mesh(row=2, col=2), "stationary", {"update_in_backward": True}), (Mesh(col=2), "megatron", {"offload": "host"}),
     (Mesh(row=2, col=2), "summa", {"offload": "stream"})],
    RUNS, [{"offload": "stream"}, {"offload": "host"}, {"update_in_backward": True}]), ids=str)
def test_states_on_one_replica(mesh, scheme, options):
    assert_trains(tiny_gpt, mesh, count=1, scheme=scheme, optim=optim(**options))


@pytest.mark.parametrize(("clip_norm", "mesh", "scheme", "shard"), chosen(
    [(0.05, Mesh(row=2, col=2), "stationary", False)],
    [0.05, 1e6], [*((*run, False) for run in RUNS), *((*run, True) for run in SPREAD)]), ids=str)
def test_clipping_by_the_global_norm_is_torchs(clip_norm, mesh, scheme, shard):
    assert_trains(tiny_gpt, mesh, scheme=scheme, clip_norm=clip_norm,
                  optim=optim(clip_norm=clip_norm, shard=shard))


@pytest.mark.parametrize(("mesh", "scheme", "bucket_size", "shard"), chosen([
    (Mesh(data=2, col=2), "megatron", 50, False)], [
    (Mesh(data=2, col=2), "megatron", 50), (Mesh(data=2, col=2), "megatron", 7), (Mesh(data=2, col=2), "sequence", 50),
    (Mesh(data=2, row=2, col=2), "stationary", 50), (Mesh(data=2, row=2), "summa", 50)], [False, True]), ids=str)
def test_copies_stay_the_same_to_the_bit_however_updates_are_cut(mesh, scheme, bucket_size, shard):
    """torch's fused kernels round the last few elements of a piece differently, so all ranks with copies must cut the
    same pieces."""
    assert_trains(tiny_gpt, mesh, count=1, scheme=scheme, optim=optim(bucket_size=bucket_size, shard=shard))


@pytest.mark.parametrize("mesh", quick(1, [Mesh(row=2), Mesh(row=2, col=2), Mesh(pipe=2, row=2, col=2)]), ids=str)
def test_weights_that_are_kept_are_those_of_the_step(mesh):
    """Gathered weights are outdated as soon as the weights change."""
    assert_trains(tiny_gpt, mesh, settings=Settings(keep_weights=True), optim=optim())


def test_kept_weights_follow_what_is_written_into_parameters():
    """As when a checkpoint is loaded after a batch and then evaluated."""
    mesh, batches = Mesh(row=2, col=2), token_batches(Mesh(row=2, col=2))

    def work(engine, settings):
        before = engine.evaluate(share(engine, batches)).loss
        with torch.no_grad():
            for parameter in engine.named_parameters().values():
                parameter.mul_(1.5)
        return before, engine.evaluate(share(engine, batches)).loss

    kept, plain = (on_mesh(tiny_gpt, mesh, partial(work, settings=settings), settings=settings)
                   for settings in (Settings(keep_weights=True), Settings()))
    assert [one[1] for one in kept] == pytest.approx([one[1] for one in plain], rel=1e-12)


@pytest.mark.parametrize(("mesh", "scheme"), first(
    [(Mesh(col=2), "sequence")],
    [(Mesh(row=2, col=2), "stationary"), (Mesh(row=2, col=2), "summa"), (Mesh(col=2), "sequence"),
     (Mesh(data=2, row=2), "stationary")]), ids=str)
def test_partly_frozen(mesh, scheme):
    assert_trains(lambda: frozen(tiny_gpt(), lambda name: name.startswith(("embedding", "layer0.mlp"))), mesh,
                  scheme=scheme, optim=optim())


@pytest.mark.parametrize("mesh", first([Mesh(data=2, row=2)], [Mesh(row=2, col=2), Mesh(data=2, row=2)]), ids=str)
def test_gradients_and_their_step_apart(mesh):
    batches = [token_batches(mesh, seed=seed) for seed in range(2)]

    def work(engine, apart):
        for batch in batches:
            if apart:
                engine.step(engine.forward_backward(share(engine, batch)))
            else:
                engine.train_batch(share(engine, batch))
        return weights_of(engine)

    one, two = (on_mesh(tiny_gpt, mesh, partial(work, apart=apart), learning_rate=1e-2, optim=optim(clip_norm=0.05))
                for apart in (False, True))
    for mine, theirs in zip(one, two, strict=True):
        assert_close(mine, theirs, 1e-12)


# ---------------------------------------------------------------------- half precision

@pytest.mark.parametrize(("mesh", "scheme", "dtype", "options"), first([
    (Mesh(col=2), "sequence", torch.bfloat16, {"accumulate": "half"}),
    (Mesh(row=2), "stationary", torch.float16, {"offload": "host"})], [
    (Mesh(row=2), "stationary", torch.float16, {"offload": "host"}),
    (Mesh(row=2, col=2), "stationary", torch.bfloat16, {}),
    (Mesh(row=2, col=2), "summa", torch.bfloat16, {"accumulate": "half", "offload": "stream"}),
    (Mesh(col=2), "megatron", torch.bfloat16, {}), (Mesh(col=2), "sequence", torch.bfloat16, {"accumulate": "half"}),
    (Mesh(data=2, row=2), "stationary", torch.bfloat16, {"shard": True, "reduce_dtype": "fp32"}),
    (Mesh(row=2, col=2), "stationary", torch.float16, {"offload": "host"})]), ids=str)
def test_half_precision_follows_the_reference(mesh, scheme, dtype, options):
    assert_half_precision(tiny_gpt, mesh, scheme, dtype, options)


def assert_half_precision(make, mesh, scheme, dtype, options):
    """Master weights are fp32; copies stay bit-identical."""
    batches = [token_batches(mesh, seed=seed) for seed in range(6)]
    losses, norms, _ = trained(make, batches, optimizer=partial(ADAMW, lr=1e-3))

    def work(engine):
        results = [engine.train_batch(share(engine, batch)) for batch in batches]
        return ([result.loss for result in results], [result.grad_norm for result in results], weights_of(engine),
                engine.layout)

    found, found_norms, weights, layouts = zip(*on_mesh(make, mesh, work, scheme=scheme, dtype=dtype,
                                                        learning_rate=1e-3, optim=optim(**options),
                                                        nominal_weight=24.0 * mesh.data * mesh.row), strict=True)
    assemble(weights, layouts[0])
    assert all(mine == pytest.approx(losses, rel=0.01) for mine in found)
    assert all(mine == pytest.approx(norms, rel=0.05) for mine in found_norms)


class Ids(nn.Module):
    """Token 0 has 2000 in its first feature, token 1 has ones."""

    def __init__(self):
        super().__init__()
        self.token = layers.Embedding(2, 8)
        self.token.weight.data = torch.ones(2, 8)
        self.token.weight.data[0, 0] = 2000.0
        self.token.weight.requires_grad_(False)

    def forward(self, ids):
        return self.token(ids)


class Pair(nn.Module):
    """Two products; the second uses only the first feature of the first."""

    def __init__(self):
        super().__init__()
        self.fc1 = layers.Linear(8, 8, bias=False, stationary="output")
        self.fc2 = layers.Linear(8, 8, bias=False, stationary="input")
        self.fc1.weight.data.fill_(1e-3)
        self.fc2.weight.data.fill_(0.0)[:, 0] = 0.5

    def forward(self, x):
        return self.fc2(self.fc1(x))


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = layers.ClassifierHead(8, 2)
        self.head.weight.data.fill_(0.5)
        self.head.bias.data.fill_(0.1)

    def forward(self, x):
        return self.head(x)


def overflowing():
    return Model(blocks={"ids": Ids, "pair": Pair, "scores": Scores},
                 loss=lambda scores, targets: (scores.sum(), float(len(scores))))


@pytest.mark.parametrize(("mesh", "options"), chosen(
    [(Mesh(row=2, col=2), {}), (Mesh(data=2, row=2, col=2), {"offload": "stream"})],
    [Mesh(row=2, col=2), Mesh(data=2, row=2, col=2), Mesh(pipe=2, row=2, col=2)],
    [{}, {"offload": "stream"}, {"clip_norm": 1e6}, {"shard": True}]), ids=str)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(mesh, options):
    """In the second batch the gradient of one element of fc1 exceeds fp16, in which gradients accumulate here; only
    rank (0, 0) has that element."""
    def work(engine):
        seen = []
        for token in (1, 0, 1, 1):
            before = weights_of(engine)
            result = engine.train_batch([Microbatch(torch.full((2, 1), token), torch.zeros(2))])
            changed = [name for name, value in weights_of(engine).items() if not torch.equal(value, before[name])]
            seen.append((result.overflow, engine.loss_scale.scale, bool(changed)))
        return seen

    found = on_mesh(overflowing, mesh, work, dtype=torch.float16, learning_rate=1e-3, nominal_weight=2.0,
                    optim=Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, bucket_size=3,
                                initial_loss_scale=128.0, loss_scale_window=2, accumulate="half", **options))
    for seen in found:
        assert [overflow for overflow, _, _ in seen] == [False, True, False, False]
        assert [scale for _, scale, _ in seen] == [128.0, 64.0, 64.0, 128.0]
        assert not seen[1][2]
    assert all(any(seen[step][2] for seen in found) for step in (0, 2, 3))
