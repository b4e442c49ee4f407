"""Predicted memory is what the real engine allocates, to the byte: built on the meta device, where nothing has data,
for one rank of each stage, and updated once. `tests/train/test_memory.py` measures whole steps of real runs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ranvier.comm.meta import MetaGroup
from ranvier.config import presets, read
from ranvier.config.resolve import Facts, resolve
from ranvier.config.run import Batch, Memory, Optim, Pipeline, TensorParallel
from ranvier.elastic.freezing import NONE_FROZEN
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.train.runtime import build_engine
from ranvier.world import World

CATEGORIES = "parameters", "gradients", "master", "moments", "average", "buckets", "staging", "reduction"
LARGE = "bert-sentiment", "vit-cifar10", "gpt2-small", "gpt-12b", "gpt-24b", "gpt-50b", "gpt-100b"


torch.library.impl("aten::_fused_sgd_", "Meta", lambda *_, **__: None)  # torch has a meta kernel for Adam only


class Group(MetaGroup):
    """One of several groups, by the numbers of its ranks."""

    def __init__(self, purpose, ranks, rank):
        super().__init__(purpose, len(ranks), ranks.index(rank))
        self._numbers = ranks

    ranks = property(lambda self: self._numbers if hasattr(self, "_numbers") else (), lambda self, ranks: None)

    def gather_objects(self, value):
        return [value] * len(self.ranks)


class Transport:
    """Sends nothing."""

    needs_progress = True

    def connect(self, sources, destinations, capacity_bytes):
        pass

    def send(self, destination, message):
        pass

    def progress(self):
        pass


class Backend:
    """The backend of one rank of `size`, without the others."""

    name = "in-process"

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def transport(self, purpose, *, on_host=False):
        return Transport()

    def group(self, purpose, partition):
        return Group(purpose, next(tuple(ranks) for ranks in partition if self.rank in ranks), self.rank)


def allocated(run, rank):
    """The bytes of the engine of `rank` after an update."""
    world = World(backend=Backend(rank, run.mesh.size), store=dist.HashStore(), launcher="meta",
                  device=torch.device("meta"), local_rank=0, local_size=1)
    engine = build_engine(run, world, 1.0, frozen=NONE_FROZEN, fresh=False)
    engine._connections.board.close()
    if not run.optim.update_in_backward:
        gradients, optimizer = engine._updater.gradients, engine.flat_optimizer
        gradients.begin(scatter=optimizer.scatters)
        for parameter in gradients.places:
            parameter.grad.zero_()  # a backward has reached it
        for chunk in gradients.chunks:
            chunk.outstanding = 0  # gradients of other ends have arrived
        gradients.block_passed(0)
        gradients.wait()
        optimizer.prefetch()
        optimizer.begin(1e-3)
        for chunk in gradients.reduced_chunks():
            for _ in optimizer.update(chunk, 1.0):
                pass
        optimizer.finish()
    return engine.memory()


def check(run, reduced=1.0):
    """Check the first and the last ranks along pipe; of ranks that own different tensors, the one with most memory.
    reduced: the least share of the reductions' memory that is allocated; a chunk alone in its turn needs less."""
    run = resolve(run, Facts(device="cpu"))
    predicted = laid_out(run)[1]
    owners = run.optim.shard and run.optim.algorithm in ("muon", "adafactor")
    skipped = ("buckets", "reduction") if run.optim.update_in_backward else ()
    for pipe in {0, run.mesh.pipeline_size - 1}:
        ranks = [rank for rank in range(run.mesh.size) if run.mesh.coordinates(rank).pipe == pipe]
        most = max((allocated(run, rank) for rank in (ranks if owners else ranks[:1])),
                   key=lambda one: sum(sum(place.values()) for place in one.values()))
        for place in ("device", "host"):
            bytes_of = getattr(predicted[pipe], place)
            expected = {name: bytes_of.get(name, 0) for name in CATEGORIES if name not in skipped}
            found = {name: most[place].get(name, 0) for name in expected}
            if reduced * expected.get("reduction", 0) <= found.get("reduction", 0) < expected.get("reduction", 0):
                found["reduction"] = expected["reduction"]
            assert found == expected, f"{place} of stage {pipe}"


