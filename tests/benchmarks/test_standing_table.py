"""The standing table: every row of every source is a possible run, and statements about rows are right."""

import json
import tomllib
from pathlib import Path
from statistics import median

import pytest
import tomli_w

from benchmarks.planner.standing import Row, _tree, settings_of, simulated, sources, spearman, summary
from ranvier.cost.cluster_files import cluster_names, load_cluster, write_cluster
from ranvier.planner.report import LONGER_THAN_PREDICTED, PUBLISHED_ERROR, PUBLISHED_STEPS


def row(published, predicted):
    return Row(source="s", what="w", published=published, predicted=predicted, foreign=(), calibrated=False, fits=True)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_rows_say_all_that_a_run_needs(path):
    source = tomllib.loads(path.read_text())
    assert source["cluster"] in cluster_names() and source["unit"] in ("s/step", "tokens/s/device")
    assert source["name"] and source["url"] and isinstance(source["foreign"], list)
    for values in source["rows"]["values"]:
        made = dict(zip(source["rows"]["columns"], values, strict=True))
        settings, what = settings_of(source, made)
        sizes = [settings.get(f"mesh.{axis}", 1) for axis in ("data", "pipe", "row", "col")]
        assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == made["devices"] and made["published"] > 0
        assert settings["batch.microbatch-size"] % sizes[2] == 0 and what.startswith(made["model"])


def test_orders_and_errors_of_a_source():
    found = summary("s", [row(1.0, 1.1), row(2.0, 1.8), row(4.0, 1.0), row(2.1, 1.7)])
    assert found.median_error == pytest.approx((0.1 + 0.4 / 2.1) / 2)
    assert found.ordered == pytest.approx(2 / 5)  # the pair that is 5 % apart does not count
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1.0 and spearman([1.0, 2.0], [1.0, 2.0]) is None


def test_the_command_waits_for_messages_where_the_source_did(tmp_path):
    """A run that it refuses, such as float8 on sharded layers, gives no row."""
    settings = {"precision": "bf16", "model.num-layers": 2, "model.hidden": 256, "model.heads": 4, "model.vocab": 512,
                "model.sequence": 64, "tensor.scheme": "megatron", "mesh.col": 2, "mesh.pipe": 2, "mesh.data": 1,
                "batch.global-size": 8, "batch.microbatch-size": 2}
    cluster = tmp_path / "cluster.toml"
    write_cluster(load_cluster("h100"), cluster)
    for float8 in (False, True):
        (tmp_path / f"{float8}.toml").write_text(tomli_w.dumps(_tree({**settings, "model.float8": float8})))
    beside, waiting = (simulated(tmp_path / "False.toml", cluster, flag) for flag in (False, True))
    assert not beside["excess"] and waiting["step_seconds"] > 1.05 * beside["step_seconds"]
    assert simulated(tmp_path / "True.toml", cluster, False) is None


def test_a_plan_says_what_the_newest_result_holds():
    """How far predictions are off, and how many published steps took longer."""
    newest = max((Path(__file__).parents[2] / "benchmarks" / "results" / "planner").glob("standing-*.json"))
    found = json.loads(newest.read_text())
    errors = [row["error"] for row in found["rows"] if row["error"] is not None and not row["calibrated"]]
    longer = sum(error < 0 for error in errors) / len(errors)
    assert len(errors) == PUBLISHED_STEPS
    assert (round(median(map(abs, errors)), 2), round(longer, 2)) == (PUBLISHED_ERROR, LONGER_THAN_PREDICTED)
