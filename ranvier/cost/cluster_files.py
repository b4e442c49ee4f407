"""Cluster files: shipped ones by name, those of users, and the one that `ranvier doctor --measure` writes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
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
_SAID = {"missing": "is missing", "unexpected_keyword_argument": "is not a setting of a cluster",
         "finite_number": "must be a finite number", "value_error": "should be a number"}


def cluster_names() -> list[str]:
    """The shipped clusters."""
    return sorted(entry.name.removesuffix(".toml") for entry in _SHIPPED.iterdir() if entry.name.endswith(".toml"))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, or a TOML file. ConfigError for what is none, with the first fault named."""
    if name in cluster_names():
        return _read((_SHIPPED / f"{name}.toml").read_bytes(), f"cluster {name}")
    path = Path(name)
    if path.suffix != ".toml":
        near = difflib.get_close_matches(name, cluster_names(), n=1, cutoff=0.4)
        raise ConfigError("is neither a shipped cluster nor a .toml file", code="unknown-cluster", where="cluster",
                          value=name,
                          remedy=f"Did you mean {near[0]}?" if near else
                          f"Shipped are: {', '.join(cluster_names())}. `ranvier doctor --measure --out FILE.toml` "
                          "writes one of this machine.")
    try:
        content = read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", code="cluster-unreadable",
                          where="cluster", value=name,
                          remedy="Name a TOML file that exists and is readable.") from error
    return _read(content, f"file {name}")


def _read(text: bytes, origin: str) -> Cluster:
    try:
        tree = parse_toml(text.decode())
    except ValueError as error:
        raise ConfigError(f"is not valid TOML: {error}", code="cluster-not-toml", where=origin,
                          remedy="Correct the file.") from error
    return cluster_of(tree, origin)


def cluster_of(tree: Mapping[str, object], origin: str) -> Cluster:
    """A nested mapping, like a TOML file's, as a cluster. ConfigError names the first fault and how many there are."""
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


def first_fault(error: ValidationError, origin: str) -> ConfigError:
    """The first of a cluster's faults by name, and how many more there are."""
    faults = error.errors()
    first = faults[0]
    name = ".".join(str(part) for part in first["loc"] if part != "[key]")
    more = f" ({len(faults) - 1} more faults)" if len(faults) > 1 else ""
    what = _SAID.get(first["type"], first["msg"].replace("Input should", "should"))
    value = first["input"] if isinstance(first["input"], (str, int, float, bool)) else None
    return ConfigError(f"{what}, in {origin}{more}", code="cluster-malformed",
                       where=f"cluster's {name}" if name else "cluster", value=value,
                       remedy=f"Compare with a shipped one, for example {_SHIPPED}/laptop.toml;  docs/planner.md has "
                              "every setting and its unit.")


def write_cluster(cluster: Cluster, path: Path) -> None:
    """As a file that `load_cluster` reads."""
    write_atomically(path, tomli_w.dumps(_without_none(asdict(cluster))))


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_none(item) if isinstance(item, Mapping) else item for key, item in tree.items()
            if item is not None}
