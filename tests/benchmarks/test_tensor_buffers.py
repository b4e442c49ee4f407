"""Outputs and their gradients share memory: live bytes are those of Optimus' method 1, counted, not timed."""

import json

import pytest

from benchmarks.tensor import buffers


@pytest.mark.slow
def test_live_bytes_are_those_of_the_papers_method_1(tmp_path):
    entries = buffers.main(["--output", str(tmp_path / "buffers.json")])
    summa = next(entry for entry in entries if entry["scheme"] == "summa")
    paper = sum(buffers.PAPER.values())
    # statistics of norms and attention come on top: a few numbers a token
    assert paper - buffers.METHOD_1 <= summa["units"]["working"] < paper - buffers.METHOD_1 + 0.5
    assert summa["units"]["inputs"] == 2
    assert json.loads((tmp_path / "buffers.json").read_text())["entries"] == entries
