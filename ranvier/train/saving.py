"""A run's checkpoints: when they are written, where a run resumes, and which settings may change then."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from ranvier.checkpoint.checkpoints import Checkpoints, Loaded, Written
from ranvier.checkpoint.manifest import BEST, Manifest, damaged_error, find, read_manifest, step_folder, step_of
from ranvier.checkpoint.manifest import checkpoints as listed
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun
from ranvier.data.task import Prepared
from ranvier.elastic.state import ElasticState
from ranvier.errors import CheckpointError, ConfigError, UnsavedError
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.result import BatchResult
from ranvier.system.lease import Lease
from ranvier.train.best import BestEvaluation
from ranvier.train.events import NoteEvent
from ranvier.train.logs import read_events
from ranvier.train.report import versions


@dataclass(frozen=True, kw_only=True)
class Start:
    """The point from which a run starts. step: steps done before. offset: added to a sample's position in the data.
    continues: whether the run's folder has the first part of the same run."""

    step: int = 0
    offset: int = 0
    continues: bool = False
    notes: list[NoteEvent] = field(default_factory=list)
    loaded: Loaded | None = None
    elastic: Mapping[str, object] = field(default_factory=dict)
    best: Mapping[str, object] = field(default_factory=dict)


@checked(frozen=True, kw_only=True, config=ConfigDict(extra="ignore", strict=True))
class BestState:
    """Result of `BestEvaluation.state`."""

    metric: str
    value: float | None
    step: Annotated[int, Ge(0)] | None
    reference: float | None
    since: Annotated[int, Ge(0)]


@checked(frozen=True, kw_only=True, config=ConfigDict(extra="ignore", strict=True))
class CheckpointMetadata:
    """A run's metadata in a checkpoint, as `Saving.save` wrote it; all defaults if another training loop wrote it."""

    samples: Annotated[int, Ge(0), Lt(1 << 62)] | None = None
    """Sequences consumed."""
    text: str | None = None
    """The fingerprint of the tokens."""
    tokenizer: str | None = None
    """The fingerprint of the tokenizer."""
    labels: list[str] | None = None
    """Names of classes by number, if the run has named classes."""
    guard: dict[str, list[float]] = field(default_factory=lambda: {"losses": []})
    run: dict[str, object] = field(default_factory=dict)
    elastic: dict[str, object] = field(default_factory=dict)
    """Frozen layers, and the history of the mesh: `Elasticity.document`."""
    best: BestState | None = None
    """The best evaluation so far."""

    @property
    def values(self) -> dict[str, object]:
        """The run's settings by dotted name."""
        nested = {f"{section}.{key}": value for section, values in self.run.items() if isinstance(values, dict)
                  for key, value in values.items()}
        return {**self.run, **nested}


