"""Other spellings of settings and values, as in papers, TRL and PEFT. Files that Ranvier writes have its own spellings.
Pure."""

from __future__ import annotations

NAMES = {"memory.checkpoint": "memory.recompute"}
"""Other name of a setting -> its name; dotted, with underscores."""
_VALUES: dict[tuple[str, object], str] = {
    ("memory.recompute", "paper"): "axonn", ("data.task", "sft"): "chat", ("data.task", "dpo"): "preference",
    ("lora.targets", "all-linear"): "layer*"}


def canonical(name: str, value: object) -> tuple[str, object]:
    """A setting's canonical name, and the canonical spelling of its value."""
    name = NAMES.get(name, name)
    if isinstance(value, (list, tuple)):
        return name, [_VALUES.get((name, part), part) if isinstance(part, str) else part for part in value]
    if isinstance(value, str):  # a flag's text may be a list
        return name, ",".join(_VALUES.get((name, part), part) for part in value.split(","))
    return name, value
