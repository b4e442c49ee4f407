"""torch.func inside blocks, and blocks that are copied and saved while an engine uses them."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ranvier.config.run import Memory, Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.tensor import weight_gradients
from ranvier.testing.reference import Reference
from tests.covering import covering, label
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_parity, chain, on_mesh, points, share, small_gpt, tokens

POLICIES = ["message-driven", "1f1b", "gpipe"]


class Transformed(nn.Module):
    """A Linear under a transform of torch.func; `also` also calls it directly."""

    def __init__(self, transform, also=False):
        super().__init__()
        self.linear, self.transform, self.also = nn.Linear(4, 4), transform, also

    def forward(self, x):
        y = self.transform(self.linear, x)
        return y + self.linear(x) if self.also else y


def by_vmap(linear, x):
    return torch.vmap(linear)(x)


def by_grad(linear, x):
    return torch.func.vmap(torch.func.grad(lambda row: linear(row).square().sum()))(x)


def by_jvp(linear, x):
    return torch.func.jvp(linear, (x,), (torch.ones_like(x),))[1] + x


def by_dual_numbers(linear, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(linear(dual)).tangent + x


@pytest.mark.parametrize(("transform", "also"), covering(
    [by_vmap, by_grad, by_dual_numbers, by_jvp], [False, True]), ids=label)
def test_gradients_through_transforms_are_torchs(transform, also):
    """Under every policy, and bit-identical between policies."""
    model = partial(chain, partial(nn.Linear, 4, 4), partial(Transformed, transform, also), partial(nn.Linear, 4, 4),
                    partial(nn.Linear, 4, 4))
    forward_mode = transform in (by_jvp, by_dual_numbers)  # torch has one level of it in a process
    mesh = Mesh() if forward_mode else Mesh(data=2, pipe=2)
    batches = points([[2, 3, 1]] * mesh.data)
    first, *others = (assert_parity(model, batches, mesh, pipeline=Pipeline(policy=policy, defer_bytes=1 << 20))
                      for policy in POLICIES)
    for other in others:
        assert all(torch.equal(other.gradients[name], value) for name, value in first.gradients.items())


@pytest.mark.parametrize("recompute", [1, "selective"])
def test_a_transform_that_torch_cannot_recompute_is_named(recompute):
    def work(engine):
        engine.train_batch(share(engine, points([[2]])))

    with raises("recompute-with-transform", where="block b1"):
        on_mesh(partial(chain, partial(nn.Linear, 4, 4), partial(Transformed, by_grad)), Mesh(), work,
                optim=Optim(), memory=Memory(recompute=recompute))


def test_other_layers_still_defer(monkeypatch):
    monkeypatch.setattr(weight_gradients, "_SMALL_BYTES", 0)  # each layer's product runs separately
    model = partial(chain, partial(nn.Linear, 4, 4), partial(Transformed, by_vmap), partial(nn.Linear, 4, 4),
                    partial(nn.Linear, 4, 4))

    def work(engine):
        engine.train_batch(share(engine, points([[2]])))
        return [span.label for span in engine.timeline.take() if span.category == "weight"]

    assert on_mesh(model, Mesh(), work, pipeline=Pipeline(defer_bytes=1 << 20), optim=Optim()) == [["W0", "W0", "W0"]]


# ---------------------------------------------------------------------- copies

@pytest.mark.parametrize("options", [{}, {"optim": Optim(shard=True)}, {"optim": Optim(offload="stream")}],
                         ids=["torch", "sharded", "streamed"])
def test_an_average_of_a_live_model_is_that_of_plain_torch(options):
    """An EMA by torch's own AveragedModel, while weight gradients are deferred on every stage."""
    mesh, options = Mesh(data=2, pipe=2), options or {"optimizer": partial(torch.optim.AdamW, lr=1e-3)}
    batches = [points([[2, 1]] * 2, seed=seed) for seed in range(4)]
    model = partial(chain, *[partial(nn.Linear, 4, 4)] * 4)
    averaged = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    reference = Reference(model(), seed=SEED, dtype=torch.float64, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    plain = nn.ParameterDict({name.replace(".", "_"): value for name, value in reference.parameters.items()})
    expected = averaged(plain)
    for batch in batches:
        reference.train_batch([one for replica in batch for one in replica])
        expected.update_parameters(plain)

    def work(engine):
        averages = {name: averaged(module) for name, module in engine.blocks.items()}
        for batch in batches:
            engine.train_batch(share(engine, batch))
            for name, module in engine.blocks.items():
                averages[name].update_parameters(module)
        return {f"{block}.{name}": value.clone() for block, one in averages.items()
                for name, value in one.module.state_dict().items()}

    found = on_mesh(model, mesh, work, pipeline=Pipeline(defer_bytes=1 << 20), learning_rate=1e-3, **options)
    for name, value in expected.module.items():
        mine = [one[name.replace("_", ".")] for one in found if name.replace("_", ".") in one]
        assert len(mine) == 2
        for one in mine:
            torch.testing.assert_close(one, value.detach(), rtol=1e-10, atol=1e-14)


def test_a_saved_block_needs_nothing_of_ranvier():
    """Neither its class nor its forward: torch.save writes a plain nn.Linear."""
    def work(engine):
        engine.train_batch(share(engine, points([[2]])))
        module, x = engine.blocks["b0"], torch.randn(2, 4, dtype=torch.float64)
        saved = io.BytesIO()
        torch.save(module, saved)
        assert b"ranvier" not in saved.getvalue()
        saved.seek(0)
        copies = [torch.load(saved, weights_only=False), pickle.loads(pickle.dumps(module)), copy.deepcopy(module)]
        for one in copies:
            assert type(one) is nn.Linear and "forward" not in vars(one)
            assert torch.equal(one(x), module(x)) and one.weight.data_ptr() != module.weight.data_ptr()
        engine.train_batch(share(engine, points([[2]])))
        assert not torch.equal(copies[0].weight, engine.named_parameters()["b0.weight"])

    on_mesh(partial(chain, *[partial(nn.Linear, 4, 4)] * 2), Mesh(), work, pipeline=Pipeline(defer_bytes=1 << 20),
            optim=Optim())


def test_a_block_may_copy_a_layer_in_its_forward():
    class Copies(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            teacher = copy.deepcopy(self.inner).requires_grad_(False)
            return super().forward(x) + teacher(x).detach() + pickle.loads(pickle.dumps(teacher))(x) + self.inner(x)

    globals()["Copies"] = Copies
    assert_parity(partial(chain, Copies, partial(nn.Linear, 4, 4)), points([[2, 1]]), Mesh(),
                  pipeline=Pipeline(defer_bytes=1 << 20))


def test_blocks_on_rows_and_columns_are_copied_and_not_saved():
    """A copy has the same place among the ranks; a state_dict or a checkpoint is saved instead."""
    mesh = Mesh(row=2, col=2)

    def work(engine):
        engine.train_batch(share(engine, tokens([[2]])))
        for name, module in engine.blocks.items():
            one = copy.deepcopy(module)
            assert all(torch.equal(value, module.state_dict()[key]) for key, value in one.state_dict().items())
            if "mlp" in name:
                with raises("split-layer-pickled"):
                    pickle.dumps(module)
        return engine.train_batch(share(engine, tokens([[2]]))).loss

    assert len(set(on_mesh(small_gpt, mesh, work, optim=Optim()))) == 1


