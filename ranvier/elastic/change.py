"""A change of a run to another mesh or to other frozen layers, and a request for one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from ranvier.config.other_mesh import resized
from ranvier.config.resolve import ResolvedRun
from ranvier.elastic.freezing import FrozenLayers
from ranvier.errors import RanvierError
from ranvier.plan.limits import first_that_fits, schedule_settings


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change from one mesh and number of frozen layers to others.

    mesh: sizes by axis. boundaries: None cuts by cost. microbatch_size, global_size: samples. reason: why, in a few
    words. schedule: pipeline settings that replace the run's own if their schedule does not fit the memory on the new
    mesh (`plan/limits`). request_id: the ID of the resize request that the change fulfils; its name in logs.
    """

    mesh: Mapping[str, int]
    frozen: FrozenLayers
    old_frozen: FrozenLayers
    boundaries: tuple[int, ...] | None
    global_size: int
    microbatch_size: int
    reason: str
    schedule: Mapping[str, Any] | None = None
    request_id: str | None = None

    def apply_to(self, run: ResolvedRun) -> ResolvedRun:
        """The settings of `run` after the change. run: as it was started."""
        mesh, pipeline = resized(run.mesh, **self.mesh), run.pipeline
        if mesh.pipeline_size != run.mesh.pipeline_size:
            pipeline = replace(pipeline, deferred=None, defer_last=None)
        return replace(run, mesh=mesh, pipeline=replace(pipeline, boundaries=self.boundaries, **self.schedule or {}),
                       batch=replace(run.batch, global_size=self.global_size, microbatch_size=self.microbatch_size))

    def first_fitting(self, run: ResolvedRun, problem: Callable[[ResolvedRun], RanvierError | None]
                      ) -> tuple[Change, RanvierError | None]:
        """The change with the first schedule of `run` that has no `problem` on the new mesh, and None. If each has one:
        the change with the run's own schedule, and its problem."""
        own = replace(self, schedule=None)
        fitted = own.apply_to(run)
        found, why = first_that_fits(fitted, problem, lambda run, why: why is None)
        return own if found == fitted else replace(own, schedule=schedule_settings(found)), why

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Change:
        """The inverse of `asdict`; `document` may have passed through JSON."""
        return _FORM.validate_python(document)


_FORM = TypeAdapter(Change)


@dataclass(frozen=True, kw_only=True)
class MeshRequest:
    """A request for another mesh, by a user or by ranks that want to join; its text is the sizes that it names.

    sizes: by axis, for the named axes; None for required axes that are not named. request_id: its ID; None without one.
    ranks: how many wait to join, if any. has_joined: they are members of the run, and only their mesh is still pending.
    reason: of the change that fulfils the request. problem: why the request could not be read.
    """

    sizes: Mapping[str, int | None]
    request_id: str | None
    ranks: int | None = None
    has_joined: bool = False
    reason: str = "as asked with ranvier resize"
    problem: str | None = None

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())

    def fields(self) -> dict[str, object]:
        """The fields of the request in events."""
        return {**self.sizes, **({} if self.ranks is None else {"ranks": self.ranks}), "request_id": self.request_id}
