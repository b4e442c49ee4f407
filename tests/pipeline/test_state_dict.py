"""Engine.state_dict: the full state of a rank, from which the same rank of another engine resumes bit-identically."""

import copy
import io
from functools import partial

import pytest
import torch

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Guard, Optim, Pipeline
from ranvier.errors import CheckpointError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.tensor.split_parity import share, tiny_gpt, token_batches

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OWN = Optim(bucket_size=500, chunk_buckets=2)
SHARDED = Optim(bucket_size=333, shard=True)
LATER = ("clipped in the backward", "sharded, streamed bf16", "sharded 2x2x2", "sharded rows", "torch 2x2",
         "torch, masters", "guarded, frozen", "sharded, tied", "torch columns")


def engine_of(world, mesh, *, dtype=torch.float64, make=tiny_gpt, **options):
    return Engine(make(), world, mesh=mesh, seed=3, dtype=dtype, **options)


def through_a_file(state):
    """Written by `torch.save` and read by `torch.load`, without running any code from the file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(engine, batches):
    found = [engine.train_batch(share(engine, batch)) for batch in batches]
    return [str((result.loss, result.grad_norm, result.stepped)) for result in found]  # strings, so that nan equals nan


def everything(engine):
    """Copies of all tensors and numbers of a rank."""
    return copy.deepcopy(engine.state_dict())


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(("mesh", "options"), [
    pytest.param(mesh, options, id=id, marks=pytest.mark.slow if id in LATER else ()) for id, (mesh, options) in {
        "one rank": (Mesh(), {"optim": OWN}),
        "clipped in the backward": (Mesh(data=2), {"optim": Optim(
            update_in_backward=True, clip_norm=0.01, clip_from="previous-step")}),
        "sharded, tied": (Mesh(data=2, pipe=2), {"optim": SHARDED, "make": partial(tiny_gpt, tied=True)}),
        "sharded, streamed bf16": (Mesh(data=2, pipe=2), {
            "optim": Optim(shard=True, offload="stream", bucket_size=500), "dtype": torch.bfloat16}),
        "sharded 2x2x2": (Mesh(data=2, row=2, col=2), {"optim": SHARDED}),
        "sharded rows": (Mesh(data=2, row=2), {"optim": SHARDED}),
        "torch 2x2": (Mesh(row=2, col=2), {"optimizer": ADAMW}),
        "torch columns": (Mesh(col=2), {"optimizer": ADAMW}),
        "bf16 on the host": (Mesh(data=2), {
            "optim": Optim(offload="host", accumulate="half"), "dtype": torch.bfloat16}),
        "torch, masters": (Mesh(data=2, pipe=2), {"optimizer": ADAMW, "dtype": torch.bfloat16}),
        "fp16": (Mesh(pipe=2), {
            "optim": Optim(initial_loss_scale=2.0**40, loss_scale_window=2), "dtype": torch.float16}),
        "guarded, frozen": (Mesh(pipe=2), {
            "optim": OWN, "frozen": 1, "guard": Guard(bad_step="skip", loss_spike_factor=3.0)}),
        "in the backward": (Mesh(data=2), {"optim": Optim(update_in_backward=True, algorithm="sgd")}),
    }.items()])
def test_a_run_resumes_bit_identical(mesh, options):
    """Two steps, the state through a file into an engine with other weights, and two more steps of both engines."""
    count = 1 if options.get("optim", OWN).update_in_backward else 2
    batches = [token_batches(mesh, count=count, seed=seed) for seed in range(4)]

    def rank(world):
        of_torch = "optimizer" in options
        first = engine_of(world, mesh, **({} if of_torch else {"learning_rate": 1e-2}), **options)
        train(first, batches[:2])
        if of_torch:
            first.optimizer.param_groups[0]["lr"] = 5e-3
        else:
            first.learning_rate = 5e-3
        state = through_a_file(first.state_dict())
        before = everything(first)
        expected, after = train(first, batches[2:]), everything(first)
        first.close()
        second = engine_of(world, mesh, **options)
        for parameter in second.named_parameters().values():
            parameter.data.add_(1.0)
        second.load_state_dict(state)
        assert same(everything(second), before)
        assert train(second, batches[2:]) == expected and second.steps == 4
        assert same(everything(second), after)
        second.close()

    run_ranks(rank, mesh.size, timeout_seconds=120.0)


def test_a_state_fits_whatever_holds_the_optimizers_states():
    """Other buckets and another place of the states do not change the layout, if states are not sharded."""
    batches = [token_batches(Mesh(), seed=seed) for seed in range(2)]

    def rank(world):
        first = engine_of(world, Mesh(), dtype=torch.bfloat16, optim=OWN)
        train(first, batches)
        second = engine_of(world, Mesh(), dtype=torch.bfloat16, optim=Optim(bucket_size=70, offload="host"))
        second.load_state_dict(first.state_dict())
        for name, parameter in first.named_parameters().items():
            assert torch.equal(parameter, second.named_parameters()[name])
        for kind, state in second.flat_optimizer.placement.states.items():
            assert state.double().sum() == pytest.approx(
                float(first.flat_optimizer.placement.states[kind].double().sum()), rel=1e-5), kind

    run_ranks(rank, 1)


def test_what_was_frozen_since_the_start_stays_frozen():
    def rank(world):
        engine = engine_of(world, Mesh(), optim=OWN)
        engine.named_parameters()["head.norm.weight"].requires_grad_(False)
        state = copy.deepcopy(engine.state_dict())
        assert state["frozen"] == ["head.norm.weight"]
        second = engine_of(world, Mesh(), optim=OWN)
        second.load_state_dict(state)
        assert not second.named_parameters()["head.norm.weight"].requires_grad
        return len(second.parameters())

    run_ranks(rank, 1)


@pytest.mark.parametrize(("first", "second", "says"), [
    ((Mesh(data=2), {}), (Mesh(pipe=2), {}), r"was taken on the mesh data 2 x pipe 1 x row 1 x col 1, and this "
                                             r"engine's is data 1 x pipe 2 x row 1 x col 1"),
    ((Mesh(pipe=2), {}), (Mesh(pipe=2), {"pipeline": Pipeline(boundaries=(1,))}),
     r"was taken with the boundaries \[\d\] of stages, and this engine has \[1\]"),
    ((Mesh(data=2), {}), (Mesh(data=2), {"make": partial(tiny_gpt, num_layers=2)}), "has other parameters"),
    ((Mesh(data=2), {}), (Mesh(data=2), {"dtype": torch.bfloat16}), "has parameters of another number format"),
    ((Mesh(data=2), {}), (Mesh(data=2), {"optim": Optim(algorithm="sgd")}),
     "was taken with the optimizer ranvier adamw, and this engine has ranvier sgd"),
    ((Mesh(data=2), {}), (Mesh(data=2), {"optim": None, "optimizer": ADAMW}), "and this engine has AdamW"),
    ((Mesh(data=2), {}), (Mesh(data=2), {"optim": SHARDED}), "has the optimizer's states of other elements")],
    ids=["mesh", "boundaries", "model", "format", "algorithm", "torch", "shards"])
def test_a_state_of_another_layout(first, second, says):
    """Nothing is written, and the error names the alternative that fits any mesh."""
    def rank(world):
        engines = [engine_of(world, mesh, **{"optim": OWN, **options}) for mesh, options in (first, second)]
        before = everything(engines[1])
        with pytest.raises(CheckpointError, match=rf"load_state_dict: .*{says}.*ranvier\.Checkpoints, which fit any"):
            engines[1].load_state_dict(engines[0].state_dict())
        assert same(everything(engines[1]), before)

    run_ranks(rank, 2)


def test_a_state_of_another_rank_or_of_something_else():
    def rank(world):
        engine = engine_of(world, Mesh(data=2), optim=OWN)
        state = engine.state_dict()
        state["layout"]["rank"] = 1 - world.rank
        says = f"was taken on rank {1 - world.rank}, and this is rank {world.rank}"
        with pytest.raises(CheckpointError, match=says):
            engine.load_state_dict(state)
        with raises("not-a-state-dict", "dict"):
            engine.load_state_dict({"weight": torch.zeros(2)})

    run_ranks(rank, 2)


def test_other_groups_of_torchs_optimizer():
    """torch's own refusal came only after the parameters had been written."""
    def rank(world):
        engines = [Engine([torch.nn.Linear(2, 2)], world, mesh=Mesh(), loss=lambda y, t: (y.sum(), 1.0),
                          optimizer=lambda parameters, count=count: ADAMW(parameters[:count])) for count in (1, 2)]
        before = everything(engines[1])
        with raises("state-dict-of-other-groups", where="load_state_dict"):
            engines[1].load_state_dict(engines[0].state_dict())
        assert same(engines[1].state_dict(), before)

    run_ranks(rank, 1)


