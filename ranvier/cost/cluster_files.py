"""Cluster files: shipped ones by name, users' files, and the file that `ranvier doctor --measure` writes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from ranvier.cost.hardware import Cluster
from ranvier.errors import ConfigError
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import parse_toml, read_bytes

_SHIPPED = resources.files("ranvier") / "cost" / "clusters"
_ADAPTER = TypeAdapter(Cluster)
_MOST_BYTES = 1 << 18
_MOST_FAULTS = 12
"""Largest number of faults that are reported in addition to the first."""
_BANDWIDTH = (1e5, inf, "bytes a second", "400 GB/s are 400e9")
_UNITS = {"memory_bytes": (1e7, inf, "bytes", "80 GB are 80e9"), "bandwidth": _BANDWIDTH, "single": _BANDWIDTH,
          "memory_bandwidth": _BANDWIDTH, "update_bandwidth": _BANDWIDTH,
          "watts": (1.0, 1e5, "watts", "0.7 kW are 700"), "peak_flops": (1e6, inf, "FLOP/s", "989 TFLOP/s are 989e12"),
          **dict.fromkeys(("latency_seconds", "operation_seconds", "collective_seconds", "chunk_seconds"),
                          (0.0, 1.0, "seconds", "6 us are 6e-6"))}
"""Name in a file -> the smallest and largest value of a real machine, the unit, and an example."""
_SAID = {"missing": "is missing", "unexpected_keyword_argument": "is not a setting of a cluster",
         "finite_number": "must be a finite number", "value_error": "should be a number"}


def cluster_names() -> list[str]:
    """The shipped clusters."""
    return sorted(entry.name.removesuffix(".toml") for entry in _SHIPPED.iterdir() if entry.name.endswith(".toml"))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, or a TOML file. ConfigError with the faults for anything else."""
    if name in cluster_names():
        return _read((_SHIPPED / f"{name}.toml").read_bytes(), f"cluster {name}")
    path = Path(name)
    if path.suffix != ".toml":
        near = difflib.get_close_matches(name.lower(), cluster_names(), n=1, cutoff=0.6)
        raise ConfigError("is neither a shipped cluster nor a .toml file", code="unknown-cluster", where="cluster",
                          value=name, remedy=f"{f'Did you mean {near[0]}? ' if near else ''}Shipped are: "
                          f"{', '.join(cluster_names())}. `ranvier doctor --measure --out FILE.toml` writes one of "
                          "this machine.")
    try:
        content = read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", code="cluster-unreadable",
                          where="cluster", value=name,
                          remedy="Name a TOML file that exists and is readable.") from error
    cluster = _read(content, f"file {name}")
    _check_units(asdict(cluster), "", f"file {name}")
    return cluster


def _read(text: bytes, origin: str) -> Cluster:
    try:
        tree = parse_toml(text.decode())
    except ValueError as error:
        raise ConfigError(f"is not valid TOML: {error}", code="cluster-not-toml", where=origin,
                          remedy="Correct the file.") from error
    return cluster_of(tree, origin)


def cluster_of(tree: Mapping[str, object], origin: str) -> Cluster:
    """A nested mapping, like that of a TOML file, as a cluster. ConfigError names its faults."""
    try:
        cluster = _ADAPTER.validate_python(tree, strict=False)
    except ValidationError as error:
        raise first_fault(error, origin) from error
    if not cluster.device.rates:
        raise ConfigError(f"is empty, in {origin}", code="cluster-without-rates", where="cluster's device.rates",
                          remedy="Give at least one number format: fp32 = { peak_flops = 1e12 }.")
    if cluster.device.reserved_bytes >= cluster.device.memory_bytes:
        raise ConfigError(f"leaves nothing of the device's {cluster.device.memory_bytes:,} bytes, in {origin}",
                          code="cluster-without-memory", where="cluster's device.reserved_bytes",
                          value=cluster.device.reserved_bytes,
                          remedy="Give what driver, libraries and fragments take of them.")
    return cluster


def _check_units(tree: Mapping[str, Any], place: str, origin: str) -> None:
    """Raise a ConfigError for a number in a user's file that no device has, for example because it is in gigabytes."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _check_units(value, f"{place}{name}.", origin)
        elif name in _UNITS and value is not None and not _UNITS[name][0] <= value <= _UNITS[name][1]:
            raise ConfigError(f"is out of range for {_UNITS[name][2]}, in {origin}", code="cluster-unit",
                              where=f"cluster's {place}{name}", value=value,
                              remedy=f"Give {_UNITS[name][2]}: {_UNITS[name][3]}.")


def first_fault(error: ValidationError, origin: str) -> ConfigError:
    """The first of a cluster's faults, and the others in its remedy."""
    faults = error.errors()
    first = faults[0]
    (name, what), *others = [(".".join(str(part) for part in fault["loc"] if part != "[key]"), _SAID.get(
        fault["type"], fault["msg"].replace("Input should", "should"))) for fault in faults]
    told = [f"{other} {text}" for other, text in others[:_MOST_FAULTS]] + (
        [f"{len(others) - _MOST_FAULTS} more"] if len(others) > _MOST_FAULTS else [])
    more = f"Other faults: {', '.join(told)}. " if told else ""
    value = first["input"] if isinstance(first["input"], (str, int, float, bool)) else None
    return ConfigError(f"{what}, in {origin}", code="cluster-malformed",
                       where=f"cluster's {name}" if name else "cluster", value=value,
                       remedy=f"{more}Compare with a shipped one, for example {_SHIPPED}/laptop.toml;  docs/planner.md "
                              "has every setting and its unit.")


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a file that `load_cluster` reads."""
    write_atomically(path, tomli_w.dumps(_without_none(asdict(cluster))))


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_none(item) if isinstance(item, Mapping) else item for key, item in tree.items()
            if item is not None}
