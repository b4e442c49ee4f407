"""The benchmark of fine-tuning on sentences with a tiny model: contenders train the same, and lengths are SST-2's."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks.finetune import sentences
from benchmarks.finetune.contenders import CONTENDERS, Work, loader_of, make_sentences


def test_lengths_are_those_of_sst2(tmp_path):
    work = Work(model=tmp_path, vocab=30522, sentences=512, batch=32, learning_rate=1e-4)
    data = make_sentences(work)
    lengths = data.sample_lengths
    assert lengths.mean() == pytest.approx(13.5, abs=0.2) and lengths.min() == 3 and 45 <= lengths.max() <= 64
    inputs = data.inputs(np.arange(512))
    assert inputs["mask"].sum(1).tolist() == lengths.tolist() and inputs["ids"].max() < 30522
    assert ((inputs["ids"] > 0) == inputs["mask"].bool()).all()
    loader = loader_of(work)
    taken = [sample for step in range(work.steps) for sample in loader.samples(step)[0].tolist()]
    assert sorted(taken) == list(range(512))


@pytest.mark.slow
def test_contenders_train_the_same(tmp_path, capsys):
    path = tmp_path / "found.json"
    rows = sentences.measure(sentences.parse([
        "--quick", "--layers", "2", "--hidden", "32", "--vocab", "200", "--sentences", "32", "--batch", "8",
        "--learning-rate", "3e-3", "--output", str(path)]))
    assert [row["name"] for row in rows] == [one.name for one in CONTENDERS]
    for row in rows:
        assert row["first_losses"] == pytest.approx(rows[0]["first_losses"], rel=1e-4)
        assert row["final_loss"] == pytest.approx(rows[0]["final_loss"], rel=1e-3)
        assert row["speed_over_transformers"]["least"] > 0 and len(row["rounds"]) == 2
    assert abs(rows[0]["final_loss"] - np.mean(rows[0]["first_losses"])) > 1e-3  # the updates matter
    found = json.loads(path.read_text())
    assert found["contenders"] == rows and {"date", "commit", "machine", "command"} <= found.keys()
    assert "losses differ" not in capsys.readouterr().out


def test_no_ratio_where_losses_differ(capsys):
    rows = {name: {"ranks": 1, "first_losses": [loss], "rounds": [{"sentences_per_second": 1.0, "losses": [loss]}]}
            for name, loss in (("transformers", 0.5), ("Ranvier", 0.6))}
    sentences.report(rows, {"tokens": 1.0, "longest": 1, "positions": 1.0}, compared=True)
    assert rows["Ranvier"]["speed_over_transformers"] is None and "losses differ" in capsys.readouterr().out


def test_options_that_do_not_fit_each_other():
    with pytest.raises(SystemExit):
        sentences.parse(["--sentences", "100", "--batch", "32"])
