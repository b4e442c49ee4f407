"""Any content of a folder or a name is read as the text that it is, or refused with a RanvierError."""

import sys
import types

import pytest

from tests.fuzz.corpora import FUZZERS, names


def load_dataset(name, *args, **options):
    raise ConnectionError(f"{name!r}: no route to the hub\nand more")


@pytest.fixture
def no_hub(monkeypatch):
    """The package is installed and the hub is unreachable. `make test-all` also runs the real package offline,
    below."""
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_corpora(no_hub, tmp_path, monkeypatch, fuzzer, rounds):
    monkeypatch.chdir(tmp_path)
    count = rounds * FUZZERS[fuzzer]
    assert fuzzer(tmp_path / "texts", count) >= count


@pytest.mark.slow
def test_names_with_the_real_package_offline(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    assert names(tmp_path / "texts", 60) >= 60
