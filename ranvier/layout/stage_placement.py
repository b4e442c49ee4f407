"""Which stages a rank of a pipeline has, where it may have several (virtual stages).

    one each          rank 0: 0      rank 1: 1      rank 2: 2      rank 3: 3
    v-shape           rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4       (Qi et al., 2024, ZB-V)
    interleaved       rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7       (Narayanan et al., 2021)

With more than two stages a rank, the v-shape goes on as a zigzag. Its messages stay between neighbours, and every turn
needs none; the first rank also has the last stage (of an even number), so that a tied embedding and head share a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlacementName = Literal["v-shape", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The stages of `pipe` ranks, `per_rank` on each. Ranks are numbered along the axis `pipe`."""

    pipe: int
    per_rank: int = 1
    how: PlacementName = "v-shape"

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.pipe * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that has `stage`."""
        turn, place = divmod(stage, self.pipe)
        return self.pipe - 1 - place if self.how == "v-shape" and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, rising."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def local(self, stage: int) -> int:
        """The place of `stage` among those of its rank."""
        return stage // self.pipe
