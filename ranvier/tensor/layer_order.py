"""Whether all rows of a column call the same layers in the same order, in every pass.

Collectives over a column have no tags: the n-th of one row meets the n-th of another. Where rows call different
layers, such as experts without tokens that a row skips, one layer's weights or gradients meet those of another layer of
the same shape, and nothing fails. Each rank therefore keeps a running hash of (layer, pass), one number, which all rows
compare before an update.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import Literal, NoReturn

from ranvier.comm.protocol import Group
from ranvier.errors import ModelError

Pass = Literal["forward", "backward", "backward of the input", "backward of the weight", "deferred weight gradient"]
"""What a layer does. Its backward communicates otherwise where only one of its gradients is wanted."""
_FACTOR, _MASK = 0x100000001b3, (1 << 63) - 1


class LayerOrder:
    """The layers that one rank has called, to be compared with those of the other rows.

    rows: the ranks of its column.
    """

    def __init__(self, rows: Group) -> None:
        self._rows, self._hash = rows, 0
        self._numbers: dict[tuple[str, Pass], int] = {}
        self._counts: Counter[tuple[str, Pass]] = Counter()
        self._last: tuple[str, Pass] | None = None

    def record(self, layer: str, what: Pass) -> None:
        """`layer`, by its name in the model, begins a pass."""
        call = self._last = layer, what
        number = self._numbers.get(call)
        if number is None:  # the same on every rank, which Python's own hash is not
            number = self._numbers[call] = int.from_bytes(blake2b(f"{layer}\n{what}".encode(), digest_size=7).digest())
        self._hash = (self._hash + number) * _FACTOR & _MASK
        self._counts[call] += 1

    @property
    def place(self) -> str:
        """The layer and pass that this rank has begun last; empty outside of batches."""
        last = self._last
        return "" if last is None else f"{last[0]}, {last[1]}"

    def compare(self) -> None:
        """Compare all calls so far; each row of the column calls this at the same place. ModelError on every row where
        they differ."""
        if len(self._rows.ranks) == 1:
            return
        if len(set(self._rows.gather_number(self._hash))) > 1:
            self._refuse(self._rows.gather_objects([[layer, what, count] for (layer, what), count
                                                    in self._counts.items()]))

    def end(self) -> None:
        """The batch has ended: `compare`, and count anew."""
        self.compare()
        self.forget()

    def forget(self) -> None:
        """Nothing has been called: a batch has ended or failed."""
        self._hash, self._last = 0, None
        self._counts.clear()

    def _refuse(self, of_rows: list[list[tuple[str, Pass, int]]]) -> NoReturn:
        """Name the first layer that is not called equally often, if there is one."""
        counts = [{(layer, what): count for layer, what, count in calls} for calls in of_rows]
        for layer, what in dict.fromkeys(call for calls in counts for call in calls):
            found = {row: calls.get((layer, what), 0) for row, calls in enumerate(counts)}
            if len(set(found.values())) > 1:
                raise ModelError(f"is not called equally often on all rows of a column ({what})", where=layer,
                                 value=found,
                                 remedy="Call every layer on every row, with no tokens (x[:0]) where a row has none "
                                        "for it. Engine(check_order=True) stops at the first call that differs.")
        raise ModelError("are called in different order on the rows of a column", where="layers of a stage",
                         remedy="Call the layers in one order on every row. Engine(check_order=True) stops at the "
                                "first call that differs.")
