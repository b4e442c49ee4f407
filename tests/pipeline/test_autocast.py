"""An engine under autocast computes what a loop in plain PyTorch under torch.autocast does."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from ranvier.config.run import Memory, Optim, Pipeline, TensorParallel, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import compiled
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import relative_error
from tests.covering import chosen, label
from tests.errors import raises
from tests.pipeline.parity import merge, share, squared

WIDTH, HALF = 16, torch.bfloat16


class Attention(nn.Module):
    """Products with weights outside of layer calls, an attention, and a norm that torch keeps in fp32."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x).unsqueeze(1)
        return x + self.attention(y, y, y, need_weights=False)[0].squeeze(1)


class Twice(nn.Module):
    """One layer that is called twice, and its weight used once more without the layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(F.gelu(self.linear(x))) + F.linear(x, self.linear.weight.t())


class Halves(nn.Module):
    """Returns bfloat16."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.out(torch.relu(self.into(x)))


def blocks():
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, WIDTH), Attention(), Halves(), Halves(), Attention(), nn.Linear(WIDTH, WIDTH)]
    made[3].into.weight = made[2].into.weight
    return made


def batches(replicas=2):
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(4 * replicas, 4, 2, WIDTH, generator=generator)
    return [[Microbatch(*samples[4 * replica + number].unbind(1)) for number in range(4)]
            for replica in range(replicas)]


def plain(make, data, autocast=True, steps=2):
    """Gradients of each step, and the parameters after the last one."""
    model, found = nn.Sequential(*make()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(steps):
        optimizer.zero_grad()
        weight = 0
        for one in (one for replica in data for one in replica):
            with torch.autocast("cpu", HALF, enabled=autocast):
                total, count = squared(model(one.inputs), one.targets)
            total.backward()
            weight += int(count)
        for parameter in model.parameters():
            parameter.grad.mul_(1.0 / weight)
        found.append({name: one.grad.clone() for name, one in model.named_parameters()})
        optimizer.step()
    return found, {name: one.detach() for name, one in model.named_parameters()}


def engines(make, data, mesh, *, steps=2, **options):
    models = [make() for _ in range(mesh.size)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=mesh, loss=squared, autocast=HALF,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25), **options)
        found = []
        for _ in range(steps):
            result = engine.forward_backward(share(engine, data))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
            engine.step(result)
        values = {name: one.detach().clone() for name, one in engine.named_parameters().items()}
        losses = engine.evaluate(share(engine, data)).loss
        engine.close()
        return found, values, losses

    ranks = run_ranks(rank, mesh.size, timeout_seconds=240.0)
    values = {name: one for _, held, _ in ranks for name, one in held.items()}
    return [merge([found[step] for found, _, _ in ranks], mesh) for step in range(steps)], values, ranks[0][2]


@pytest.mark.parametrize("options", [{}, {"memory": Memory(recompute=1)}, {"memory": Memory(recompute=3)}],
                         ids=["stored", "recomputed", "in segments"])
def test_one_rank_is_bit_identical_with_a_plain_loop(options):
    data = batches(1)
    gradients, values = plain(blocks, data)
    found, parameters, _ = engines(blocks, data, Mesh(), **options)
    for step, expected in enumerate(gradients):
        assert {name for name in expected if not torch.equal(found[step][name], expected[name])} == set()
    assert {name for name in values if not torch.equal(parameters[name], values[name])} == set()


@pytest.mark.parametrize(("mesh", "pipeline", "memory"), chosen([
    (Mesh(data=2), Pipeline(), Memory()), (Mesh(pipe=2), Pipeline(policy="1f1b"), Memory(recompute=2)),
    (Mesh(pipe=3), Pipeline(defer_bytes=1 << 20), Memory())],
    [Mesh(data=2), Mesh(pipe=2), Mesh(pipe=3), Mesh(data=2, pipe=2)],
    [Pipeline(), Pipeline(policy="1f1b"), Pipeline(defer_bytes=1 << 20), Pipeline(stages_per_rank=2)],
    [Memory(), Memory(recompute=2)]), ids=label)
def test_every_mesh_computes_as_a_plain_loop(mesh, pipeline, memory):
    """Except for the order of sums: torch adds up the gradient of a tied weight in bfloat16 if both ends multiply by
    one cast, and it is added up in fp32 if they are on two stages."""
    data = batches(mesh.data)
    (first, _), values = plain(blocks, data)
    (fp32, _), _ = plain(blocks, data, autocast=False)
    (found, _), parameters, _ = engines(blocks, data, mesh, pipeline=pipeline, memory=memory)
    assert set(found) == set(first)
    errors = {name: relative_error(found[name], one) for name, one in first.items()}
    casts = {name: relative_error(fp32[name], one) for name, one in first.items()}
    assert errors.pop("2.into.weight") < 5e-3 < 0.02 < max(casts.values())
    assert max(errors.values()) < 1e-5
    assert max(relative_error(parameters[name], one) for name, one in values.items()) < 0.01


