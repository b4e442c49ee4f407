"""The pictures that an elastic run writes."""

import json

import pytest

from tests.elastic.runs import BY_HAND, always, run_all, tiny

pytestmark = pytest.mark.pictures


@pytest.mark.slow
def test_what_the_run_leaves_to_look_at(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND)
    run_all(run)
    assert (run.run_dir / "course.png").stat().st_size > 10_000
    trace = json.loads((run.run_dir / "timeline.json").read_text())["traceEvents"]
    named = [event["name"] for event in trace if event.get("cat") == "transition"]
    assert len(named) == 2 and "froze layers 0-1" in named[0]
