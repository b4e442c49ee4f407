"""Work on pieces of data: by how many processes."""

import pytest

from ranvier.data.worker_processes import map_in_order


@pytest.mark.parametrize(("pieces", "processes"), [([], 3), ([4], 3), ([4, 5, 6], 1)])
def test_one_piece_or_one_process_is_work_of_this_process(pieces, processes):
    """No other process could have this function."""
    assert list(map_in_order(lambda piece: piece + 1, iter(pieces), processes)) == [piece + 1 for piece in pieces]
