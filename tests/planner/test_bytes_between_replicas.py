"""Bytes between replicas in a step, as a plan predicts them and as the engine's groups receive them."""

import pytest
import torch

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Optim, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.planner.candidates import predict
from ranvier.planner.work import Work
from ranvier.testing.ranks import run_ranks
from tests.covering import pairwise

MODEL = Transformer(num_layers=1, hidden=64, heads=2, vocab=1000, sequence=8)


@pytest.mark.parametrize(("precision", "options", "shard", "data"), pairwise([
    ("fp32", {}), ("bf16", {}), ("bf16", {"reduce_dtype": "fp32"}), ("bf16", {"accumulate": "half"})],
    [False, True], [2, 3]))
def test_bytes_between_replicas(precision, options, shard, data):
    """The bytes agree except for the padding of chunks and the last, smaller chunk."""
    optim = Optim(bucket_size=40_000, chunk_buckets=1, offload="none", shard=shard, **options)
    run = ResolvedRun(mesh=Mesh(data=data), model=MODEL, precision=precision, optim=optim,
              batch=Batch(global_size=data, microbatch_size=1))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    def rank(world):
        engine = Engine(gpt(MODEL, dtype=dtype), world, mesh=run.mesh, optim=optim, dtype=dtype)
        ids = torch.zeros(1, MODEL.sequence, dtype=torch.int64)
        received = []
        for _ in range(2):
            engine.train_batch([(ids, ids)])
            engine.named_parameters()
            received.append(engine.counters()["bytes_received_by_axis"]["data"])
        engine.close()
        return received[1] - received[0]

    predicted = predict(run, load_cluster("laptop"), Work(), exact=False).cost.link_bytes["data"]
    for received in run_ranks(rank, data):
        assert received == pytest.approx(predicted, rel=0.02)