def test_other_buffers(tmp_path):
    def rank(world):
        engines = []
        for size in (2, 3):
            block = torch.nn.Linear(2, 2)
            block.register_buffer("seen", torch.zeros(size))
            engines.append(Engine([block], world, mesh=Mesh(), loss=lambda y, t: (y.sum(), 1.0)))
        with raises("state-dict-of-another-engine", "buffers"):
            engines[1].load_state_dict(engines[0].state_dict())

    run_ranks(rank, 1)


def test_checkpoints_do_what_a_state_dict_cannot(tmp_path):
    """The remedy of the error above works: the same state on another mesh."""
    batches = token_batches(Mesh(data=2), seed=1)

    def written(world):
        engine = engine_of(world, Mesh(data=2), optim=SHARDED)
        train(engine, [batches])
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()
        checkpoints.close()
        return {name: value.detach().clone() for name, value in engine.named_parameters().items()}

    def read(world):
        engine = engine_of(world, Mesh(pipe=2), optim=OWN)
        assert Checkpoints(engine, tmp_path).load().step == 1
        return {name: value.detach().clone() for name, value in engine.named_parameters().items()}

    expected, _ = run_ranks(written, 2)
    first, second = run_ranks(read, 2)
    assert same({**first, **second}, {name: expected[name] for name in (first | second)})


