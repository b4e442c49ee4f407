"""Several stages on a rank: the same gradients as one process has, whatever the placement."""

import pytest

from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from tests.pipeline.parity import assert_parity, small_gpt, tokens

PLACEMENTS = ("v-shape", "interleaved")


def pipeline(per_rank, placement, **changed):
    return Pipeline(stages_per_rank=per_rank, placement=placement, **changed)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mesh, per_rank, counts", [
    (Mesh(pipe=2), 2, [[2, 1, 2, 1, 2]]),
    (Mesh(pipe=3), 2, [[1]]),
    (Mesh(pipe=2), 3, [[2, 2, 1]]),
    (Mesh(pipe=2, data=2), 2, [[2, 1, 2], [1, 1, 1]]),
], ids=str)
def test_gradients_equal_plain_pytorch(mesh, per_rank, counts, placement):
    assert_parity(small_gpt, tokens(counts, lengths=(6, 4), ignored=0.3), mesh, pipeline=pipeline(per_rank, placement))
