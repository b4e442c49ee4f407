"""The lease on a run's folders, acquired by rank 0 for all ranks: see `ranvier.system.lease`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ranvier.comm.protocol import Group
from ranvier.errors import CheckpointError, OwnershipError
from ranvier.system.lease import Lease


def acquire_folders(folders: Sequence[Path], ranks: Group, *, tell: Callable[[str], None] = lambda text: None,
                    **times: Any) -> Lease | None:
    """Acquire `folders` on rank 0 for all `ranks`: its lease, and None on the other ranks.

    Collective. If rank 0 cannot acquire them, all ranks raise the error of `Lease.acquire` (OwnershipError or
    CheckpointError).

    Args:
        tell: receives one line on rank 0 if it has to wait for another owner.
        times: as for `Lease.acquire`, in seconds.
    """
    if ranks.index:
        while (outcome := ranks.gather_objects(None)[0]) == "wait":
            pass
        if outcome is not None:
            is_owned, texts = outcome
            raise OwnershipError(**texts) if is_owned else CheckpointError(**texts)
        return None
    reported: list[str] = []

    def on_wait(text: str) -> None:
        ranks.gather_objects("wait")
        if not reported:
            reported.append(text)
            tell(text)

    try:
        lease = Lease.acquire(folders, on_wait=on_wait, **times)
    except (OwnershipError, CheckpointError) as error:
        ranks.gather_objects([isinstance(error, OwnershipError), error.texts])
        raise
    ranks.gather_objects(None)
    return lease
