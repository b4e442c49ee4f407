"""The folder of fetched files, tokenizers and prepared samples, which runs of one user share."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from ranvier.config.run import Run


def cache_folder(run: Run) -> Path:
    """`data.cache_dir`, or the cache folder of the user."""
    return run.data.cache_dir.expanduser() if run.data.cache_dir else user_cache_folder()


def user_cache_folder() -> Path:
    """The cache folder of the user."""
    return Path(platformdirs.user_cache_dir("ranvier"))