def read_metadata(loaded: Loaded) -> CheckpointMetadata:
    """Read a run's metadata from a checkpoint. CheckpointError if a field has an impossible value."""
    try:
        found = TypeAdapter(CheckpointMetadata).validate_json(json.dumps(dict(loaded.about)))
        ElasticState.read(found.elastic)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise damaged_error("checkpoint-about-malformed", loaded.folder,
                            f"about.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _checkpoints(run: ResolvedRun, engine: Engine, lease: Lease | None) -> Checkpoints:
    made = Checkpoints(engine, checkpoint_folder(run), keep=run.checkpoint.keep, keep_every=run.checkpoint.keep_every,
                       background=run.checkpoint.background, timeout_seconds=run.comm.timeout_seconds, lease=lease)
    made.claim()
    return made


def checkpoint_folder(run: ResolvedRun) -> Path:
    """Folder of the checkpoints of a run whose folder is known."""
    if run.checkpoint.dir is not None:
        return run.checkpoint.dir
    assert run.run_dir is not None
    return run.run_dir / "checkpoint"


def checkpoint_class_names(run: ResolvedRun) -> tuple[str, ...]:
    """The names of classes, by number, in the checkpoint from which the run resumes; none if it has none."""
    places = [Path(run.resume)] if run.resume not in ("none", "auto") else []
    if run.resume == "auto" and run.run_dir is not None:
        places = [checkpoint_folder(run), Path(read.origin(run.run_dir))]
    for folder in (folder for place in places for folder in find(place)):
        with suppress(CheckpointError):  # the next checkpoint may be complete
            labels = read_manifest(folder).about.get("labels")
            return tuple(map(str, labels)) if isinstance(labels, list) else ()
    return ()


class Saving:
    """The training loop's use of checkpoints. Methods are collective, except `take_notes`.

    data: the run's data. lease: of the folder of checkpoints, on rank 0. origin: as below, on a rank that has joined a
    running run.
    """

    def __init__(self, run: ResolvedRun, recipe: str, engine: Engine, data: Prepared, lease: Lease | None,
                 origin: str | None = None) -> None:
        assert run.run_dir is not None  # all ranks have agreed on it
        self._run, self._recipe, self._engine, self._text = run, recipe, engine, data.fingerprint
        self._lease = lease
        self._labels = list(data.class_names)
        self._tokenizer = None if data.tokenizer is None else data.tokenizer.fingerprint
        self.checkpoints = _checkpoints(run, engine, lease)
        self.origin = self.checkpoints.broadcast_from_rank0(read.origin(run.run_dir)) if origin is None else origin
        """The checkpoint in another folder from which this folder's run began; "none" if it began from scratch."""
        self.offset = 0
        """Sequences consumed in addition to those of the steps: skipped by a change of the batch size or a rollback."""
        self.saved_step: int | None = None
        """The step after which the last checkpoint was begun; None if it is known to have failed."""
        self._last_error: str | None = None  # of the last checkpoint
        self.published_step = 0
        """The last step whose numbers are in the run's folder; rank 0 only. No checkpoint of a later step gets its
        final name: a run that died then and resumed from it would never report that step's numbers."""

    def move(self, run: ResolvedRun, engine: Engine) -> None:
        """Continue with another engine, perhaps on another mesh; the previous `Checkpoints` is closed."""
        self._run, self._engine = run, engine
        damaged, self.checkpoints = self.checkpoints.damaged, _checkpoints(run, engine, self._lease)
        self.checkpoints.damaged |= damaged

    # ------------------------------------------------------------------ where the run begins

    def start(self, engine_for: Callable[[int], Engine]) -> Start:
        """Resume as `run.resume` says. CheckpointError or ConfigError if that is not possible.

        engine_for: returns the run's engine with this many frozen layers, which replaces the previous one: the
        parameters change once freezing has ended a tie.
        """
        def engine(manifest: Manifest) -> Engine:
            self._engine = engine_for(manifest.frozen_layers)
            return self._engine

        folder, source = self.checkpoints.folder, self._run.resume
        if source == "none" or source not in ("auto", self.origin):
            self._refuse_others(None if source == "none" else Path(source))
        if source == "none":
            return Start()
        own = source in ("auto", self.origin)
        loaded = self.checkpoints.load(None if own else source, engine_for=engine)
        if loaded is None and self.origin != "none":
            loaded = self.checkpoints.load(self.origin, engine_for=engine)
        if loaded is None:
            self._refuse_lost()
            return Start(notes=[NoteEvent(step=0, event="resume", text=f"no checkpoint in {folder}: starting over")])
        metadata = read_metadata(loaded)
        self._check_same(loaded, metadata)
        continues = loaded.folder.resolve().parent == folder.resolve()
        if loaded.step >= self._run.train.steps and not continues:
            raise ConfigError(f"leaves nothing to do: {loaded.folder} has taken {loaded.step} steps",
                              code="nothing-left-to-train", where="train.steps", value=self._run.train.steps,
                              remedy=f"Set `--train.steps` above {loaded.step}, or leave `--resume` out.")
        usual = self._run.samples_of(loaded.step)
        self.offset = (usual if metadata.samples is None else metadata.samples) - usual
        if self._engine.bad_steps is not None:
            self._engine.bad_steps.load(metadata.guard)
        notes = [NoteEvent(step=loaded.step, event="checkpoint-skipped", text=text) for text in loaded.skipped]
        return Start(step=loaded.step, offset=self.offset, continues=continues,
                     notes=[*notes, self._note(loaded), *self._differences(loaded.step, metadata)], loaded=loaded,
                     elastic=metadata.elastic, best={} if metadata.best is None else asdict(metadata.best))

    def _check_same(self, loaded: Loaded, metadata: CheckpointMetadata) -> None:
        """CheckpointError for differences that give parameters of the same shapes another meaning."""
        def other(code: str, what: str, value: object, remedy: str) -> CheckpointError:
            return CheckpointError(what, code=code, where=f"checkpoint {loaded.folder}", value=value, remedy=remedy)

        values, heads, now = read.flatten(self._run), metadata.values.get("model.heads"), self._run.model.heads
        if heads not in (None, now):
            raise other("checkpoint-of-other-heads", f"was written by a model with {heads} heads", now,
                        f"Set `--model.heads {heads}`.")
        for name in REFUSED:
            before = metadata.values.get(name)
            if before != values[name] and is_known(name, metadata.values):
                setting = f"{read.flag(name)} {read.as_text(before)}"
                raise other("checkpoint-of-other-setting", f"was written with {setting}", read.as_text(values[name]),
                            f"Set --{setting}.")
        if metadata.tokenizer is not None and self._tokenizer not in (None, metadata.tokenizer):
            own = loaded.folder.absolute().parent.parent / "tokenizer.json"
            raise other("checkpoint-of-other-tokenizer", "was trained with another tokenizer: the same ids would mean "
                        "other tokens", self._run.data.tokenizer, f"Set `--data.tokenizer {own}`." if own.exists() else
                        "Set `--data.tokenizer` to the path of its tokenizer.")
        if metadata.labels and self._labels and metadata.labels != self._labels:
            raise other("checkpoint-of-other-classes", "was trained on other classes: the same outputs would mean "
                        "other classes", self._labels[:20], f"Give data with its classes: {metadata.labels[:20]}.")

    def _refuse_others(self, path: Path | None) -> None:
        """ConfigError if the folder has checkpoints of another run, or checkpoints newer than `path`, which --resume
        auto would use the next time."""
        newest = listed(self.checkpoints.folder)[:1]
        if not newest:
            return
        if path is None or path.resolve().parent != newest[0].resolve().parent:
            raise ConfigError("has checkpoints of another run", code="checkpoints-of-another-run",
                              where="checkpoint.dir", value=str(self.checkpoints.folder),
                              remedy="Resume with `--resume auto`, or choose another folder.")
        if step_of(path) != step_of(newest[0]):
            raise ConfigError(f"is older than {newest[0].name} in the same folder, which would be mixed with new "
                              "checkpoints", code="checkpoint-older-than-newest", where="resume", value=str(path),
                              remedy="Choose another `--run-dir`, or remove the newer ones.")

    def _refuse_lost(self) -> None:
        """ConfigError if the checkpoints that the folder's run has saved are gone: a new run would replace its logs."""
        assert self._run.run_dir is not None
        saved = [line["step"] for line in read_events(self._run.run_dir).lines if line["event"] == "checkpoint"]
        if last := self.checkpoints.broadcast_from_rank0(str(max(saved, default=""))):
            raise ConfigError(f"has no checkpoint, but the run has saved one after step {last}",
                              code="checkpoints-gone", where="checkpoint.dir", value=str(self.checkpoints.folder),
                              remedy="Name the folder where they are now, or mount its disk; to start over, choose "
                                     "another `--run-dir`, or remove events.jsonl.")

    def _note(self, loaded: Loaded) -> NoteEvent:
        was, now = loaded.about.get("mesh"), str(self._engine.mesh)
        moved = f", written on {was}" if was is not None and was != now else ""
        return NoteEvent(step=loaded.step, event="resume", text=f"resumes from {loaded.folder}{moved}",
                         fields={"folder": str(loaded.folder), "mesh": now, "written_on": was})

    def _differences(self, step: int, metadata: CheckpointMetadata) -> Iterator[NoteEvent]:
        """Notes about settings and data that differ from those before the run resumed."""
        if metadata.text not in (None, self._text):
            yield NoteEvent(step=step, event="resume", text="the text has changed: samples differ from here on")
        values = read.flatten(self._run)
        if step > self._run.train.steps:
            yield NoteEvent(step=step, event="resume", text=f"has taken more steps than train.steps, "
                                                            f"{self._run.train.steps}: nothing is left to do")
        for name, before in differences(metadata.values, values):
            was, now = read.as_text(before), read.as_text(values[name])
            yield NoteEvent(step=step, event="changed", text=f"{read.flag(name)} was {was} and is {now} now",
                            fields={"setting": name, "before": was, "now": now})

    # ------------------------------------------------------------------ while it trains

    def save(self, step: int, result: BatchResult | None, elastic: Mapping[str, object],
             best: BestEvaluation | None = None) -> float | None:
        """Begin a checkpoint; returns the seconds that training waited for it. Saves nothing and returns None if the
        step was taken although its loss is NaN. result: of the step, None if it was already reported as good. best: the
        best evaluation so far, whose checkpoint stays."""
        if result is not None and result.stepped and math.isnan(result.loss):
            return None
        self.saved_step = step
        return self.checkpoints.save({
            "recipe": self._recipe, "run": read.document(self._run, _SAVED_SETTINGS), "text": self._text,
                                      "versions": versions(),
            **({"labels": self._labels} if self._labels else {}), "elastic": elastic,
            **({} if self._tokenizer is None else {"tokenizer": self._tokenizer}),
            "samples": self._run.samples_of(step) + self.offset,
            **({} if self._engine.bad_steps is None else {"guard": self._engine.bad_steps.state()}),
            **({} if best is None else {"best": best.state()}),
        }, when=lambda: self.published_step >= step,
            best=best.step if best is not None and self._run.checkpoint.best is not None else None)

    def take_notes(self) -> Iterator[NoteEvent]:
        """Notes about checkpoints written since the last call; only rank 0 has them. CheckpointError if the run should
        stop."""
        for written in self.checkpoints.written():
            yield self._event(written)
            if written.error and self._run.checkpoint.on_error == "stop":
                raise self._error(written)

    def finish(self) -> None:
        """Wait until all begun checkpoints are written. A checkpoint that has failed counts as not begun."""
        written = self.checkpoints.wait()
        self._last_error = written[-1].error if written else self._last_error
        if written and written[-1].error:
            self.saved_step = None

    def lacks_last(self) -> bool:
        """On rank 0: whether the last checkpoint begun is not on the disk yet. Does not wait for it."""
        return self.saved_step is not None and self._missing(self.saved_step) is not None

    def marked_best(self) -> str | None:
        """On rank 0: the checkpoint that is marked as the best. If the checkpoint of the best evaluation has failed,
        this is the best one before it."""
        link = self.checkpoints.folder / BEST
        return str(link.resolve()) if link.exists() else None

    def require(self, step: int) -> None:
        """UnsavedError, on all ranks, unless the checkpoint after `step`, the run's last, is on the disk."""
        self.finish()
        problem = None
        if self._engine.world.rank == 0:
            problem = self._missing(step)
        problem = self.checkpoints.broadcast_from_rank0(problem or "")
        if problem:
            newest = self.checkpoints.broadcast_from_rank0(next(map(str, listed(self.checkpoints.folder)), ""))
            existing = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
            raise UnsavedError(f"is not on the disk, so the run is not done: {problem}; {existing}",
                               code="unsaved", where=f"checkpoint {step_folder(self.checkpoints.folder, step)}",
                               remedy="Free space there, or move the folder of checkpoints to another disk and name it "
                                      "with `--checkpoint.dir`, and resume with `--resume auto` `--run-dir "
                                      f"{self._run.run_dir}`.")

    def _missing(self, step: int) -> str | None:
        """Why the checkpoint after `step` is missing or incomplete, if it is; checksums are not computed."""
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
        return CheckpointError(f"cannot be written: {written.error}", code="checkpoint-not-written",
                               where=f"checkpoint {written.folder}", remedy=written.remedy)


_SAVED_SETTINGS = frozenset(name for name in read.settings() if not name.startswith("log."))
"""Settings that a checkpoint contains: trackers, their projects and servers are private to the user who ran it."""

PLACE = ("mesh.", "batch.microbatch_size", "pipeline.", "tensor.", "comm.", "launch.", "log.", "memory", "checkpoint.",
         "model.compile", "model.attention_kernel", "optim.offload", "optim.bucket_size", "optim.chunk_buckets",
         "optim.buckets_in_flight", "optim.shard", "optim.update_in_backward", "data.corpus", "data.tokenizer",
         "data.cache_dir", "data.max_bytes", "elastic.cache", "deterministic", "resume", "run_dir", "max_restarts")
"""Prefixes of settings whose changes are not reported. Text and tokenizer are compared by content, not by path."""

REFUSED = ("data.task", "model.norm_epsilon", "lora.alpha", "lora.method")
"""Settings that must not change, apart from the number of heads and from the model's sizes and the optimizer's
algorithm, which the tensors of a checkpoint show."""


def differences(before: Mapping[str, object], values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(setting, value in the checkpoint) of all changed settings to report, by dotted name.

    before: settings in the checkpoint. values: all settings of the run.
    """
    for name, value in values.items():
        if name.startswith(PLACE) or name in REFUSED or not is_known(name, before):
            continue
        was = before[name] if name in before else read.settings()[name].default
        was = tuple(was) if isinstance(was, list) else was
        if was != value and str(was) != str(value):  # paths are text in a checkpoint
            yield name, was


def is_known(name: str, before: Mapping[str, object]) -> bool:
    """Whether a checkpoint records a setting. A run omits settings that are None; an imported checkpoint has only some
    settings."""
    return name in before or "seed" in before
