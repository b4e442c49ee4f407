"""The checkpoints of a running engine: written in the background of the training, and read back on any mesh.

    checkpoints = Checkpoints(engine, "runs/mine/checkpoint", keep=3)
    checkpoints.load()                       # the newest complete one, if there is one
    for step in range(engine.steps, 1000):
        engine.train_batch(...)
        if engine.steps % 100 == 0:
            checkpoints.save()               # returns after a copy to host memory
    checkpoints.close()

    rank     trains | copies | trains ...                              a step waits only for the copy
    thread                    | writes its part, reports it in the store |
    rank 0's                  | writes its part | all reported? manifest, rename, remove old ones |

The threads communicate through the store, so that they need no collectives, which could collide with the training's.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from ranvier.arguments import check_arguments
from ranvier.checkpoint import files, state
from ranvier.checkpoint.files import acquire_folders
from ranvier.checkpoint.manifest import (
    File,
    Manifest,
    OptimizerGroup,
    Saved,
    SavedTensor,
    find,
    step_folder,
    step_of,
)
from ranvier.checkpoint.manifest import checkpoints as checkpoints_in
from ranvier.checkpoint.objects import SavedObjects
from ranvier.checkpoint.state import Piece
from ranvier.checkpoint.user_optimizer import merge_groups
from ranvier.comm.board import read_actions
from ranvier.config.run import Positive, Seconds
from ranvier.errors import CheckpointError, OwnershipError, TransportError
from ranvier.pipeline.engine import Engine
from ranvier.system.lease import Lease

_POLL_SECONDS = 0.02
_STORE = "ranvier/checkpoint"


@dataclass(frozen=True, kw_only=True)
class Written:
    """Outcome of writing a checkpoint. error: why it was not written."""

    step: int
    folder: Path
    size_bytes: int = 0
    stall_seconds: float = 0.0
    """Seconds that rank 0's training waited: for the previous write, and for the copy."""
    write_seconds: float = 0.0
    """Seconds from the copy until the checkpoint had its name."""
    error: str | None = None
    remedy: str = ""
    """Advice about the error."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The checkpoint from which an engine resumes. skipped: why newer checkpoints were not used. frozen: parameters
    that were not being trained, and are frozen again now; to train them, unfreeze them afterwards."""

    folder: Path
    step: int
    about: Mapping[str, object]
    frozen: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Job:
    """One rank's part of one checkpoint."""

    number: int
    step: int
    pieces: list[Piece]
    frozen: list[str]
    missed_updates: dict[str, int]
    optimizer_groups: list[OptimizerGroup]
    head: dict[str, Any]
    when: Callable[[], bool]
    best: int | None = None
    stall_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    part: dict[str, object] | None = None
    """This rank's entry for rank 0, if its part has already been written."""


