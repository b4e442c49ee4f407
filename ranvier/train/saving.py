"""A run's checkpoints: when they are written, what is told of them, and where a run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from ranvier import resolve
from ranvier.checkpoint.checkpoints import Checkpoints, Loaded, Written
from ranvier.checkpoint.manifest import checkpoints as listed
from ranvier.checkpoint.manifest import damaged, read_manifest, step_folder, step_of
from ranvier.data.task import Prepared
from ranvier.errors import CheckpointError, ConfigError, UnsavedError
from ranvier.lease import Lease
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.result import BatchResult
from ranvier.run import Run
from ranvier.train import resume
from ranvier.train.events import NoteEvent
from ranvier.train.report import versions


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins. step: steps done before. offset: what is added to a sample's place in the data. continues:
    whether the run's folder has the first part of the same run."""

    step: int = 0
    offset: int = 0
    continues: bool = False
    notes: list[NoteEvent] = field(default_factory=list)
    loaded: Loaded | None = None
    elastic: Mapping[str, object] = field(default_factory=dict)


@checked(frozen=True, kw_only=True, config=ConfigDict(extra="ignore", strict=True))
class Told:
    """What a checkpoint says of its run: what `Saving.save` has told it. Of another loop's, nothing."""

    samples: Annotated[int, Ge(0), Lt(1 << 62)] | None = None
    """Sequences consumed."""
    text: str | None = None
    """The fingerprint of the tokens."""
    tokenizer: str | None = None
    """The fingerprint of the tokenizer."""
    labels: list[str] | None = None
    """Names of classes by number, where the run has classes with names."""
    guard: dict[str, list[float]] = field(default_factory=lambda: {"losses": []})
    run: dict[str, object] = field(default_factory=dict)
    elastic: dict[str, object] = field(default_factory=dict)
    """What layers are frozen, and how the run came to its mesh: `Elasticity.state`."""

    @property
    def values(self) -> dict[str, object]:
        """The run's settings by dotted name."""
        nested = {f"{section}.{key}": value for section, values in self.run.items() if isinstance(values, dict)
                  for key, value in values.items()}
        return {**self.run, **nested}


