"""A run. This package is called as a function, too: `ranvier.train(run, recipe, world)`, of `ranvier.train.loop`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    __module__ = "ranvier.train.loop"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, object]:
        """See `ranvier.train.loop.train`."""
        from ranvier.train.loop import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
