"""Files of a checkpoint on disk: writing parts, the manifest last, one rename, and removal of old checkpoints.

    .step-120.TOKEN.tmp/      being written, by all ranks
      part-00000.safetensors    on the disk (fsync) before its writer reports it
      manifest.json             when all parts are written
    step-120/                 the same folder under its name: complete, or not there at all

Names that begin with .step- are left over from a run that died, and are removed when the next one starts; .owner.N
names the owner of the folder (ranvier.system.lease).
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint import manifest as manifests
from ranvier.comm.protocol import Group
from ranvier.errors import CheckpointError, OwnershipError
from ranvier.system.atomic_file import folder_problem
from ranvier.system.file_lock import lock_now, open_folder, remove_unlocked
from ranvier.system.lease import Lease
from ranvier.system.pinned_memory import pinned_together
from ranvier.system.tensor_file import Slot, write_tensors
from ranvier.system.untrusted_file import new_file, read_json
from ranvier.tensor.quantized_weight import dense

_SPARE_BYTES = 1 << 20


def temporary_folder(folder: Path, step: int, token: str) -> Path:
    """Folder of the checkpoint of `step` while it is being written; token: distinguishes this write from all others."""
    return folder / f".step-{step}.{token}.tmp"


def part_name(index: int) -> str:
    """File of the pieces that rank `index` has written."""
    return f"part-{index:05}.safetensors"


def try_to_write(path: Path) -> None:
    """Write a small file and flush it to the disk. OSError when it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left by a start that died
    with new_file(path) as file:
        file.write(b"\0" * 512)
        file.flush()
        os.fsync(file.fileno())


