"""The planner's benchmarks run, and their files say what their pages need."""

import json
import sys

import pytest

from benchmarks.planner import measured, scaling


def run(program, path, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["program", *flags, "--output", str(path)])
    program.main()
    return json.loads(path.read_text())


@pytest.mark.slow
def test_measured(tmp_path, monkeypatch, capsys):
    found = run(measured, tmp_path / "measured.json", monkeypatch, "--quick", "--cluster", "laptop")
    assert len(found["rows"]) >= 2 and all(row["measured"] > 0 and row["peak_bytes"] > 0 for row in found["rows"])
    (choice,) = found["choices"]
    assert choice["ranks"] == 2 and choice["choice_over_best"] >= 1.0
    assert "rank correlation" in capsys.readouterr().out


def test_the_page_of_scaling(tmp_path):
    """Table and picture of points; the points themselves take minutes each."""
    points = [scaling.Point(scaling=kind, policy=policy, ranks=ranks, batch=64, plan="data 2", device_gib=9.0, days=1.0,
                            limit="the bubble 11%", search_seconds=1.0,
                            seconds=dict.fromkeys(scaling.CONDITIONS, 2.0),
                            utilisation=dict.fromkeys(scaling.CONDITIONS, 0.25))
              for kind in ("strong", "weak") for policy in scaling.POLICIES for ranks in (8, 16)]
    text = scaling.markdown(points)
    assert text.count("| weak |") == 4 and "| 25.0 % | 25.0 % | 25.0 % | 25.0 % | 9 | 1.00 | the bubble 11% |" in text
    scaling.draw(points, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
