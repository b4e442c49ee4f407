"""Checks that all ranks of a stage's mesh call the same layers in the same order, in every pass.

Collectives over rows and columns have no tags: the n-th call of one rank matches the n-th of another. If ranks call
different layers, such as experts without tokens that a row skips, or layers that a column drops at random, one layer's
weights, gradients or activations are combined with those of another layer of the same shape, and nothing fails. Each
rank therefore keeps a running hash of (layer, pass), one number, which rows and columns compare before an update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal, NoReturn

from ranvier.comm.protocol import Group
from ranvier.errors import ModelError

Pass = Literal["forward", "backward", "backward of the input", "backward of the weight", "deferred weight gradient"]
"""A pass of a layer. A backward communicates differently when only one of its gradients is needed."""
_FACTOR, _MASK = 0x100000001b3, (1 << 63) - 1
_ROWS, _COLUMNS = "rows of a column", "columns of a row"
_REMEDY = ("Call every layer on every row and column, with no tokens (x[:0]) where a row has none for it. Draw what "
           "decides about calls, such as layers that are dropped, from torch's generator.")
_EXACT = "Engine(check_order=True) stops at the first call that differs."


class LayerOrder:
    """The layers that one rank has called, to be compared with those of the other rows and columns.

    over_rows, over_cols: as in `TensorMesh`.
    """

    def __init__(self, over_rows: Group, over_cols: Group) -> None:
        self._groups = {of: group for of, group in ((_ROWS, over_rows), (_COLUMNS, over_cols)) if len(group.ranks) > 1}
        self.drawn: Callable[[], int] = int
        """Returns a number that identifies the random draws of this rank in this batch: columns must draw the same."""
        self._hash = 0
        self._numbers: dict[tuple[str, Pass], int] = {}
        self._counts: Counter[tuple[str, Pass]] = Counter()
        self._last: tuple[str, Pass] | None = None

    def record(self, layer: str, what: Pass) -> None:
        """Record that a layer, given by its name in the model, begins a pass."""
        call = self._last = layer, what
        number = self._numbers.get(call)
        if number is None:  # the same on every rank, which Python's own hash is not
            number = self._numbers[call] = int.from_bytes(blake2b(f"{layer}\n{what}".encode(), digest_size=7).digest())
        self._hash = (self._hash + number) * _FACTOR & _MASK
        self._counts[call] += 1

    @property
    def place(self) -> str:
        """The layer and pass that this rank began last; empty outside of batches."""
        last = self._last
        return "" if last is None else f"{last[0]}, {last[1]}"

    def compare(self) -> None:
        """Compare all calls so far; each rank of the mesh calls this at the same place. ModelError on the ranks of
        every column and row in which they differ."""
        numbers = {of: self._hash ^ (self.drawn() if of == _COLUMNS else 0) for of in self._groups}
        found = {of: self._groups[of].gather_number(number) for of, number in numbers.items()}  # all, before one raises
        for of, hashes in found.items():
            if len(set(hashes)) > 1:
                self._refuse(of, self._groups[of].gather_objects(
                    [self._hash, [[layer, what, count] for (layer, what), count in self._counts.items()]]))

    def compare_place(self, where: str) -> None:
        """Compare the call or other event that begins at `where`; each rank does so before the same call."""
        found = {of: group.gather_objects(where) for of, group in self._groups.items()}
        for of, places in found.items():
            if len(set(places)) > 1:
                raise ModelError(f"is called on some {of} only", code="layer-called-on-some",
                                 value=dict(enumerate(places)),
                                 where=min(places, key=lambda place: place.startswith("the end")), remedy=_REMEDY)

    def end(self) -> None:
        """End a batch: `compare`, and start counting again."""
        self.compare()
        self.forget()

    def forget(self) -> None:
        """Clear the record of calls, after a batch has ended or failed."""
        self._hash, self._last = 0, None
        self._counts.clear()

    def _refuse(self, of: str, ranks: list[tuple[int, list[tuple[str, Pass, int]]]]) -> NoReturn:
        """Raise an error that names the first layer that is not called equally often, if there is one. ranks: the hash
        and counts of each rank's calls."""
        if len({number for number, _ in ranks}) == 1:
            raise ModelError("draw different random numbers", code="columns-draw-differently", where=of,
                             value=f"{len(ranks)} ranks",
                             remedy="Draw from torch's generator, with the same seed on all columns, each in its own "
                                    "process; ranvier.tensor.layers.Dropout needs no seed.")
        counts = [{(layer, what): count for layer, what, count in calls} for _, calls in ranks]
        for layer, what in dict.fromkeys(call for calls in counts for call in calls):
            found = {index: calls.get((layer, what), 0) for index, calls in enumerate(counts)}
            if len(set(found.values())) > 1:
                raise ModelError(f"is not called equally often on all {of} ({what})", code="layer-call-counts-differ",
                                 where=layer, value=found, remedy=f"{_REMEDY} {_EXACT}")
        raise ModelError(f"are called in different order on the {of}", code="layer-order-differs",
                         where="layers of a stage", remedy=f"Call the layers in one order on every rank. {_EXACT}")
