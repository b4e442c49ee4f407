"""The states of optimizers: saved, moved, resumed and counted, also if they have shapes of their own."""

import copy
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ranvier.arguments import literal_values
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.read import settings
from ranvier.config.resolve import Facts, resolve
from ranvier.config.run import Batch, Optim, Pipeline, Run
from ranvier.mesh import Mesh
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.muon import Muon, orthogonalised
from ranvier.optim.rules import rules_of, working_bytes
from ranvier.optim.tensor_update import TensorUpdate
from ranvier.planner.count import laid_out
from ranvier.planner.run_cost import step_of
from ranvier.precision import DTYPES
from ranvier.testing.memory import MemoryTracker
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, assert_same, everything, on, train
from tests.covering import chosen, quick
from tests.elastic.test_transition import trained
from tests.errors import raises

ROUND_TRIPS = [("muon", Mesh(data=2, pipe=2), {"shard": True}, Mesh(row=2, col=2), {"offload": "host"}),
               ("adafactor", Mesh(data=2, row=2), {"shard": True, "offload": "stream"}, Mesh(pipe=2), {}),
               ("adafactor", Mesh(pipe=2, col=2), {}, Mesh(data=2), {"shard": True})]


@pytest.mark.parametrize(("algorithm", "first", "before", "second", "after"), quick(1, ROUND_TRIPS), ids=str)
def test_checkpoints_fit_every_mesh(tmp_path, algorithm, first, before, second, after):
    """All state is bit-identical on another mesh, and on the same mesh training resumes bit-identically."""
    def saved(engine):
        train(engine, 2)
        checkpoints = Checkpoints(engine, tmp_path / "first")
        checkpoints.save()
        checkpoints.wait()
        return train(engine, 2)

    def resumed(engine):
        assert Checkpoints(engine, tmp_path / "first").load().step == 2
        return train(engine, 2)

    def loaded(engine):
        Checkpoints(engine, tmp_path / "first").load()
        again = Checkpoints(engine, tmp_path / "second")
        again.save()
        assert [one.error for one in again.wait()] == [None]

    assert on(first, saved, algorithm=algorithm, **before) == on(first, resumed, algorithm=algorithm, **before)
    on(second, loaded, algorithm=algorithm, **after)
    assert_same(everything(tmp_path / "first" / "step-2"), everything(tmp_path / "second" / "step-2"))


@pytest.mark.parametrize(("before", "after"), [("adamw", "lion"), ("adamw", "muon"), ("muon", "sgd"),
                                               ("lion", "adafactor"), ("adafactor", "adamw")])
def test_states_of_another_optimizer_are_refused(tmp_path, before, after):
    def saved(engine):
        train(engine, 1)
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()

    on(Mesh(), saved, algorithm=before)
    with raises("checkpoint-without-state"):
        on(Mesh(), lambda engine: Checkpoints(engine, tmp_path).load(), algorithm=after)


@pytest.mark.parametrize("algorithm", ["muon", "adafactor"])
def test_state_dict_resumes(algorithm):
    def work(engine):
        train(engine, 1)
        state = copy.deepcopy(engine.state_dict())
        losses = train(engine, 2)
        engine.load_state_dict(state)
        assert train(engine, 2) == losses

    on(Mesh(data=2), work, algorithm=algorithm, shard=True)


@pytest.mark.parametrize(("algorithm", "optim"), quick(1, [
    ("adafactor", {"shard": True, "offload": "stream"}), ("muon", {"offload": "hybrid"}), ("muon", {"shard": True})]))
def test_transitions_keep_states(algorithm, optim):
    """To another mesh and back, after which training resumes bit-identically."""
    settings = Optim(bucket_size=64, algorithm=algorithm, **optim)
    here, there = Mesh(data=2, pipe=2), Mesh(row=2, col=2)
    found, _, _ = trained([here, there, here], steps=[1, 0, 2], optim=settings, dtype=torch.float64)
    assert found == trained([here], steps=3, optim=settings, dtype=torch.float64)[0]


PARTS = {"muon": lambda numel, matrices, rows, columns: 4 * matrices + 8 * (numel - matrices),
         "lion": lambda numel, matrices, rows, columns: 4 * numel,
         "adafactor": lambda numel, matrices, rows, columns: 4 * (rows + columns)}


def test_bytes_of_all_algorithms_are_compared():
    """AdamW's and SGD's are compared in `test_optimizer`."""
    assert {*PARTS, "adamw", "sgd"} == set(literal_values(settings()["optim.algorithm"].annotation)), (
        "add the bytes of the new algorithm's states to PARTS")


