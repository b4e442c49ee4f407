"""How many processes work on pieces of data."""

import pytest

from ranvier.data.worker_processes import map_in_order


@pytest.mark.parametrize(("pieces", "processes"), [([], 3), ([4], 3), ([4, 5, 6], 1)])
def test_one_piece_or_one_process_is_work_of_this_process(pieces, processes):
    """The function is a lambda, which no other process could load."""
    assert list(map_in_order(lambda piece: piece + 1, iter(pieces), processes)) == [piece + 1 for piece in pieces]
