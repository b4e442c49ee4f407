"""Replicas that differ: one changed bit on one rank is found on every rank, and the replica that differs is named."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pipeline.replica_comparison import PIECE, checksum
from tests.covering import covering, quick
from tests.errors import raises
from tests.pipeline.parity import chain, frozen, on_mesh, share, small_gpt, tokens
from tests.pipeline.test_parity import of_blocks
from tests.tensor.split_parity import on_mesh as on_tensor_mesh
from tests.tensor.split_parity import share as split_share
from tests.tensor.split_parity import tiny_gpt, token_batches

OPTIM = partial(Optim, bucket_size=30, chunk_buckets=2)


def flip(parameter, place=-1, bit=0):
    """Change one bit of one element."""
    values = parameter.detach().clone().view(-1)
    values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()])[place] ^= 1 << bit
    with torch.no_grad():
        parameter.copy_(values.view(parameter.shape))


def compared(make, mesh, changes, *, run=on_mesh, batch=None, batch_share=share, steps=1, **options):
    """The error on each rank when `changes`, {rank: [parameter, ...]}, are made after good steps; none before."""
    def work(engine):
        for _ in range(steps):
            engine.train_batch(batch_share(engine, batch))
        engine.compare_replicas()
        for name in changes.get(engine.world.rank, ()):
            flip(engine.named_parameters()[name])
        with pytest.raises(RanvierError) as told:
            engine.compare_replicas()
        return str(told.value)

    texts = run(make, mesh, work, **options)
    assert len(set(texts)) == 1, "the same on every rank"
    assert texts[0].endswith("Resume from the last checkpoint (Checkpoints.load()), or by its path from one before "
                             "the last good comparison; if the same rank is named again, replace its device.")
    return texts[0]


@pytest.mark.parametrize("shard", [False, True])
def test_of_three_replicas_the_odd_one_is_named(shard):
    text = compared(small_gpt, Mesh(data=3, pipe=2), {3: ["layer2.mlp.fc1.weight"]}, batch=tokens([[2], [2], [1]]),
                    optim=OPTIM(shard=shard))
    assert text.startswith("parameter layer2.mlp.fc1.weight: replica 1 (rank 3) has other bits than the other 2 ranks "
                           "that hold it. ")


@pytest.mark.parametrize(("replica", "shard"), covering([0, 1], [False, True]))
def test_of_two_that_differ_both_are_named(replica, shard):
    text = compared(small_gpt, Mesh(data=2, pipe=2), {2 * replica: ["layer0.attention.norm.bias"]},
                    batch=tokens([[2], [2]]), optim=OPTIM(shard=shard))
    assert text.startswith("parameter layer0.attention.norm.bias: differs between replica 0 (rank 0) and replica 1 "
                           "(rank 2), and too few agree to tell which is right. ")


def test_several_parameters_and_ranks_are_counted():
    """The first one in model order is named, whatever stage it is on; a replica may differ on several stages."""
    names = {3: ["layer2.mlp.fc1.weight"], 2: ["layer0.mlp.fc1.bias", "layer0.attention.norm.bias"],
             6: ["layer0.attention.norm.bias"]}
    text = compared(small_gpt, Mesh(data=5, pipe=2), names, batch=tokens([[1]] * 5), optim=OPTIM())
    assert text.startswith("parameter layer0.attention.norm.bias: replica 1 (rank 2) and replica 3 (rank 6) have other "
                           "bits than the other 3 ranks that hold it; 2 more parameters differ. ")


def test_a_frozen_parameter_is_compared_too():
    make = partial(lambda: frozen(chain(*[partial(nn.Linear, 4, 4)] * 3), of_blocks(0)))

    def work(engine):
        engine.compare_replicas()
        if engine.coordinates.data:
            flip(engine.named_parameters()["b0.weight"])
        with raises("replicas-differ", "b0.weight"):
            engine.compare_replicas()

    on_mesh(make, Mesh(data=2), work)


@pytest.mark.parametrize(("mesh", "scheme"), quick(1, [
    (Mesh(row=2, col=2), "stationary"), (Mesh(row=2, col=2), "summa"), (Mesh(data=2, row=2, col=2), "stationary"),
    (Mesh(col=2, data=2), "megatron"), (Mesh(col=4), "sequence")]), ids=str)
def test_good_runs_on_rows_and_columns_agree(mesh, scheme):
    """Norms and biases are on several ranks, weights on one rank of each replica; tied ends are cut differently."""
    batch = token_batches(mesh, count=2)

    def work(engine):
        for _ in range(3):
            engine.train_batch(split_share(engine, batch))
            engine.compare_replicas()

    on_tensor_mesh(tiny_gpt, mesh, work, scheme=scheme, optim=Optim(bucket_size=300, shard=True))


def test_copies_within_a_stage_are_compared():
    """A norm's weight is the same on the rows of a column; each column has its own part."""
    mesh = Mesh(row=2, col=2)
    text = compared(partial(tiny_gpt), mesh, {3: ["head.norm.weight"]}, run=on_tensor_mesh, optim=OPTIM(),
                    batch=token_batches(mesh, count=1), batch_share=split_share)
    assert text.startswith("parameter head.norm.weight: differs between replica 0, row 0, col 1 (rank 1) and replica "
                           "0, row 1, col 1 (rank 3), and too few agree")


def test_a_weight_of_one_rank_only_has_nothing_to_differ_from():
    def work(engine):
        if engine.world.rank == 3:
            flip(engine.named_parameters()["layer0.mlp.fc1.weight"])
        engine.compare_replicas()

    on_tensor_mesh(tiny_gpt, Mesh(row=2, col=2), work, optim=Optim(bucket_size=300))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_bit_of_any_element_counts(dtype):
    weights = torch.arange(PIECE) * 2 + 1
    tensor = torch.randn(PIECE + 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(checksum(tensor, weights))
    width = 8 * tensor.element_size()
    for place, bit in ((0, 0), (5, width - 1), (PIECE - 1, 3), (PIECE, width // 2), (PIECE + 69, 0)):
        changed = tensor.clone()
        flip(changed, place, bit if bit < width - 1 else 0)
        assert int(checksum(changed, weights)) != before
    negative, swapped = tensor.clone(), tensor.clone()
    negative[7] *= -1
    swapped[[1, 2]] = tensor[[2, 1]]
    assert before not in (int(checksum(negative, weights)), int(checksum(swapped, weights)))
    two = tensor.clone()  # pieces are distinguished
    two[3], two[PIECE + 3] = tensor[PIECE + 3], tensor[3]
    assert int(checksum(two, weights)) != before
    assert int(checksum(tensor.view(-1, 2).t().contiguous().t().reshape(-1), weights)) == before


def test_nan_and_the_sign_of_zero_have_bits_too():
    weights = torch.tensor([1, 3])
    values = [torch.tensor([0.0, torch.nan]), torch.tensor([-0.0, torch.nan]), torch.tensor([0.0, 1.0])]
    assert len({int(checksum(value, weights)) for value in values}) == 3
    assert int(checksum(values[0].clone(), weights)) == int(checksum(values[0], weights))
    assert int(checksum(torch.tensor(2.0), weights)) == int(checksum(torch.tensor([2.0]), weights))
    assert int(checksum(torch.empty(0), weights)) == 0