def with_numbers(run):
    """With one rank for a mesh that is auto, and two samples for a microbatch that is auto."""
    is_auto = "auto" in (run.mesh.data, run.mesh.pipe, run.mesh.row, run.mesh.col)
    micro = 2 if run.batch.microbatch_size == "auto" else run.batch.microbatch_size
    return replace(run, mesh=Mesh() if is_auto else run.mesh, batch=replace(run.batch, microbatch_size=micro))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE))
                                  for name in read.recipe_names()])
def test_shipped_recipes(name):
    check(with_numbers(read.merge([read.load(name)[1]]).run))


MESHES = Mesh(data=2), Mesh(pipe=2), Mesh(row=2, col=2), Mesh(data=3, pipe=2), Mesh(data=2, pipe=2, col=2)
OPTIMS = (Optim(), Optim(shard=True, offload="stream", accumulate="half"),
          Optim(shard=True, algorithm="muon", ema=0.99), Optim(offload="host", accumulate="half"),
          Optim(offload="hybrid", offload_share=0.3, shard=True, ema=0.9), Optim(algorithm="adafactor", shard=True),
          Optim(algorithm="sgd", shard=True, offload="host"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [pytest.param(number, name, marks=[pytest.mark.slow] * (number != 2))
                                              for number, name in enumerate(presets.PRESETS)])
def test_presets(number, name):
    """Each preset has its own width, four layers, and another mesh and other optimizer settings than the one before."""
    run = with_numbers(read.merge([read.load(name)[1]]).run)
    optim = replace(OPTIMS[number % len(OPTIMS)], bucket_size=4_000_000)
    meshes = MESHES if run.model.heads % 2 == 0 else MESHES[:2]  # without columns
    check(replace(run, model=replace(run.model, num_layers=4, preset=None), mesh=meshes[number % len(meshes)],
                  optim=optim, batch=Batch(global_size=24, microbatch_size=2)),
          reduced=0.99 if optim.accumulate == "half" else 1.0)


@pytest.mark.parametrize(("recipe", "mesh", "optim", "changed"), [
    pytest.param("llama-tiny", Mesh(row=2, col=2), Optim(algorithm="lion", offload="host", ema=0.9, shard=True), {
        "precision": "fp16"}, marks=pytest.mark.slow),
    pytest.param("gpt-tiny", Mesh(data=3, pipe=2, col=2), Optim(
        algorithm="muon", offload="hybrid", offload_share=0.4, ema=0.9, shard=True, chunk_buckets=1), {
            "precision": "bf16", "tensor": TensorParallel(scheme="summa"), "memory": Memory(recompute=1)},
        marks=pytest.mark.slow),
    pytest.param("llama-tiny", Mesh(data=2, row=2, col=2), Optim(
        algorithm="adafactor", offload="host", shard=True, accumulate="half"), {"precision": "fp64"},
        marks=pytest.mark.slow),
    ("gpt-tiny", Mesh(data=2, pipe=2), Optim(offload="stream", shard=True, accumulate="half", ema=0.9), {
        "precision": "bf16", "pipeline": Pipeline(stages_per_rank=2)}),
    pytest.param("llama-tiny", Mesh(data=2, col=2), Optim(offload="stream", shard=True, accumulate="half"), {
        "precision": "bf16", "tensor": TensorParallel(scheme="megatron")}, marks=pytest.mark.slow),
    ("gpt-tiny", Mesh(data=2, pipe=2), Optim(update_in_backward=True, shard=True), {
        "batch": Batch(global_size=24, microbatch_size=12)})])
def test_meshes(recipe, mesh, optim, changed):
    run = read.merge([read.load(recipe)[1]]).run
    check(replace(run, mesh=mesh, model=replace(run.model, num_layers=3), optim=replace(optim, bucket_size=5000), **{
        "batch": Batch(global_size=24, microbatch_size=2)} | changed))
