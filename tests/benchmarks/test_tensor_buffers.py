"""Live bytes compared with those of Optimus' buffers and its method 1, counted, not timed."""

import json

import pytest

from benchmarks.tensor import buffers


@pytest.mark.slow
def test_live_bytes_are_fewer_than_in_the_papers_buffers(tmp_path):
    entries = buffers.main(["--output", str(tmp_path / "buffers.json")])
    summa = next(entry for entry in entries if entry["scheme"] == "summa")
    paper = sum(buffers.PAPER.values())
    assert paper - buffers.METHOD_1 <= summa["units"]["working"] < paper - buffers.METHOD_1 + 0.5
    assert summa["units"]["inputs"] == 2
    assert json.loads((tmp_path / "buffers.json").read_text())["entries"] == entries