def test_policies_agree_to_the_bit():
    found = [engines(blocks, batches(1), Mesh(pipe=2), pipeline=pipeline)[0] for pipeline in (
        Pipeline(policy="gpipe"), Pipeline(policy="1f1b"), Pipeline(defer_bytes=1 << 20))]
    for other in found[1:]:
        assert all(torch.equal(one, other[step][name]) for step in range(2) for name, one in found[0][step].items())


@pytest.mark.parametrize("pipeline", [None, Pipeline(defer_bytes=1 << 20)], ids=["plain layers", "deferred"])
def test_weights_that_are_used_beside_their_layer(pipeline):
    """A cast inside a deferred product must not become the cast that autograd follows elsewhere."""
    def make():
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, WIDTH)]

    data = batches(1)
    (first, _), _ = plain(make, data)
    (found, _), _, _ = engines(make, data, Mesh(), pipeline=pipeline)
    assert max(relative_error(found[name], one) for name, one in first.items()) < 0.01


FAMILIES = {"gpt": (gpt, Transformer(num_layers=2, hidden=32, heads=2, vocab=29, sequence=8)),
            "llama": (llama, Transformer(num_layers=2, hidden=32, heads=4, kv_heads=2, vocab=29, sequence=8))}


def whole_gradients(family, mesh, **options):
    """Gradients of the full model, from a step of SGD with a learning rate of 1, and the losses of two steps."""
    make, settings = FAMILIES[family]
    ids = torch.randint(0, 29, (6, 2, 9), generator=torch.Generator().manual_seed(2))
    data = [Microbatch(one[:, :-1], one[:, 1:]) for one in ids]

    def rank(world):
        engine = Engine(make(settings), world, mesh=mesh, seed=4, **options,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        at = engine.coordinates
        mine = [Microbatch(*(part.chunk(mesh.row)[at.row] for part in (one.inputs, one.targets)))
                for one in data[at.data::mesh.data]]
        before = {name: one.clone() for name, one in (engine.full_state_dict() or {}).items()}
        losses = [engine.train_batch(mine).loss]
        after = engine.full_state_dict() or {}
        losses.append(engine.train_batch(mine).loss)
        engine.close()
        return {name: one - after[name] for name, one in before.items()}, losses

    return run_ranks(rank, mesh.size)[0]


SPLIT = [(Mesh(data=2), {}), (Mesh(pipe=2), {"pipeline": Pipeline(defer_bytes=1 << 20)}),
         (Mesh(row=2), {}), (Mesh(col=2), {"memory": Memory(recompute=2)}),
         (Mesh(pipe=2, row=2, col=2), {"pipeline": Pipeline(defer_bytes=1 << 20)}),
         (Mesh(row=2, col=2), {"tensor": TensorParallel(scheme="summa")}),
         (Mesh(row=2), {"tensor": TensorParallel(keep_weights=True)}),
         (Mesh(col=2), {"tensor": TensorParallel(scheme="megatron", sequence_sharding=True)})]


@pytest.mark.parametrize(("family", "cuts"), [
    ("llama", SPLIT[3:4]), pytest.param("llama", SPLIT[2:5], marks=pytest.mark.slow),
    pytest.param("gpt", SPLIT, marks=pytest.mark.slow)])
def test_shipped_families_on_every_mesh(family, cuts):
    """All layers, split or not, agree with one rank under autocast up to bfloat16's rounding of sums."""
    fp32, its = whole_gradients(family, Mesh())
    one, losses = whole_gradients(family, Mesh(), autocast=HALF)
    rounding = sum(relative_error(fp32[name], value) for name, value in one.items()) / len(one)
    assert 1e-3 < rounding < 0.03 and losses != its
    for mesh, options in cuts:
        found, others = whole_gradients(family, mesh, autocast=HALF, **options)
        errors = {name: relative_error(found[name], value) for name, value in one.items()}
        assert sum(errors.values()) / len(errors) < 2 * rounding and max(errors.values()) < 0.1, (mesh, options, errors)
        assert others == pytest.approx(losses, rel=5e-3)


def test_rows_and_columns_send_halves():
    """Weights are cast before they are gathered, and activations before they are sent."""
    def sent(**options):
        def rank(world):
            engine = Engine(gpt(FAMILIES["gpt"][1]), world, mesh=Mesh(row=2), optim=Optim(), **options)
            ids = torch.zeros(2, 8, dtype=torch.int64)
            engine.evaluate([(ids, ids)])
            found = engine.counters()["bytes_received_by_axis"]["row"]
            engine.close()
            return found

        return run_ranks(rank, 2)[0]

    assert sent(autocast=HALF) < 0.7 * sent()


def test_parameters_and_states_stay_in_fp32_and_evaluation_casts_too():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append((x.dtype, y.dtype, torch.is_autocast_enabled("cpu")))
            return y

    def rank(world):
        engine = Engine([Watched(4, 4), Watched(4, 4)], world, mesh=Mesh(), loss=squared, autocast=HALF,
                        optim=Optim())
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))]
        engine.train_batch(batch)
        outputs, = engine.predict(batch)
        assert outputs.dtype is HALF and not torch.is_autocast_enabled("cpu")
        found = {one.dtype for one in (*engine.named_parameters().values(), *engine.gradients().values(),
                                       *(one for parts in engine.tensors().values() for many in parts.values()
                                         for one in many if one.is_floating_point()))}
        engine.close()
        return found

    assert run_ranks(rank, 1) == [{torch.float32}]
    assert seen == [(torch.float32, HALF, True), (HALF, HALF, True)] * 2


