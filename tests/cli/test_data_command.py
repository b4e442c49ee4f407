"""`ranvier data prepare` writes what runs read, with any number of processes."""

from __future__ import annotations

import pytest

from ranvier.cli.main import run_command
from ranvier.config.run import Data, Run, Transformer
from ranvier.data.prepare import load_cached, prepare


def flags(tmp_path, cache):
    if not (tmp_path / "texts").exists():
        (tmp_path / "texts").mkdir()
        for number in range(30):
            (tmp_path / "texts" / f"{number}.txt").write_text(f"text number {number}\n" * (20 + number))
    return ["gpt-tiny", "--data.corpus", str(tmp_path / "texts"), "--data.cache-dir", str(tmp_path / cache),
            "--model.vocab", "300", "--model.sequence", "64", "--data.packing"]


def run_of(tmp_path, cache):
    return Run(model=Transformer(vocab=300, sequence=64), data=Data(
        corpus=str(tmp_path / "texts"), cache_dir=tmp_path / cache, packing=True))


def test_a_run_finds_what_was_prepared(tmp_path, capsys):
    assert run_command(["data", "prepare", *flags(tmp_path, "cache"), "--processes", "1"]) == 0
    out = capsys.readouterr().out
    lines = []
    data = prepare(run_of(tmp_path, "cache"), lines.append)
    assert lines == [] and data.about in out and str(tmp_path / "cache") in out
    assert f"{data.epoch_samples:,} samples in an epoch" in out
    assert run_command(["check", *flags(tmp_path, "cache")]) == 0
    assert "padding: " in capsys.readouterr().out
    assert load_cached(run_of(tmp_path, "cache")).padding == data.padding
    assert load_cached(run_of(tmp_path, "none")) is None


def test_problems_are_told_before_anything_is_written(tmp_path, capsys):
    given = flags(tmp_path, "cache")
    assert run_command(["data", "prepare", *given, "--data.corpus", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err and not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("ranvier.data.lm.PIECE_CHARACTERS", 1000)
    for cache, processes in (("one", "1"), ("two", "2")):
        assert run_command(["data", "prepare", *flags(tmp_path, cache), "--processes", processes]) == 0
    assert prepare(run_of(tmp_path, "one")).fingerprint == prepare(run_of(tmp_path, "two")).fingerprint