@pytest.mark.parametrize("algorithm", PARTS)
def test_bytes_of_states(algorithm):
    """AdamW has 8 bytes for each parameter, Lion 4, Muon 4 for matrices of layers, Adafactor 4 for each row and column.
    The prediction agrees."""
    def work(engine):
        shapes = {one.name: one.shape for one in engine.layout.parameters if one.is_owner}
        return engine.memory()["device"]["moments"], shapes

    (measured, shapes), = on(Mesh(), work, algorithm=algorithm)
    numel = sum(map(prod, shapes.values()))
    matrices = sum(prod(shape) for name, shape in shapes.items() if name.startswith("layer") and len(shape) == 2)
    rows = sum(shape[0] if len(shape) == 2 else prod(shape) for shape in shapes.values())
    columns = sum(shape[1] for shape in shapes.values() if len(shape) == 2)
    assert measured == PARTS[algorithm](numel, matrices, rows, columns)
    run = Run(model=CONFIG, optim=Optim(algorithm=algorithm, bucket_size=200))
    assert step_of(resolve(run), ()).num_states == pytest.approx(measured / numel / 4)


def test_plans_count_newton_schulz_steps():
    """Equal to torch's count on a matrix and a manual one on this model; split over stages, not rows and columns."""
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.randn(24, 8))
    assert counter.get_total_flops() == Muon().flops((24, 8))
    run = Run(model=CONFIG, optim=Optim(algorithm="muon"))
    expected = CONFIG.num_layers * sum(Muon().flops(shape) for shape in ((24, 8), (8, 8), (32, 8), (8, 32)))
    assert step_of(resolve(run), ()).update_flops == expected
    assert step_of(resolve(replace(run, optim=Optim(algorithm="adafactor"))), ()).update_flops == 0


@pytest.mark.parametrize(("algorithm", "dtype"), [
    ("lion", torch.float32), ("muon", torch.float32), ("muon", torch.bfloat16), ("adafactor", torch.float32)])
def test_working_memory_of_updates(algorithm, dtype):
    """Of a bucket, or of two matrices in turn, by counted storages; nothing of the first is kept for the second."""
    rules, shape = rules_of(Optim(algorithm=algorithm), dtype), (64, 256)
    spec = GradientSpec(name="", blocks=(0,), numel=prod(shape), parameter=nn.Parameter(torch.zeros(shape)),
                        whole=rules.tensors is not None)
    predicted = working_bytes(rules, [spec], prod(shape), 4)
    tensors = {name: TensorUpdate(shape=shape, parameter=torch.ones(shape), gradient=torch.ones(shape), step=2, states={
        state: torch.zeros(own or shape) for state, own in rules.state_shapes("", shape, in_layer=True).items()},
        learning_rate=0.1, weight_decay=0.1) for name in "ab"}
    with MemoryTracker() as tracker:
        if rules.tensors is not None:
            rules.tensors.update_tensors(tensors)
        else:
            one = tensors["a"]
            rules.elementwise.update(one.parameter, one.gradient, one.states, step=2, learning_rate=0.1, weight_decay=0)
    assert 0.95 * predicted < tracker.peak_bytes() <= predicted


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_memory_of_updates_on_the_host(device):
    """It is counted as host memory, unless the device is the host."""
    run = Run(model=CONFIG, optim=Optim(algorithm="lion", bucket_size=10_000, offload="host"))
    (entry,) = laid_out(resolve(run, Facts(device=device)))[1]
    assert entry.host.get("workspace", 0) == (entry.device["gradients"] if device == "cuda" else 0)


@pytest.mark.parametrize(("algorithm", "mesh", "options", "precision"), chosen([
    ("lion", Mesh(data=2), {"shard": True}, "bf16"),
    ("adafactor", Mesh(data=2, row=2), {"shard": True, "offload": "host"}, "fp32")], [
    ("muon", Mesh(data=2, pipe=2), {"shard": True}), ("muon", Mesh(row=2, col=2), {"offload": "stream"}),
    ("adafactor", Mesh(data=2, row=2), {"shard": True, "offload": "host"}), ("lion", Mesh(data=2), {"shard": True})],
    ["fp32", "bf16"]))
def test_memory_is_predicted_to_the_byte(algorithm, mesh, options, precision):
    optim = Optim(**{"bucket_size": 200, "chunk_buckets": 2, "offload": "none", "algorithm": algorithm, **options})
    run = resolve(Run(model=CONFIG, mesh=mesh, optim=optim, precision=precision,
                      batch=Batch(global_size=GLOBAL_SIZE, microbatch_size=2)))
    predicted = laid_out(run)[1]

    def work(engine):
        train(engine, 1)
        return engine.memory(), engine.coordinates

    found = on(mesh, work, optim=optim, dtype=DTYPES[precision],
               pipeline=Pipeline(boundaries=laid_out(run)[0].boundaries or None))
    for entry in predicted:
        def total(memory):
            return sum(memory[place].get(name, 0) for place in memory for name in ("master", "moments"))

        most = max((memory for memory, at in found if at.pipe == entry.pipeline_rank), key=total)
        for place in ("device", "host"):
            for category in ("gradients", "master", "moments", "buckets", "staging"):
                assert most[place].get(category, 0) == getattr(entry, place).get(category, 0), (place, category)