class Checkpoints:
    """Writes and reads the checkpoints of one engine. All ranks make the same calls, except for `written`.

    A torch optimizer is saved completely: its states, and the settings of its groups, such as learning rates. Gradients
    are not saved, nor is `engine.learning_rate`, which a program sets before each step. One engine at a time writes to
    a folder, which its program holds (ranvier.system.lease): the first `load` without a path, or the first `save`,
    acquires it, and removes unfinished files of others. Within one process, the last engine that acquires it holds it.

    Args:
        folder: of the checkpoints; all ranks must see the same files.
        keep: number of newest checkpoints to keep. keep_every: checkpoints of steps that are a multiple of it are kept
            permanently; 0 for none.
        timeout_seconds: a rank that has not written its part, and has not been heard of for this long, is given up.
        background: copy the state and write it while training continues; False writes it before `save` returns, which
            needs no memory for copies.
        lease: on rank 0, if the program already holds the folder; it stays the program's.
        objects: further objects with `state_dict` and `load_state_dict` that are saved and loaded, by name, such as
            learning-rate schedulers; None on a rank that has none.
    """

    def __init__(self, engine: Engine, folder: Path | str, *, keep: Positive = 3,
                 keep_every: Annotated[int, Ge(0)] = 0, timeout_seconds: Seconds = 300.0,
                 background: bool = True, lease: Lease | None = None,
                 objects: Mapping[str, object] | None = None) -> None:
        check_arguments(Checkpoints.__init__, locals())
        self.engine, self.folder, self._timeout = engine, Path(folder).absolute(), timeout_seconds
        self._keep, self._keep_every, self._background = keep, keep_every, background
        world = engine.world
        with engine.during("Checkpoints(...)"):
            self._ranks = world.backend.group("checkpoint", [tuple(range(world.size))])
        self._rank, self._size = world.rank, world.size
        # The threads' own connection, since another thread may be waiting on the shared one; made while the store is
        # reachable.
        self._store = world.store.clone()  # type: ignore[union-attr]  # which the stub of torch's Store lacks
        # Names in the store must differ from those of another Checkpoints on the same store.
        self._token = self._ranks.gather_objects(os.urandom(4).hex())[0]
        self._count = 0
        self._room: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self.damaged: set[Path] = set()
        """Damaged checkpoints that `load` has skipped; only rank 0 uses them, when it writes."""
        self._is_beside_others = True  # whether the next save may be the first next to newer checkpoints
        self._untold: list[Written] = []
        self._asked = self._closed = False
        self._ended: list[Written] = []
        self._lease, self._own_lease, self._claimed = lease, False, False
        self._objects = dict(objects or {})
        self._saved_objects()

    def _saved_objects(self) -> SavedObjects:
        return SavedObjects(self._objects, self.engine.mesh, self._rank)

    # ------------------------------------------------------------------ writing

    def claim(self) -> None:
        """Acquire the folder for this engine, and check that every rank can write to it. Collective; further calls do
        nothing.

        OwnershipError if another program holds the folder, CheckpointError if a rank cannot write there, or if rank 0
        does not see what another rank has written.
        """
        if self._claimed:
            return
        if not self._ranks.gather_objects(self._lease is not None)[0]:
            self._lease, self._own_lease = acquire_folders([self.folder], self._ranks), True
        problem = None
        probe = self.folder / f".probe-{self._token}-"
        try:
            files.try_to_write(Path(f"{probe}{self._rank}"))
        except OSError as error:
            problem = f"cannot be written by rank {self._rank}: {_summarize_error(error)}"
        problems = self._ranks.gather_objects(problem)
        unseen = [rank for rank in range(self._size) if self._rank == 0 and not Path(f"{probe}{rank}").exists()]
        unseen = self._ranks.gather_objects(unseen)[0]
        Path(f"{probe}{self._rank}").unlink(missing_ok=True)
        for problem in filter(None, problems):
            raise CheckpointError(problem, code="checkpoint-folder-not-writable", where=f"folder {self.folder}",
                                  remedy="Choose another `--checkpoint.dir`: one that every rank may write to, on a "
                                         "disk with free space.")
        if unseen:
            raise CheckpointError(f"is not the same one on all machines: rank 0 does not see what rank {unseen[0]} "
                                  "writes there", code="checkpoint-folder-not-shared", where=f"folder {self.folder}",
                                  remedy="Set `--checkpoint.dir` to a folder that all machines share.")
        if self._rank == 0:
            files.clear_leftovers(self.folder)
        self._ranks.barrier()
        self._claimed = True

    def save(self, about: Mapping[str, object] | None = None, *, when: Callable[[], bool] = lambda: True,
             best: int | None = None) -> float:
        """Copy the engine's state, and write it while training continues. Returns the seconds that this call took: for
        the previous write, if it is still in progress, and for the copy; without `background`, also for this write.

        about: JSON-serialisable notes for readers of the checkpoint; the same on every rank. when: polled by rank 0's
        thread; the checkpoint does not get its name before it returns True, and the next `save`, `wait` or `load` waits
        for that. best: the step of the best checkpoint, possibly this one, which is kept and marked by the link `best`.
        A failed write is reported by `written` on rank 0 and by `wait` on all ranks, or, if neither is called, by a
        warning of the next `save` or `close`. The first call raises the errors of `claim`; CheckpointError after
        `close`.
        """
        began = time.monotonic()
        check_arguments(Checkpoints.save, locals(), but=("about",))
        _check_about({} if about is None else about)
        if self._closed:
            raise CheckpointError("is called after close, and another program may hold the folder",
                                  code="checkpoints-closed", where="Checkpoints.save", value=str(self.folder),
                                  remedy="Close after the last save.")
        self.engine.check_usable("Checkpoints.save")
        self.engine.refuse_in_averages("Checkpoints.save")
        with self.engine.during("Checkpoints.save"):
            self.claim()
        if (lost := self.engine.num_accumulated) and self._rank == 0:
            warnings.warn(f"the checkpoint of step {self.engine.steps} is without the gradients of the last "
                          f"{'batch' if lost == 1 else f'{lost} batches'}: checkpoints have no gradients, and a run "
                          "that resumes from it continues without them. Save after engine.step(result)", stacklevel=2)
        self._warn_of_newer()
        self._join()
        self._warn_of_failures()
        self._count += 1
        try:
            groups = state.optimizer_groups(self.engine)
            pieces = [*state.pieces_to_write(self.engine), *self._saved_objects().pieces()]
            if self._background:
                copies = files.host_copies([piece.tensor for piece in pieces], self._room)
                pieces = [replace(piece, tensor=copy) for piece, copy in zip(pieces, copies, strict=True)]
        except Exception as error:  # other ranks may have begun, and the program may continue
            with _shared_store():
                self._store.set(self._name(self._count, self._rank), json.dumps(self._not_written(error)))
            raise
        head = {**state.numbers(self.engine), "about": {
            **(about or {}), "mesh": str(self.engine.mesh), "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}}
        job = _Job(number=self._count, step=self.engine.steps, pieces=pieces,
                   frozen=state.frozen_parameters(self.engine),
                   missed_updates=state.missed_updates(self.engine), optimizer_groups=groups, head=head, when=when,
                   best=best)
        if not self._background:
            job.part = self._part(job)
        job.stall_seconds = time.monotonic() - began
        self._thread = threading.Thread(target=self._write, args=(job,), name=f"checkpoint {job.step}", daemon=True)
        self._thread.start()
        return job.stall_seconds

    def written(self) -> list[Written]:
        """Outcomes since the last call, on rank 0; never waits. Empty on other ranks, and after `give_up`."""
        done, self._untold, self._asked = self._untold, [], True
        return [] if self._closing.is_set() else done

    def wait(self) -> list[Written]:
        """Wait until the writes of `save` have ended on every rank. Returns all outcomes since the last call, on all
        ranks."""
        self._join()
        found, self._ended = [{**asdict(written), "folder": str(written.folder)} for written in self._ended], []
        with self.engine.during("Checkpoints.wait"):
            first = self._ranks.gather_objects(found)[0]
        return [Written(**{**entry, "folder": Path(entry["folder"])}) for entry in first]

    def broadcast_from_rank0(self, value: str) -> str:
        """Rank 0's `value`, on all ranks: some files may be visible only to rank 0."""
        found: str = self._ranks.gather_objects(value)[0]
        return found

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies of this rank's part, which are kept for the next save."""
        return sum(tensor.nbytes for tensor in self._room)

    def mark_best(self, step: int) -> None:
        """On rank 0: make the link `best` point to the checkpoint of `step`, if it exists."""
        folder = step_folder(self.folder, step)
        if folder.exists():
            with suppress(OSError):  # a file system without links: the manifest names the best one
                files.mark_best(folder)

    def give_up(self) -> None:
        """Do not wait for parts any more, since a rank is lost that may not have written its own. From any thread, at
        any time."""
        self._closing.set()

    def close(self, seconds: float = 3.0) -> bool:
        """Wait up to `seconds` for a write in progress, and release the folder. Returns whether no write is left.
        Idempotent; no rank waits for another."""
        if self._thread is not None:
            self._thread.join(seconds)
        ended = self._thread is None or not self._thread.is_alive()
        self._closing.set()
        self._closed = True
        self._warn_of_failures()
        if ended:
            self._room.clear()
        if ended and self._own_lease and self._lease is not None:
            self._lease.release()
        return ended

    def _warn_of_failures(self) -> None:
        """Warn on rank 0 about failed writes, unless the program reads `written`."""
        failed = [] if self._asked else [written for written in self._ended if written.error is not None]
        for failure in failed:
            self._ended.remove(failure)
            warnings.warn(f"the checkpoint of step {failure.step} is not written: {failure.error}. {failure.remedy}",
                          stacklevel=3)

    def _warn_of_newer(self) -> None:
        """Warn on rank 0 about newer checkpoints, in the first save after the start or after `load`."""
        if self._rank == 0 and self._is_beside_others:
            newer = [path.name for path in checkpoints_in(self.folder) if path not in self.damaged
                     and (step_of(path) or 0) > self.engine.steps]
            if newer:
                warnings.warn(f"step-{self.engine.steps} is saved next to newer checkpoints, from which the next "
                              f"load() resumes: {', '.join(newer)} in {self.folder}. Remove them, or save in another "
                              "folder",
                              stacklevel=3)
        self._is_beside_others = False

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------------ in the thread

    def _write(self, job: _Job) -> None:
        """Write this rank's part, and, on rank 0, publish the checkpoint. Rank 0 records the outcome in any case."""
        temporary = self._temporary(job)
        outcome = self._failed_write(job, "it was given up before it was written")
        try:
            part = self._part(job) if job.part is None else job.part
            with _shared_store():
                self._store.set(self._name(job.number, self._rank), json.dumps(part))
            if self._rank == 0:
                outcome = self._publish(job, temporary) or outcome
        except Exception as error:
            outcome = self._failed_write(job, error)
            if self._rank == 0:
                files.remove(temporary)
        finally:
            if self._rank == 0:
                self._ended.append(outcome)
                self._untold.append(outcome)

    def _temporary(self, job: _Job) -> Path:
        return files.temporary_folder(self.folder, job.step, f"{self._token}-{job.number}")

    def _part(self, job: _Job) -> dict[str, object]:
        """Write this rank's part. Returns its entry for rank 0."""
        temporary = self._temporary(job)
        try:
            temporary.mkdir(exist_ok=True)  # a folder that has been removed is not made again
            file = None
            if job.pieces:
                file = asdict(files.write_part(temporary / files.part_name(self._rank), {
                    _key(number): piece.tensor for number, piece in enumerate(job.pieces)}))
        except Exception as error:  # of any kind: training continues, and the other ranks must get it
            return self._not_written(error)
        return {"file": file, "tensors": _manifest_entries(job.pieces), "frozen": job.frozen,
                "missed_updates": job.missed_updates,
                "optimizer_groups": [asdict(group) for group in job.optimizer_groups]}

    def _not_written(self, error: Exception) -> dict[str, object]:
        """The entry of a part that was not written: the reason."""
        return {"error": f"{_summarize_error(error)} (rank {self._rank})"}

    def _publish(self, job: _Job, temporary: Path) -> Written | None:
        """Wait for all parts, and publish them as a checkpoint; None if this is closed first."""
        entries = self._entries(job.number)
        if entries is None or not self._wait_until(job.when):
            return None
        assert self._lease is not None, "rank 0 has claimed the folder"
        for problem in (entry["error"] for entry in entries if "error" in entry):
            self._lease.verify()  # an error if the folder is lost, which is then the reason
            raise OSError(problem)
        final, manifest = step_folder(self.folder, job.step), _manifest(job, entries)
        files.publish(temporary, final, manifest, verify=self._lease.verify)
        seconds = time.monotonic() - job.began
        self.damaged.discard(final)
        if job.best == job.step:
            self.mark_best(job.step)
        with suppress(OSError, OwnershipError):  # the checkpoint exists, even if older ones cannot be removed
            files.retain(self.folder, job.step, keep=self._keep, keep_every=self._keep_every, damaged=self.damaged,
                         best=job.best, verify=self._lease.verify)
        return Written(step=job.step, folder=final, stall_seconds=job.stall_seconds, write_seconds=seconds,
                       size_bytes=sum(file.size_bytes for file in manifest.files))

    def _failed_write(self, job: _Job, error: Exception | str) -> Written:
        remedy = ("Free space there, or move the folder of checkpoints to another disk and name it with "
                  "`--checkpoint.dir`; older checkpoints are complete, and `--resume auto` resumes from the newest.")
        if isinstance(error, (OwnershipError, TransportError)):
            remedy = error.texts["remedy"]
        return Written(step=job.step, folder=step_folder(self.folder, job.step), stall_seconds=job.stall_seconds,
                       error=error if isinstance(error, str) else _summarize_error(error), remedy=remedy)

    def _entries(self, number: int) -> list[dict[str, Any]] | None:
        """Entries of all ranks for their parts; None when this is closed first. OSError when a rank is lost: a rank
        that waits for a slow disk still publishes its actions (ranvier.comm.board)."""
        names = [self._name(number, rank) for rank in range(self._size)]
        heard: dict[int, tuple[int, str]] | None = None
        heard_at, store = time.monotonic(), self._store
        with _shared_store():
            while not store.check(names):
                if self._closing.wait(_POLL_SECONDS):
                    return None
                if time.monotonic() - heard_at > self._timeout:
                    late = [rank for rank, name in enumerate(names) if not store.check([name])]
                    before, heard, heard_at = heard, read_actions(store, late), time.monotonic()
                    for rank in late:
                        if before is not None and before.get(rank) == heard.get(rank):
                            raise OSError(f"rank {rank} has not written its part, and is not heard of any more")
            entries = [json.loads(store.get(name)) for name in names]
            for name in names:
                store.delete_key(name)
        return entries

    def _wait_until(self, when: Callable[[], bool]) -> bool:
        """Wait until `when` is true; False if this is closed first."""
        while not when():
            if self._closing.wait(_POLL_SECONDS):
                return False
        return True

    def _name(self, number: int, rank: int) -> str:
        return f"{_STORE}/{self._token}/{number}/{rank}"

    # ------------------------------------------------------------------ reading

    def load(self, path: Path | str | None = None, *,
             engine_for: Callable[[Manifest], Engine] | None = None) -> Loaded | None:
        """Resume from the newest complete checkpoint of the folder, or from the one at `path` (a checkpoint, a folder
        of them, or a run's folder). Returns None, and changes nothing, if the folder has no checkpoint. A write that
        `save` has begun is finished first, and counts. Without `path`, raises the errors of `claim`, except that a
        folder that cannot be written is still read.

        engine_for: called on every rank with the manifest before the checkpoint is read; the engine that it returns, on
        the same ranks, replaces the current one.

        CheckpointError when a checkpoint is of another model, when the one that `path` names is damaged, and when the
        folder has checkpoints but no complete one.
        """
        check_arguments(Checkpoints.load, locals())
        if engine_for is None:
            self.engine.check_usable("Checkpoints.load")
            self.engine.refuse_in_averages("Checkpoints.load")
        self._join()
        self._is_beside_others = True
        where = self.folder if path is None else Path(path)
        with self.engine.during("Checkpoints.load"):
            if path is None:
                with suppress(CheckpointError):
                    self.claim()
            found = [str(folder) for folder in find(where)] if self._rank == 0 else None
            folders = self._ranks.gather_objects(found)[0]
        skipped: list[str] = []
        for folder in map(Path, folders):
            saved, problem = self._open(folder)
            if saved is not None and problem is None:
                if engine_for is not None:
                    self.engine = engine_for(saved.manifest)
                self._load(saved)
                return Loaded(folder=folder, step=saved.manifest.step, about=saved.manifest.about,
                              frozen=saved.manifest.frozen, skipped=tuple(skipped))
            skipped.append(str(problem))
            self.damaged.add(folder)
        if skipped:
            raise CheckpointError("has no complete checkpoint: " + "; ".join(skipped), code="no-whole-checkpoint",
                                  where=str(where),
                                  remedy="Name another one with `--resume`, or start again with `--resume none` and "
                                         "another `--run-dir`.")
        if path is not None:
            raise CheckpointError("is neither a checkpoint nor a folder of them", code="not-a-checkpoint",
                                  where="resume", value=str(path),
                                  remedy="Name a folder such as RUN/checkpoint/step-100, RUN/checkpoint, or RUN.")
        return None

    def _open(self, folder: Path) -> tuple[Saved | None, str | None]:
        """The checkpoint in `folder`, whose files all ranks have checked together, and what is wrong with it."""
        saved = problem = None
        try:
            saved = Saved(folder)
            own_files = range(self._rank, len(saved.manifest.files), self._size)
            problem = next(saved.damage(own_files), None)
        except CheckpointError as error:
            problem = error
        problems = self._ranks.gather_objects(problem and f"{problem.where}: {problem.what}")
        return saved, next((text for text in problems if text), None)

    def _load(self, saved: Saved) -> None:
        """Read this rank's part. If a rank cannot, all ranks raise the error of the first such rank."""
        problem = None
        try:
            state.load(self.engine, saved)
            left_out = self._saved_objects().load(saved)
            if left_out and self._rank == 0:
                warnings.warn(f"checkpoint {saved.folder} has states that are not loaded: Checkpoints(objects=...) has "
                              f"no {', '.join(left_out)}", stacklevel=4)
        except Exception as error:
            problem = error if isinstance(error, CheckpointError) else CheckpointError(
                f"cannot be loaded: {_summarize_error(error)}", code="checkpoint-not-loadable",
                where=f"checkpoint {saved.folder}",
                remedy="Resume with the model and the optimizer that it was written with.")
            problem.__cause__ = None if problem is error else error
        finally:
            saved.close()
        problems = self._ranks.gather_objects(problem and problem.texts)
        for text in problems:
            if text:
                raise problem or CheckpointError(**text)


@contextmanager
def _shared_store() -> Iterator[None]:
    """A context in which a store that does not answer is a TransportError: what other ranks have written is then
    unknown."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError("the store that the ranks share is gone", code="store-gone", where="store",
                             value=str(error).partition("\n")[0], remedy="The launcher or rank 0's machine is gone: "
                             "start again with `--resume auto`; older checkpoints are complete.") from error


def _summarize_error(error: Exception) -> str:
    """An error in a few words."""
    if isinstance(error, (OwnershipError, TransportError)):
        return f"{error.where}: {error.what}"
    if isinstance(error, (OSError, SafetensorError, CheckpointError)):
        return getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {error}"


def _check_about(about: Mapping[str, object]) -> None:
    if not isinstance(about, Mapping):
        raise CheckpointError("is not a dict", code="about-not-dict", where="Checkpoints.save(about=...)", value=about,
                              remedy="Call save() without it: the engine counts the steps. `about` is for your own "
                                     "notes.")
    try:
        json.dumps(about, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"is not JSON: {error}", code="about-not-json", where="Checkpoints.save(about=...)",
                              remedy="Give texts, numbers, lists and dicts.") from error


_entry = TypeAdapter(dict[str, dict[str, SavedTensor]])


def _key(number: int) -> str:
    """The name of a piece in its file."""
    return f"piece-{number}"


def _manifest_entries(pieces: list[Piece]) -> dict[str, dict[str, Any]]:
    """The pieces of a rank as manifest entries, all in file 0."""
    found: dict[str, dict[str, Any]] = {}
    for number, piece in enumerate(pieces):
        entry = found.setdefault(piece.kind, {}).setdefault(piece.name, {
            "dtype": str(piece.tensor.dtype).removeprefix("torch."), "shape": piece.shape, "pieces": []})
        entry["pieces"].append((0, _key(number), piece.box))
    return found


def _manifest(job: _Job, entries: list[dict[str, Any]]) -> Manifest:
    """The manifest for the parts of all ranks."""
    parts: list[File] = []
    tensors: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["file"] is None:
            continue
        for kind, names in entry["tensors"].items():
            for name, tensor in names.items():
                place = tensors.setdefault(kind, {}).setdefault(name, {**tensor, "pieces": []})
                place["pieces"] += [(len(parts), key, box) for _, key, box in tensor["pieces"]]
        parts.append(File(**entry["file"]))
    names = sorted({name for entry in entries for name in entry["frozen"]})
    missed = {name: count for entry in entries for name, count in entry["missed_updates"].items()}
    groups = merge_groups(group for entry in entries for group in entry["optimizer_groups"])
    return Manifest(**job.head, frozen=tuple(names), missed_updates=missed, optimizer_groups=groups,
                    files=tuple(parts),
                    tensors=_entry.validate_json(json.dumps(tensors)))