def write_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> manifests.File:
    """Write one file of pieces, and return when it is on the disk. OSError when it cannot be."""
    size_bytes, crc32 = write_tensors(path, [Slot(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
                                             for name, tensor in tensors.items()], tensors.values())
    to_disk(path)
    return manifests.File(name=path.name, size_bytes=size_bytes, crc32=crc32)


def publish(temporary: Path, final: Path, manifest: manifests.Manifest, verify: Callable[[], None] = lambda: None
            ) -> None:
    """Complete the folder `temporary`, whose parts are written, and give it the name `final`: the manifest is written
    last, and then the folder is renamed, so that it is complete or not there. An earlier folder of that name is
    replaced.

    verify: called before each rename; raises if the folder is no longer the caller's. OSError when the folder cannot be
    written; CheckpointError when parts are missing.
    """
    for file in manifest.files:
        path = temporary / file.name
        if not path.exists() or path.stat().st_size != file.size_bytes:
            raise CheckpointError("is missing or incomplete as seen from rank 0", code="file-not-seen",
                                  where=str(path), remedy="Set `--checkpoint.dir` to a folder that all machines share.")
    for problem in manifests.contradictions(manifest):  # else it would get a name, and older ones would be removed
        raise CheckpointError(f"would be damaged: {problem}", code="checkpoint-would-be-damaged", where=str(final),
                              remedy="Report this, with the model and the mesh: it is a bug in Ranvier.")
    with new_file(temporary / manifests.MANIFEST) as stream:
        stream.write(manifests.encode(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    to_disk(temporary)
    aside = _move_aside(final, "replaced")
    verify()
    if final.exists():
        os.rename(final, aside)
    try:
        verify()
        os.rename(temporary, final)  # fails if the next owner of the folder has removed `temporary`
    except BaseException:
        with suppress(OSError):
            os.rename(aside, final)
        raise
    to_disk(final.parent)
    remove(aside)


def retain(folder: Path, newest: int, *, keep: int, keep_every: int, damaged: Collection[Path] = (),
           best: int | None = None, verify: Callable[[], None] = lambda: None) -> None:
    """Remove old checkpoints. These stay: the last `keep` up to step `newest`, which has just been written; those whose
    step is a multiple of `keep_every` (0: none); `best`; and the target of the link `best`, which is the best one on
    disk if that of step `best` could not be written. Checkpoints that are known to be `damaged`, and copies under
    another step's name, do not count, and are removed if they are older than the last `keep`. Later ones stay: the run
    resumed before them, and writes them again when it gets there. verify: as in `publish`; its errors end the
    removal."""
    steps = [(manifests.step_of(path) or 0, path) for path in manifests.checkpoints(folder)]  # all are named by a step
    found = [(step, path) for step, path in steps if step <= newest]
    whole = (step for step, path in found if path not in damaged and _is_of_step(path, step))
    oldest, linked = min(islice(whole, keep), default=newest), None
    if best is not None:
        with suppress(OSError):  # no link, or a file system without links
            linked = manifests.step_of(folder / os.readlink(folder / manifests.BEST))
    for step, path in found:
        if step < oldest and step not in (best, linked) and not (keep_every and step % keep_every == 0):
            gone = _move_aside(path, "removed")
            verify()
            with suppress(OSError):
                os.rename(path, gone)  # a checkpoint is never partly removed
            remove(gone)


def _is_of_step(path: Path, step: int) -> bool:
    """Whether a checkpoint's manifest has the step of its folder's name, unlike a copy under another name."""
    try:
        document = read_json(path / manifests.MANIFEST, manifests.MOST_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("step") == step


def mark_best(final: Path) -> None:
    """Make the link `best` next to a checkpoint point to it. OSError if the file system has no links."""
    link, aside = final.with_name(manifests.BEST), final.with_name(f".{manifests.BEST}.new")
    aside.unlink(missing_ok=True)
    try:
        os.symlink(final.name, aside)
        os.replace(aside, link)
    finally:
        aside.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Remove partly written and partly removed checkpoints of runs that died; restore one that was about to be
    replaced."""
    for path in folder.glob(".probe-*"):
        path.unlink(missing_ok=True)
    for path in sorted(folder.glob(".step-*")):
        final = manifests.step_folder(folder, _step_in(path.name))
        with suppress(OSError):
            if path.name.endswith(".replaced") and not final.exists():
                os.rename(path, final)
            else:
                remove(path)


def _step_in(name: str) -> int:
    digits = name.removeprefix(".step-").partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _move_aside(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")


def remove(folder: Path) -> None:
    """Remove a folder, or a link to one, as far as possible."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Return when what was written to a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def host_copies(tensors: Sequence[torch.Tensor], buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory. buffers: those of the last call, which are reused if they fit; the list is changed. Copies
    from a device are in one piece of pinned memory, so that the allocator's rounding wastes little.

    Returns when all copies are complete.
    """
    kinds = [(tensor.shape, tensor.dtype, tensor.is_cuda) for tensor in tensors]
    had = [(copy.shape, copy.dtype, tensor.is_cuda) for copy, tensor in zip(buffers, tensors, strict=False)]
    if had != kinds or len(buffers) != len(tensors):
        buffers.clear()
        buffers += pinned_together([tensor for tensor in tensors if tensor.is_cuda])
        for place, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                buffers.insert(place, torch.empty(tensor.shape, dtype=tensor.dtype))
    for copy, tensor in zip(buffers, tensors, strict=True):
        copy.copy_(dense(tensor), non_blocking=True)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:  # copies run on the devices' own streams
        torch.cuda.current_stream(device).synchronize()
    return list(buffers)


# --- folders of results, which appear complete or not at all --------------------------------------------------------


@contextmanager
def new_folder(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A context with a folder next to `out` to write into. When the block ends without an exception, the folder is on
    the disk and has the name `out`; otherwise nothing is left. Folders left by killed writers, whose locks are free,
    are removed.

    CheckpointError when there is something at `out` that is not an empty folder, when the disk has no `needed_bytes`
    left, and when something cannot be written.
    """
    out = Path(os.path.abspath(out))
    check_free(out)
    unfinished, handle = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp"), None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 12}.tmp"):
            with suppress(OSError):  # another user's, or another writer has just removed it
                remove_unlocked(left)
        if (free := shutil.disk_usage(out.parent).free) < needed_bytes + _SPARE_BYTES:
            raise CheckpointError(f"would have {needed_bytes:,} bytes, and the disk has {free:,} left",
                                  code="disk-too-small", where=str(out),
                                  remedy="Free space there, or name a folder on another disk.")
        unfinished.mkdir()
        lock_now(handle := open_folder(unfinished), shared=True)
        yield unfinished
        # Everything is on the disk before the folder gets its name.
        for place, _, names in os.walk(unfinished, topdown=False):
            for name in names:
                to_disk(Path(place, name))
            to_disk(Path(place))
        check_free(out)  # another writer may have been faster
        os.rename(unfinished, out)
        to_disk(out.parent)
    except OSError as error:
        raise _output_not_writable(out, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _output_not_writable(out: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"cannot be written: {problem}", code="output-not-writable", where=str(out),
                           remedy="Free space on that disk, or name a folder that can be written.")


def check_free(out: Path) -> None:
    """CheckpointError unless `out` can become a folder: it does not exist, or is an empty folder, and a file can be
    written next to it."""
    try:
        taken = out.is_symlink() or (out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None))
    except OSError as error:
        raise CheckpointError(f"cannot be looked into: {error.strerror or error}", code="output-unreadable",
                              where=str(out), remedy="Name a folder that can be written.") from error
    if taken:
        raise CheckpointError("exists already, and is not an empty folder", code="output-exists", where=str(out),
                              remedy="Name a new folder, or remove that one.")
    if (problem := folder_problem(out.parent)) is not None:
        raise _output_not_writable(out, problem)


# --- owners of folders -----------------------------------------------------------------------------------------------

# The lease on a run's folders, acquired by rank 0 for all ranks: see `ranvier.system.lease`.


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
