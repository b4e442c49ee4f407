"""Splits of data sets on the Hugging Face hub, as rows by number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ranvier.data.publish import Progress
from ranvier.errors import DataError


def load_split(name: str, split: str, progress: Progress, instead: str) -> Any:
    """The split of the data set NAME or NAME:CONFIGURATION: a sequence of rows, which are dicts.

    instead: what else the user could give. DataError when the package `datasets` or the hub is out of reach.
    """
    path, _, configuration = name.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise DataError("needs the package `datasets`, which is not installed", where="data.train", value=name,
                        remedy=f"Run pip install 'ranvier[hub]', or give {instead}.") from error
    progress(f"reading {name} ({split}) from the Hugging Face hub")
    try:
        return datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:  # whatever the package, the hub or the network raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError("could not be read from the Hugging Face hub", where=f"data.train {name}", value=reason,
                        remedy=f"Check the connection, or give {instead}.") from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Rows that are not as expected, inside, are a DataError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError("has other rows than expected", where=f"data.train {name}",
                        value=f"{type(error).__name__}: {error}",
                        remedy="The hub's data set has changed; give a file in its form.") from error
