"""A change of a run to another mesh or to other frozen layers, and what a request for one says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ranvier.config.other_mesh import resized
from ranvier.config.resolve import ResolvedRun
from ranvier.elastic.freezing import FrozenLayers


@dataclass(frozen=True, kw_only=True)
class Change:
    """From one mesh and depth to others.

    boundaries: None cuts by cost. microbatch_size, global_size: samples. reason: why, in a few words.
    wish: the ID of the resize request that it fulfils; logs have it under this name.
    """

    data: int
    pipe: int
    row: int
    col: int
    frozen: FrozenLayers
    old_frozen: FrozenLayers
    boundaries: tuple[int, ...] | None
    global_size: int
    microbatch_size: int
    reason: str
    wish: str | None = None

    def applied(self, run: ResolvedRun) -> ResolvedRun:
        """`run`, as it was started, as it is after the change."""
        mesh = resized(run.mesh, data=self.data, pipe=self.pipe, row=self.row, col=self.col)
        pipeline = run.pipeline if self.pipe == run.mesh.pipe else replace(run.pipeline, deferred=None, defer_last=None)
        return replace(run, mesh=mesh, pipeline=replace(pipeline, boundaries=self.boundaries),
                       batch=replace(run.batch, global_size=self.global_size, microbatch_size=self.microbatch_size))

    def document(self) -> dict[str, object]:
        """As JSON can hold it; `read` is the inverse."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Change:
        """A change from what `document` returned, also after a passage through JSON."""
        boundaries = document["boundaries"]
        layers = {name: FrozenLayers(document[name]["prefix"], tuple(document[name]["above"]))
                  for name in ("frozen", "old_frozen")}
        return cls(**{**document, **layers, "boundaries": None if boundaries is None else tuple(boundaries)})


def request_text(request: Mapping[str, object]) -> str:
    """The mesh that a request names, in words."""
    return " x ".join(f"{axis} {request[axis]}" for axis in ("data", "pipe", "row", "col") if axis in request)
