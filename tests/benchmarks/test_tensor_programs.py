"""The programs that count bytes, memory and time on the tensor mesh, in their quick form: they run, and their files are
complete. Speed is not tested."""

import json
import random

import pytest

from benchmarks.tensor import counted, limits, scaling
from ranvier.config.run import Transformer
from ranvier.planner.count import laid_out
from tests.covering import first
from tests.mpi import NEEDS_MPI

CIRCUMSTANCES = {"date", "commit", "machine", "versions", "command"}


def results(path):
    found = json.loads(path.read_text())
    assert found.keys() >= CIRCUMSTANCES
    return found


@pytest.mark.slow
def test_counted(tmp_path, capsys):
    path = tmp_path / "counted.json"
    assert counted.main(["--quick", "--only", "* 2x3", "* 1x4", "--output", str(path)]) == 0
    text, found = capsys.readouterr().out, results(path)
    assert "counted   payload by ring conventions" in text and "96 of 96 counts equal" in text
    assert len(found["rows"]) == 8 * 12 and found["different"] == 0
    paper = next(row["paper"] for row in found["rows"] if row["part"] == "layer" and row["checkpointed"]
                 and row["scheme"] == "megatron")
    activation = 4 * 24 * 576 * 576
    assert paper["megatron"] == {"forward": 3 * activation, "backward": 6 * activation}
    assert paper["summa"]["forward"] == (7 * activation + 12 * 4 * 576**2) / 2


def test_a_difference_is_told(tmp_path, monkeypatch, capsys):
    right = counted.formulas

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return found | {"qkv": found["fc1"]}

    monkeypatch.setattr(counted, "formulas", wrong)
    assert counted.main(["--quick", "--only", "stationary 2x2", "--output", str(tmp_path / "counted.json")]) == 1
    assert "10 of 12 counts equal" in capsys.readouterr().out


@pytest.mark.slow
def test_limits(tmp_path, capsys):
    path = tmp_path / "limits.json"
    limits.main(["--quick", "--ranks", "4", "9", "--output", str(path)])
    found = results(path)
    assert path.with_suffix(".png").stat().st_size > 5_000
    for row in found["kept"]:
        assert abs(row["rest"]) < 1e-6 * row["counted"], row  # the docstring explains all
        assert row["again"] >= row["counted"] > 0
    assert {tuple(row["mesh"]) for row in found["kept"]} == {(1, 4), (2, 2), (4, 1), (1, 9), (3, 3), (9, 1)}
    rows = found["limits"]
    assert [(row["name"], row["ranks"]) for row in rows] == [(name, ranks) for ranks in (4, 9) for name in (
        "megatron", "megatron-sequence", "summa", "stationary", "stationary best")]
    budget = found["budget_gib"] * 2**30
    for row in rows:
        assert sum(row["bytes"].values()) <= budget
        assert row["batch"] > 0 and row["batch"] % row["mesh"][0] == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(("scheme", "row", "col"), first(
    [("megatron", 1, 4)], [("stationary", 2, 2), ("summa", 2, 2), ("megatron", 1, 4)]))
def test_memory_of_many_layers_is_that_of_check(scheme, row, col):
    config = Transformer(num_layers=5, hidden=32, heads=4, vocab=512, sequence=16)
    run = limits.run_of(scheme, row, col, config, 4)
    assert limits.needed(scheme, row, col, config, 4) == dict(laid_out(run)[1][0].device)


def test_a_mesh_that_divides_nothing_has_no_limit():
    config = Transformer(num_layers=2, hidden=36, heads=6, vocab=512, sequence=16)
    found = limits.limit("megatron", 1, 4, config, 2**30)
    assert found["batch"] is None and "does not divide model.heads" in found["problems"][0]


def test_the_largest_that_fits():
    draw = random.Random(0)
    for _ in range(300):
        start, slope, curve = draw.uniform(0, 10), draw.uniform(0.01, 5), draw.choice([0, 0.1])
        budget, calls = draw.uniform(0, 100), []

        def size(steps, start=start, slope=slope, curve=curve, calls=calls):
            calls.append(steps)
            return start + slope * steps + curve * steps**2

        found = limits.largest(size, budget)
        assert (found == 0 or size(found) <= budget) and size(found + 1) > budget
        assert curve or len(calls) < 10


@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.slow
def test_scaling(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    scaling.main(["--quick", "--kind", "weak", "--only", "stationary-2x2", "--output", str(path)])
    found = results(path)
    assert [entry["name"] for entry in found["contenders"]] == ["one", "stationary-2x2"]
    one, four = found["contenders"]
    assert one["efficiency"]["step"]["ranks"]["middle"] == one["efficiency"]["processor"]["middle"] == 1
    assert one["received"] == {"forward": 0, "backward": 0} and four["received"]["forward"] > 0
    assert four["efficiency"]["forward"]["cores"]["middle"] >= four["efficiency"]["forward"]["ranks"]["middle"] > 0
    assert "of processor time" in capsys.readouterr().out


@pytest.mark.slow
def test_isoefficiency():
    """Megatron's bytes grow as the paper says, Optimus' as its trees; with rings the logarithm disappears."""
    found = {row["name"]: row for row in scaling.isoefficiency(scaling.MANY_RANKS, 6144, 512)}
    for row in found.values():
        ratios = [point["bytes_per_flop"] for point in row["points"] if "bytes_per_flop" in point]
        assert ratios == pytest.approx(ratios[:1] * len(ratios), rel=0.01)
    assert found["megatron 1xp"]["exponent"] == pytest.approx(3, abs=0.2)
    assert found["megatron 1xp"]["last"] == pytest.approx(3, abs=0.05)
    optimus, claim = found["Table 1 Optimus"], found["(sqrt(p) log p)^3"]
    assert optimus["exponent"] == pytest.approx(claim["exponent"], abs=0.05)
    for name in ("summa qxq", "stationary qxq", "stationary best"):
        assert 1.5 < found[name]["last"] < 1.65 < claim["last"]
