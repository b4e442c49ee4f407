"""The two other spellings of settings that papers and scripts use: `memory.checkpoint` for `memory.recompute`, and its
value `paper` for `axonn`. What is written uses the first spelling. Pure."""

from __future__ import annotations

NAMES = {"memory.checkpoint": "memory.recompute"}
"""Other name of a setting -> its name; dotted, with underscores."""
_VALUES: dict[tuple[str, object], str] = {("memory.recompute", "paper"): "axonn"}


def canonical(name: str, value: object) -> tuple[str, object]:
    """A setting's own name, and its value's own spelling."""
    name = NAMES.get(name, name)
    return name, _VALUES.get((name, value), value) if isinstance(value, str) else value