class Counting(torch.nn.Linear):
    """Counts its forwards outside its buffers: `form` of the count is its extra state."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return self.form(self.calls)

    def set_extra_state(self, state):
        self.calls = int(state)


def trained_twice(world, folder, form):
    """Parameters and extra states after a batch whose gradients are pending and a return to the state before it."""
    layer = Counting(2, 2)
    layer.form = form
    torch.nn.init.eye_(layer.weight)
    engine = Engine([torch.nn.Linear(2, 2), layer], world, mesh=Mesh(data=2), dtype=torch.float64,
                    loss=lambda y, t: ((y - t).square().sum(), 2.0), optimizer=partial(torch.optim.SGD, lr=0.1))
    batch = [(torch.ones(1, 2, dtype=torch.float64) + world.rank, torch.zeros(1, 2, dtype=torch.float64))]
    engine.train_batch(batch)
    if folder is None:
        state = copy.deepcopy(engine.state_dict())
        back = partial(engine.load_state_dict, state)
    else:
        checkpoints = Checkpoints(engine, folder)
        checkpoints.save()
        back = checkpoints.load
    found = []
    for _ in range(2):
        engine.step(engine.forward_backward(batch))
        found.append([layer.calls, *(value.detach().clone() for value in engine.named_parameters().values())])
        engine.forward_backward(batch)
        back()
    engine.close()
    return found


@pytest.mark.parametrize(("in_file", "form"), [(False, int), (False, torch.tensor), (True, torch.tensor)])
def test_accumulated_gradients_end_with_a_load_and_extra_states_are_taken(in_file, form, tmp_path):
    for first, again in run_ranks(lambda world: trained_twice(world, tmp_path if in_file else None, form), 2):
        assert first[0] == again[0] and same(first, again)


def test_a_state_can_be_loaded_again():
    """Training after the first load does not change it."""
    def rank(world):
        engine = engine_of(world, Mesh(), optimizer=ADAMW)
        batches = token_batches(Mesh(), seed=1)
        train(engine, [batches])
        state = everything(engine)
        kept = copy.deepcopy(state)
        engine.load_state_dict(state)
        train(engine, [batches])
        assert same(state, kept)

    run_ranks(rank, 1)
