"""Ten thousand bad inputs of every kind in one process: none hangs, fills or ends it, or is taken for a good one."""

import sys
import types

import pytest

from tests.fuzz import checkpoints, corpora, readers, settings, task_files
from tests.fuzz.test_bad_corpora import load_dataset

ROUNDS = 60
LEAST = 10_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    places = {checkpoints: checkpoints.Whole(tmp_path / "checkpoints"), corpora: tmp_path / "texts",
              settings: tmp_path, task_files: tmp_path / "tasks"}
    tried = {}
    for module, place in places.items():
        for fuzzer, share in module.FUZZERS.items():
            tried[f"{module.__name__}.{fuzzer.__name__}"] = fuzzer(place, ROUNDS * share)
    for number, reader in enumerate(readers.READERS):
        tried[reader.name] = readers.fuzz(reader, tmp_path / str(number), ROUNDS * reader.share)
    print(tried)
    assert sum(tried.values()) >= LEAST
