"""What a transition changes of a run, as rank 0 orders it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ranvier.run import Run


@dataclass(frozen=True, kw_only=True)
class Change:
    """From one mesh and depth to others.

    boundaries: None cuts by cost. microbatch_size, global_size: samples. reason: why, in a few words.
    wish: the number of the wish that it fulfils.
    """

    data: int
    pipe: int
    frozen: int
    old_frozen: int
    boundaries: tuple[int, ...] | None
    global_size: int
    microbatch_size: int
    reason: str
    wish: str | None = None

    def applied(self, run: Run) -> Run:
        """`run` as it is after the change."""
        mesh = replace(run.mesh, data=self.data, pipe=self.pipe)
        return replace(run, mesh=mesh, pipeline=replace(run.pipeline, boundaries=self.boundaries),
                       batch=replace(run.batch, global_size=self.global_size, microbatch_size=self.microbatch_size))

    def document(self) -> dict[str, object]:
        """As JSON can hold it; `read` is the inverse."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, object]) -> Change:
        boundaries = document["boundaries"]
        return cls(**{**document, "boundaries": None if boundaries is None else tuple(boundaries)})
