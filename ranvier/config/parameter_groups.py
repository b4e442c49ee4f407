"""Learning rate and weight decay of each parameter: groups by the parameters' global names.

    --optim.groups "*.bias:1:0, embedding.*:0.5:0.01"       pattern : factor on the learning rate : weight decay

The first group that matches applies; parameters without a group have the run's settings. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ranvier.config.run import Optim
from ranvier.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters whose names match `pattern` ("*" and "?" as in file names), updated with the same settings."""

    pattern: str
    learning_rate_factor: float
    weight_decay: float


def parse(text: str) -> Group:
    """Parse one group in a run's notation. ConfigError if it is not PATTERN:FACTOR:DECAY."""
    pattern, *numbers = text.strip().rsplit(":", 2)
    try:
        factor, decay = map(float, numbers)
    except ValueError:
        factor = decay = -1.0
    if not pattern or not 0.0 <= factor < float("inf") or not 0.0 <= decay < float("inf"):
        raise ConfigError("is not PATTERN:FACTOR:DECAY with two numbers of at least 0",
                          code="malformed-parameter-group", where="optim.groups", value=text,
                          remedy="Write for example '*.bias:1:0': factor on the learning rate, then weight decay.")
    return Group(pattern=pattern, learning_rate_factor=factor, weight_decay=decay)


def group_of(optim: Optim, name: str, dims: int) -> Group:
    """The group of a parameter with this global name and number of dims."""
    for group in map(parse, optim.groups):
        if fnmatchcase(name, group.pattern):
            return group
    decays = optim.decay == "all" or dims > 1
    return Group(pattern="*", learning_rate_factor=1.0, weight_decay=optim.weight_decay if decays else 0.0)


def problems(optim: Optim, names: Iterable[str] = ()) -> Iterator[ConfigError]:
    """Problems of groups that cannot be parsed, or, if names are given, match no parameter."""
    names = list(names)
    for text in optim.groups:
        try:
            group = parse(text)
        except ConfigError as problem:
            yield problem
            continue
        if names and not any(fnmatchcase(name, group.pattern) for name in names):
            near = get_close_matches(group.pattern, names, n=3, cutoff=0.0)
            yield ConfigError("fits no parameter of the model", code="parameter-group-without-match",
                              where="optim.groups", value=text, remedy=f"The nearest names are {', '.join(near)}.")