def told_by(loaded: Loaded) -> Told:
    """CheckpointError where what it says cannot be."""
    try:
        return TypeAdapter(Told).validate_json(json.dumps(dict(loaded.about)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise damaged(loaded.folder, f"about.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _checkpoints(run: Run, engine: Engine, lease: Lease | None) -> Checkpoints:
    made = Checkpoints(engine, checkpoint_folder(run), keep=run.checkpoint.keep, keep_every=run.checkpoint.keep_every,
                       timeout_seconds=run.comm.timeout_seconds, lease=lease)
    made.claim()
    return made


def checkpoint_folder(run: Run) -> Path:
    """Where the checkpoints of a run are whose folder is known."""
    return run.checkpoint.dir or run.run_dir / "checkpoint"


class Saving:
    """What the loop does with checkpoints. Methods are collective, but for `tell`.

    data: what the run reads. lease: rank 0's, of the folder of checkpoints.
    """

    def __init__(self, run: Run, recipe: str, engine: Engine, data: Prepared, lease: Lease | None) -> None:
        self._run, self._recipe, self._engine, self._text = run, recipe, engine, data.fingerprint
        self._lease = lease
        self._labels = list(data.class_names)
        self._tokenizer = None if data.tokenizer is None else data.tokenizer.fingerprint
        self.checkpoints = _checkpoints(run, engine, lease)
        self.origin = self.checkpoints.of_first(resolve.origin(run.run_dir))
        """The checkpoint elsewhere that the run of this folder began with; none where it began anew."""
        self.offset = 0
        """Sequences that were consumed beyond the steps' own: what a change of batch or going back has left out."""
        self.saved_step: int | None = None
        """After which the last checkpoint was begun; None where it is known to have failed."""
        self._last_error: str | None = None
        """What was wrong with the checkpoint that was begun last."""
        self.told_step = 0
        """The last step whose numbers are in the run's folder; rank 0 only. No checkpoint of a later one gets its name,
        or a run that died then and went on from it would never tell that step's numbers."""

    def move(self, run: Run, engine: Engine, *, offset: int, saved_step: int | None) -> None:
        """The run goes on with another engine, on another mesh perhaps; the old checkpoints are closed."""
        self._run, self._engine, self.offset, self.saved_step = run, engine, offset, saved_step
        damaged, self.checkpoints = self.checkpoints.damaged, _checkpoints(run, engine, self._lease)
        self.checkpoints.damaged |= damaged

    # ------------------------------------------------------------------ where the run begins

    def start(self) -> Start:
        """Go on as `run.resume` says. CheckpointError or ConfigError where that cannot be."""
        folder, source = self.checkpoints.folder, self._run.resume
        if source == "none" or source not in ("auto", self.origin):
            self._refuse_others(None if source == "none" else Path(source))
        if source == "none":
            return Start()
        own = source in ("auto", self.origin)
        loaded = self.checkpoints.load(None if own else source)
        if loaded is None and self.origin != "none":
            loaded = self.checkpoints.load(self.origin)
        if loaded is None:
            return Start(notes=[NoteEvent(step=0, event="resume", text=f"no checkpoint in {folder}: from the start")])
        told = told_by(loaded)
        self._check_same(loaded, told)
        continues = loaded.folder.resolve().parent == folder.resolve()
        if loaded.step >= self._run.train.steps and not continues:
            raise ConfigError(f"leaves nothing to do: {loaded.folder} has taken {loaded.step} steps",
                              where="train.steps", value=self._run.train.steps,
                              remedy=f"Set --train.steps above {loaded.step}, or leave --resume out.")
        usual = loaded.step * self._run.batch.global_size
        self.offset = (usual if told.samples is None else told.samples) - usual
        if self._engine.bad_steps is not None:
            self._engine.bad_steps.load(told.guard)
        notes = [NoteEvent(step=loaded.step, event="checkpoint-skipped", text=text) for text in loaded.skipped]
        return Start(step=loaded.step, offset=self.offset, continues=continues,
                     notes=[*notes, self._note(loaded), *self._differences(loaded.step, told)], loaded=loaded,
                     elastic=told.elastic)

    def _check_same(self, loaded: Loaded, told: Told) -> None:
        """CheckpointError for what gives parameters of the same shapes another meaning."""
        where, values = f"checkpoint {loaded.folder}", resolve.flatten(self._run)
        heads, now = told.values.get("model.heads"), self._run.model.heads
        if heads not in (None, now):
            raise CheckpointError(f"was written by a model with {heads} heads", where=where,
                                  value=now, remedy=f"Set --model.heads {heads}.")
        for name in resume.REFUSED:
            before = told.values.get(name)
            if before != values[name] and resume.is_known(name, told.values):
                raise CheckpointError(f"was written with {resolve.flag(name)} {resolve.as_text(before)}", where=where,
                                      value=resolve.as_text(values[name]),
                                      remedy=f"Set --{resolve.flag(name)} {resolve.as_text(before)}.")
        if told.tokenizer is not None and self._tokenizer not in (None, told.tokenizer):
            own = loaded.folder.absolute().parent.parent / "tokenizer.json"
            raise CheckpointError("was trained with another tokenizer: the same numbers would be other tokens",
                                  where=where, value=self._run.data.tokenizer,
                                  remedy=f"Set --data.tokenizer {own if own.exists() else 'to the path of its own'}.")
        if told.labels and self._labels and told.labels != self._labels:
            raise CheckpointError("was trained on other classes: the same outputs would be others", where=where,
                                  value=self._labels[:20], remedy=f"Give data with its classes: {told.labels[:20]}.")

    def _refuse_others(self, path: Path | None) -> None:
        """ConfigError where the folder has checkpoints of another run, or (path is one of them) newer ones, which
        --resume auto would take the next time."""
        newest = listed(self.checkpoints.folder)[:1]
        if not newest:
            return
        if path is None or path.resolve().parent != newest[0].resolve().parent:
            raise ConfigError("has checkpoints of another run", where="checkpoint.dir",
                              value=str(self.checkpoints.folder),
                              remedy="Go on with --resume auto, or choose another folder.")
        if step_of(path) != step_of(newest[0]):
            raise ConfigError(f"is older than {newest[0].name} in the same folder, which would be mixed up with what "
                              "comes now", where="resume", value=str(path),
                              remedy="Choose another --run-dir, or remove the newer ones.")

    def _note(self, loaded: Loaded) -> NoteEvent:
        was, now = loaded.about.get("mesh"), str(self._engine.mesh)
        moved = f", written on {was}" if was is not None and was != now else ""
        return NoteEvent(step=loaded.step, event="resume", text=f"goes on from {loaded.folder}{moved}",
                         fields={"folder": str(loaded.folder), "mesh": now, "written_on": was})

    def _differences(self, step: int, told: Told) -> Iterator[NoteEvent]:
        """What makes the run another one than it was, though it goes on."""
        if told.text not in (None, self._text):
            yield NoteEvent(step=step, event="resume", text="the text is another one than before: samples differ from "
                                                            "here on")
        values = resolve.flatten(self._run)
        if step > self._run.train.steps:
            yield NoteEvent(step=step, event="resume", text=f"has taken more steps than train.steps, "
                                                            f"{self._run.train.steps}: nothing is left to do")
        for name, before in resume.differences(told.values, values):
            was, now = resolve.as_text(before), resolve.as_text(values[name])
            yield NoteEvent(step=step, event="changed", text=f"{resolve.flag(name)} was {was} and is {now} now",
                            fields={"setting": name, "before": was, "now": now})

    # ------------------------------------------------------------------ while it trains

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step`, which is not the last."""
        every = self._run.checkpoint.every
        return bool(every and step % every == 0)

    def save(self, step: int, result: BatchResult | None, elastic: Mapping[str, object]) -> float | None:
        """Begin a checkpoint; returns the seconds that training waited for it. None where the step was taken although
        its loss is no number: what comes of it is not kept. result: the step's, None where that was told as good."""
        if result is not None and result.stepped and math.isnan(result.loss):
            return None
        self.saved_step = step
        return self.checkpoints.save({
            "recipe": self._recipe, "run": resolve.document(self._run), "text": self._text, "versions": versions(),
            **({"labels": self._labels} if self._labels else {}), "elastic": elastic,
            **({} if self._tokenizer is None else {"tokenizer": self._tokenizer}),
            "samples": step * self._run.batch.global_size + self.offset,
            **({} if self._engine.bad_steps is None else {"guard": self._engine.bad_steps.state()}),
        }, when=lambda: self.told_step >= step)

    def tell(self) -> Iterator[NoteEvent]:
        """What has been written since the last call; only rank 0 knows. CheckpointError where the run is to stop."""
        for written in self.checkpoints.written():
            yield self._event(written)
            if written.error and self._run.checkpoint.on_error == "stop":
                raise self._error(written)

    def finish(self) -> None:
        """Wait until all that was begun has been written, or has failed: then it counts as not begun."""
        written = self.checkpoints.wait()
        self._last_error = written[-1].error if written else self._last_error
        if written and written[-1].error:
            self.saved_step = None

    def require(self, step: int) -> None:
        """UnsavedError, on all ranks, unless the checkpoint after `step`, the run's last, is on the disk."""
        self.finish()
        problem = None
        if self._engine.world.rank == 0:
            problem = self._missing(step)
        problem = self.checkpoints.of_first(problem or "")
        if problem:
            newest = self.checkpoints.of_first(next(map(str, listed(self.checkpoints.folder)), ""))
            there = f"the newest that is there is {newest}" if newest else "there is none"
            raise UnsavedError(f"is not on the disk, so the run is not done: {problem}; {there}",
                               where=f"checkpoint {step_folder(self.checkpoints.folder, step)}",
                               remedy="Free space there or choose another --checkpoint.dir, and go on with "
                                      f"--resume auto --run-dir {self._run.run_dir}.")

    def _missing(self, step: int) -> str | None:
        """Why the checkpoint after `step` cannot be seen to be whole; its checksums are not computed."""
        try:
            folder = step_folder(self.checkpoints.folder, step)
            for file in read_manifest(folder).files:
                if (folder / file.name).stat().st_size != file.size_bytes:
                    return f"{file.name} is cut off"
        except (CheckpointError, OSError) as error:
            return self._last_error or getattr(error, "what", None) or str(error)
        return None

    def _event(self, written: Written) -> NoteEvent:
        if written.error:
            return NoteEvent(step=written.step, event="checkpoint-failed", text=str(self._error(written)))
        megabytes = written.size_bytes / 2**20
        return NoteEvent(
            step=written.step, event="checkpoint",
            text=f"saved {written.folder} ({megabytes:,.1f} MiB in {written.write_seconds:.2f} s; training waited "
                 f"{1e3 * written.stall_seconds:.0f} ms)",
            fields={"folder": str(written.folder), "bytes": written.size_bytes, "seconds": written.write_seconds,
                    "stall_seconds": written.stall_seconds})

    def _error(self, written: Written) -> CheckpointError:
        return CheckpointError(f"cannot be written: {written.error}", where=f"checkpoint {written.folder}",
                               remedy=written.remedy)
