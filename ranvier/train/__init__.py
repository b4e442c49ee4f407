"""A training run. The package is also callable: `ranvier.train(run, recipe, world)` is `ranvier.train.loop.train`."""

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
