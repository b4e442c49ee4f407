"""Any content of a file is read as what it is or refused with a RanvierError, and takes memory in proportion to its
size."""

import importlib
from contextlib import suppress

import pytest

from tests.fuzz.checkpoints import KINDS
from tests.fuzz.inputs import try_one, within
from tests.fuzz.readers import READERS, Place, fuzz, megabytes, peak_bytes

MOST_GROWTH = 100 << 20


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import transformers outside of any input's time limit: it takes long if other processes use the cores."""
    with suppress(ImportError):
        importlib.import_module("transformers.models.bert.modeling_bert")


@pytest.mark.parametrize("reader", [pytest.param(reader, marks=pytest.mark.slow if reader.is_slow else ())
                                    for reader in READERS], ids=lambda reader: reader.name)
@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_bad_files(tmp_path, reader, rounds):
    assert fuzz(reader, tmp_path, rounds * reader.share) >= rounds * reader.share


@pytest.mark.parametrize("name", ["a tokenizer of ours", "train/about.json of the cache",
                                  "train/tokens.npy of the cache"])
def test_something_else_than_a_file(tmp_path, name):
    place = Place(next(reader for reader in READERS if reader.name == name), tmp_path)
    for kind in KINDS:
        try_one(place.read_something_else, kind)


@pytest.mark.parametrize("name", ["dotted", "text as value 1", "digits as value 2", "tables"])
def test_a_recipe_of_an_odd_shape_takes_little(tmp_path, name):
    reader = next(reader for reader in READERS if reader.name == "run.toml")
    place = Place(reader, tmp_path)
    peak_bytes(place, place.content)
    with within(30.0):
        assert peak_bytes(place, dict(megabytes("toml", place.content))[name]) < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_megabyte_takes_less_than_a_hundred(tmp_path, reader):
    place = Place(reader, tmp_path)
    peak_bytes(place, place.content)  # after this, imports and caches are complete
    for name, content in megabytes(reader.form, place.content):
        with within(60.0):
            growth = peak_bytes(place, content)
        assert growth < MOST_GROWTH, f"{name}: {growth / 2**20:.0f} MiB"
