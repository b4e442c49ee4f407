"""Splits of datasets on the Hugging Face hub, as rows by number, read by the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ranvier.data.publish import Progress
from ranvier.errors import DataError


def load_split(name: str, split: str, progress: Progress, instead: str) -> Any:
    """A split of the dataset NAME or NAME:CONFIGURATION: a sequence of rows, which are dicts.

    instead: what else the user could give, for errors. DataError if the package `datasets` is missing, or if the split
    cannot be read from the hub.
    """
    path, _, configuration = name.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise DataError("needs the package `datasets`, which is not installed", code="datasets-missing",
                        where="data.train", value=name,
                        remedy=f"Run pip install 'ranvier[hub]', or give {instead}.") from error
    progress(f"reading {name} ({split}) from the Hugging Face hub")
    try:
        return datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:  # whatever the package, the hub or the network raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError("could not be read from the Hugging Face hub", code="hub-data-unreadable",
                        where=f"data.train {name}", value=reason,
                        remedy=f"Check the connection, or give {instead}.") from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """A context in which rows that are not as expected are a DataError. name: of the dataset."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError("has rows that are not as expected", code="hub-rows", where=f"data.train {name}",
                        value=f"{type(error).__name__}: {error}",
                        remedy="The dataset on the hub has changed: give a file in its format.") from error