@pytest.mark.parametrize(("options", "code", "value"), [
    ({"autocast": torch.float16}, "autocast-format", torch.float16),
    ({"autocast": torch.float32}, "autocast-format", torch.float32),
    ({"autocast": HALF, "dtype": HALF}, "autocast-with-dtype", HALF),
    ({"autocast": HALF, "dtype": torch.float64}, "autocast-with-dtype", torch.float64),
    ({"autocast": HALF, "float8": True}, "autocast-with-float8", HALF)], ids=str)
def test_what_does_not_fit_is_refused(options, code, value):
    with raises(code, where="Engine(autocast=...)", value=value):
        run_ranks(lambda world: Engine([nn.Linear(4, 4)], world, mesh=Mesh(), loss=squared, **options), 1)


def test_autocast_around_a_call_is_refused_before_it_begins():
    def rank(world):
        engine = Engine([nn.Linear(4, 4)], world, mesh=Mesh(), loss=squared, optim=Optim())
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))]
        for call in (engine.train_batch, engine.forward_backward, engine.evaluate, engine.predict):
            with torch.autocast("cpu", HALF), raises("autocast-around-engine", value=HALF):
                call(batch)
            call(batch)
        engine.close()

    run_ranks(rank, 1)


def test_a_cache_of_parametrizations_around_a_call_is_refused_where_it_trains():
    def rank(world):
        engine = Engine([weight_norm(nn.Linear(4, 4))], world, mesh=Mesh(), loss=squared, optim=Optim())
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))] * 2
        with parametrize.cached():
            for call in (engine.train_batch, engine.forward_backward):
                with raises("parametrizations-cached-around-engine"):
                    call(batch)
            loss = engine.evaluate(batch).loss
        assert engine.train_batch(batch).loss == loss
        engine.close()

    run_ranks(rank, 1)


def test_a_default_device_around_a_call_is_refused_before_it_begins():
    def rank(world):
        layer = nn.Linear(4, 4)

        def engine():
            return Engine([layer], world, mesh=Mesh(), loss=squared, optim=Optim())

        made, batch = engine(), [(torch.ones(2, 4), torch.zeros(2, 4))]
        for call in (engine, lambda: made.train_batch(batch), lambda: made.evaluate(batch)):
            with torch.device("cuda", 1), raises("default-device-around-engine", value="cuda:1"):
                call()
        made.train_batch(batch)
        made.close()

    run_ranks(rank, 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_switched_off_around_a_call_are_refused_where_it_trains(mode):
    """An evaluation needs no gradients, and leaves nothing to later calls: during it the slower last stage receives
    what the first stage trains on next."""
    class Late(nn.Linear):
        def forward(self, x):
            if not self.training:
                time.sleep(0.05)
            return super().forward(x)

    def rank(world):
        engine = Engine([nn.Linear(4, 4), Late(4, 4)], world, mesh=Mesh(pipe=2), loss=squared, optim=Optim())
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))] * 2
        losses = []
        for call in (engine.train_batch, engine.forward_backward):
            with mode(), raises("no-grad-around-engine", where=f"torch.{mode.__name__}()"):
                call(batch)
            with mode():
                losses.append(engine.evaluate(batch).loss)
                engine.predict(batch)
            losses.append(call(batch).loss)
        engine.close()
        return losses

    (before, first, after, second), _ = run_ranks(rank, 2)
    assert before == first > after == second


@pytest.mark.slow
@pytest.mark.parametrize("memory", [Memory(), Memory(recompute=2)], ids=label)
def test_compiled_blocks_cast_too(memory, monkeypatch):
    """Their weight gradients are computed by autograd."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    found, compared = (engines(blocks, batches(1), Mesh(pipe=2), memory=memory, compile=how,
                               pipeline=Pipeline(defer_bytes=1 << 20))[0][0] for how in (True, False))
    assert max(relative_error(found[name], one) for name, one in compared.items()) < 1e-5
