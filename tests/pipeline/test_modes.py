"""Training changes no module's mode, evaluation restores each one; a model that is all in evaluation mode is named."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranvier.config.run import Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.models.blocks_of import blocks_of
from ranvier.models.from_transformers import from_transformers
from ranvier.originals.stand_in_tensors import StandIns
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.rank_stages import put_in_evaluation, restore
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.pipeline.parity import chain, on_mesh, points, share, squared


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.tanh(self.norm(self.linear(x))))


class Still(Normed):
    """As users write it: in every mode, the norm computes as in evaluation."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def in_part_still():
    blocks = [Normed(), Still().train(), Normed(), nn.Linear(4, 4)]
    blocks[0].norm.eval()
    blocks[0].dropout.eval()
    return blocks


def modes_of(blocks):
    return {f"{name}.{path}": one.training for name, block in blocks.items() for path, one in block.named_modules()}


@pytest.mark.parametrize("mesh, pipeline", [(Mesh(), Pipeline()), (Mesh(pipe=2), Pipeline()),
                                            (Mesh(pipe=2), Pipeline(stages_per_rank=2))])
def test_every_module_keeps_its_mode(mesh, pipeline):
    def rank(world):
        blocks = in_part_still()
        expected = modes_of({str(place): block for place, block in enumerate(blocks)})
        engine = Engine(blocks, world, mesh=mesh, loss=squared, pipeline=pipeline,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        seen = []
        for block in engine.blocks.values():
            block.register_forward_hook(lambda module, *_: seen.append({one.training for one in module.modules()}))
        batch = [(one.inputs.float(), one.targets.float()) for one in points([[3, 2]])[0]]
        statistics = [(name, value.clone()) for name, value in engine.named_buffers().items() if "0.norm" in name]
        for work in (engine.train_batch, engine.evaluate, engine.train_batch, engine.predict, engine.forward_backward):
            seen.clear()
            work(batch)
            assert (work in (engine.evaluate, engine.predict)) == (seen == [{False}] * len(seen))
            assert modes_of(engine.blocks).items() <= expected.items()
        assert all(torch.equal(engine.named_buffers()[name], value) for name, value in statistics)
        if mesh.size == 1:
            with pytest.raises(ModelError):
                engine.evaluate([(None, None)])
            assert modes_of(engine.blocks) == expected
        engine.close()

    run_ranks(rank, mesh.size)


def test_frozen_blocks_without_dropout_get_their_modes_back():
    def work(engine):
        engine.forward_backward(share(engine, batches))
        return engine.blocks["b0"].training, engine.blocks["b0"][1].training

    batches = points([[3]])
    blocks = [lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), lambda: nn.Linear(4, 4)]
    model = chain(*blocks)

    def make():
        return copy.copy(type(model)(**{**vars(model), "layers": (("b0",), ("b1",))}))

    assert on_mesh(make, Mesh(), work, frozen=1, frozen_dropout=False) == [(True, True)]


def test_a_module_that_two_blocks_share_gets_its_mode_back():
    shared = nn.Dropout()
    first, second = nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(shared)
    second.eval()
    shared.train()
    modes = put_in_evaluation([first, second])
    assert not any(one.training for block in (first, second) for one in block.modules())
    restore(modes)
    assert [one.training for one in (*first.modules(), *second.modules())] == [True, True, True, False, True]


def test_the_reference_keeps_modes_too():
    reference = Reference(nn.Sequential(*in_part_still()), loss=squared, dtype=torch.float64)
    before = modes_of(reference.modules)
    batch = points([[3]])[0]
    assert reference.evaluate(batch) == reference.evaluate(batch)
    reference.forward_backward(batch)
    assert modes_of(reference.modules) == before


# ---------------------------------------------------------------------- whole models in evaluation mode


def warnings_of(make, mesh, prepare=lambda blocks: None, train=True):
    def rank(world):
        blocks = make()
        engine = Engine(blocks, world, mesh=mesh, loss=squared)
        prepare(blocks)
        batch = [(one.inputs.float(), one.targets.float()) for one in points([[3]])[0]]
        for _ in range(2):
            (engine.forward_backward if train else engine.evaluate)(batch)
        engine.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank, mesh.size)
    return [one.filename for one in caught if "model.train()" in str(one.message)]


def whole():
    return nn.Sequential(Normed(), nn.Flatten(), Normed()).eval()


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)])
def test_a_whole_model_in_evaluation_mode_is_named_once(mesh):
    assert warnings_of(whole, mesh) == [__file__]


def test_a_model_that_trains_in_part_is_not():
    def frozen_norms():
        model = whole().train()
        model[0].norm.eval()
        return model

    assert warnings_of(frozen_norms, Mesh()) == []
    assert warnings_of(whole, Mesh(), prepare=lambda model: model.train()) == []
    assert warnings_of(whole, Mesh(), train=False) == []


# ---------------------------------------------------------------------- blocks that stand for modules of a model


class Around(nn.Module):
    """Code around the cuts, which depends on the mode."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Module(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(F.dropout(self.first(x), 0.5, self.training))


class Inner(Around):
    """A submodule with a cut inside, whose code depends on the mode, too."""

    def __init__(self):
        super().__init__()
        self.inner = Around()

    def forward(self, x):
        return self.inner(super().forward(x))


def drops(blocks, x):
    """Whether two forwards differ, as with dropout."""
    def run():
        state = x
        for block in blocks.values():
            block.stand_ins.follow_modes()
            state = block(state)
        return state

    return not torch.equal(run(), run())


def test_traced_code_follows_the_mode_of_its_module():
    model, x = Around().eval(), torch.randn(8, 4)
    blocks = blocks_of(model, ["last"])
    assert not drops(blocks, x)
    model.train()
    assert drops(blocks, x)
    blocks["first"].eval()
    blocks["last"].eval()
    assert not drops(blocks, x)
    copied = pickle.loads(pickle.dumps(StandIns([(model, blocks["first"])])))
    copied.follow_modes()
    copy.deepcopy(blocks["last"]).stand_ins.follow_modes()


def test_traced_code_in_two_modes_is_refused():
    model = Inner()
    model.inner.eval()
    blocks = blocks_of(model, ["inner.last"])
    with pytest.raises(ModelError) as refused:
        drops(blocks, torch.randn(8, 4))
    assert refused.value.where == "submodule inner" and refused.value.value == "training=False"
    model.inner.train()
    assert drops(blocks, torch.randn(8, 4))


def test_the_ends_of_a_transformers_model_follow_its_mode():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).eval()
    blocks = {name: build() for name, build in from_transformers(model).blocks.items()}
    ends = [blocks[name].model for name in ("embedding", "head")]
    assert not any(one.training or one.transformer.training for one in ends)
    model.train()
    for name in ("embedding", "head"):
        blocks[name].stand_ins.follow_modes()
    assert all(one.training and one.transformer.training for one in ends)


def test_adapters_start_in_the_mode_of_their_layers():
    from ranvier.block import as_model, existing_blocks
    from ranvier.config.run import Lora
    from ranvier.models.lora import with_adapters

    layers = [nn.Linear(4, 4).eval(), nn.Linear(4, 4)]
    model = with_adapters(as_model(layers, squared), Lora(rank=2, targets=("*",), train_head=False))
    assert list(existing_blocks(model).values()) == layers
    assert [build().lora.training for build in model.blocks.values()] == [False, True]
