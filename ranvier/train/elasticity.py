"""The elastic side of a run: passes the ranks' measurements to the controller, and its decisions to all ranks.

Rank 0 decides (`ranvier.elastic.controller`) from the numbers of all ranks, and broadcasts the decision. The state is
saved in checkpoints and sent, at each transition, to ranks that return to the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import nan
from typing import Any

from ranvier.config.resolve import ResolvedRun
from ranvier.data.task import Prepared
from ranvier.elastic.change import Change, MeshRequest
from ranvier.elastic.controller import DecisionFacts, tried_microbatch_size
from ranvier.elastic.freezing import FreezePolicy, FrozenLayers
from ranvier.elastic.mesh_candidates import Note, StageMemory
from ranvier.elastic.named_policy import controller_of
from ranvier.elastic.similarity import similarity_loss
from ranvier.elastic.state import ElasticState, Similarities, StepFigures
from ranvier.errors import RanvierError
from ranvier.layout.layout import Layout
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.system.machine import affinity
from ranvier.train.best import LOSS
from ranvier.train.caching import Caching
from ranvier.train.events import Event, NoteEvent, StepEvent
from ranvier.train.layer_outputs import check_samples, layer_similarities
from ranvier.train.measured_blocks import RankMeasurement, measured_blocks, present_mesh, stage_seconds
from ranvier.train.memory import MemoryBudget, device_bytes, memory_or_problem
from ranvier.train.progress import Progress
from ranvier.train.runtime import RankRuntime


class Elasticity:
    """Only `decide`, `restore` and `record_gradients` are collective.

    tell: receives events. policy: replaces the one that `run.elastic.freeze` names.
    """

    def __init__(self, run: ResolvedRun, data: Prepared, *, tell: Callable[[Event], None],
                 policy: FreezePolicy | None = None) -> None:
        self._first, self._data, self._tell = run, data, tell
        self.controller = controller_of(run, data.epoch_samples, policy=policy, eval_samples=len(data.eval))
        self._compares_outputs = bool(getattr(self.controller.policy, "needs_activations", False))
        if self._compares_outputs:
            check_samples(data.eval, run.mesh.microbatch_parts, self.controller.policy_text)
        self.state = self.controller.initial()
        self.caching = Caching(run, data, tell)
        self.num_ranks = run.mesh.size
        """Present number of ranks of the run, including idle ones."""

    # ------------------------------------------------------------------ steps

    def begin(self, step: int, engine: Engine, frozen: FrozenLayers) -> None:
        """The run starts or resumes after `step`."""
        self.state = self.controller.begin(self.state, step, frozen, len(engine.layers))

    def evaluates_policy_after(self, step: int, before: int, after: int, frozen: FrozenLayers) -> bool:
        """Whether the policy is evaluated after `step`, which takes the data from sample `before` to `after`."""
        self.state = self.controller.evaluates_policy_after(self.state, step, before, after, frozen)
        return self.state.due

    def record_gradients(self, engine: Engine) -> None:
        """Record the layers' gradients after a step after which the policy is evaluated. Collective."""
        self.state = self.state.with_gradients(engine.layer_gradient_norms())

    def add_step(self, event: StepEvent) -> None:
        """Add the numbers of one more step."""
        metrics = {} if event.eval_loss is None else {LOSS: event.eval_loss, **event.eval_scores}
        self.state = self.state.with_step(event.step, event.step_seconds, StepFigures(
            loss=event.loss, targets=event.tokens, learning_rate=event.learning_rate, metrics=metrics))

    def microbatch_size(self, runtime: RankRuntime, step: int) -> int:
        """Samples in a microbatch of `step`, the same on every rank, since all know the same times."""
        if not self._first.elastic.profile_microbatches:
            return runtime.run.batch.microbatch_size
        self.state, size, note = tried_microbatch_size(
            self.state, runtime.run.mesh, runtime.run.replica_batch_size, len(runtime.frozen), step)
        self._report(step - 1, () if note is None else (note,))
        return size

    # ------------------------------------------------------------------ saved state

    def document(self, run: ResolvedRun, frozen: FrozenLayers, progress: Progress, unseen: StepFigures | None = None
                 ) -> dict[str, object]:
        """State for a rank that joins or returns; JSON-serialisable. unseen: the last step, if `add_step` has not seen
        its numbers yet."""
        state = self.state if unseen is None else replace(self.state, inputs=self.state.inputs.with_step(unseen))
        return {"frozen": frozen.prefix, "frozen_above": list(frozen.above),
                **{str(axis): size for axis, size in run.mesh.sizes.items()},
                "boundaries": run.pipeline.boundaries, "global_size": run.batch.global_size,
                **{f"first_{axis}": size for axis, size in self._first.mesh.sizes.items()},
                "num_ranks": self.num_ranks, **progress.state(), **state.document()}

    def checkpoint_document(self, run: ResolvedRun, frozen: FrozenLayers, progress: Progress,
                            unseen: StepFigures | None = None) -> dict[str, object]:
        """`document` for a checkpoint; empty for a run that has not changed since its start and freezes nothing."""
        changed = frozen or self.state.ledger.entries or run.mesh != self._first.mesh or progress.since != (0, 0)
        return self.document(run, frozen, progress, unseen) if self.controller.freezes or changed else {}

    def restore(self, saved: Mapping[str, Any], step: int, progress: Progress, runtime: RankRuntime) -> Change | None:
        """Restore the state from the `saved` part of a checkpoint; returns the change with which the run returns to its
        mesh. Collective."""
        def problem(run: ResolvedRun, frozen: FrozenLayers) -> str | None:
            found = memory_or_problem(run, frozen)
            first: str | None = runtime.ranks.gather_objects(str(found) if isinstance(found, RanvierError) else None)[0]
            return first

        engine = runtime.engine
        decision = self.controller.restore(
            saved, num_ranks=self.num_ranks, num_layers=len(engine.layers), step_samples=progress.size,
            boundaries=engine.boundaries or None, problem=problem)
        self.state = decision.state
        self._report(step, decision.notes)
        return decision.change

    def enter(self, runtime: RankRuntime, saved: Mapping[str, Any], change: Change, old: Mesh, moved: int,
              seconds: float, step: int, progress: Progress) -> bool:
        """The change from mesh `old` has been made. Returns whether this rank caches from now on.

        saved: the `document` of rank 0 before the change. progress: the progress before the change."""
        run = runtime.run
        self.state = self.controller.after_change(
            ElasticState.read(saved), change, step=step, old=old, new=run.mesh, moved_bytes=moved, seconds=seconds,
            remaining_steps=progress.steps_left(step))
        reads = progress.with_size(step, run.batch.global_size).steps_left(step) * run.batch.global_size
        return self.caching.enter(runtime, reads=reads)

    def facts(self) -> dict[str, object]:
        """Facts that this rank adds to the summary."""
        ledger = self.state.with_measured().ledger
        return self.caching.facts() | (
            {"ledger": [asdict(entry) for entry in ledger.entries]} if ledger.entries else {})

    def text(self) -> str:
        """The settings in words; empty if nothing is elastic."""
        elastic, policy = self._first.elastic, self.controller.policy_text
        if not self.controller.freezes:
            return ""
        words = [f"freezes by {policy}, {f'every {elastic.every} steps' if elastic.every else 'after each epoch'}"]
        if policy == "manual":
            words = [f"freezes by hand: {', '.join(elastic.manual)}"]
        elif policy == "untrained":
            words = ["freezes the layers in which nothing trains"]
        words += [text for enabled, text in ((elastic.dry_run, "dry run"), (elastic.auto_pipe, "packs the pipeline"),
                                             (elastic.auto_dp, "adds replicas"), (self.caching.is_on, "caches"))
                  if enabled]
        return ", ".join(words)

    # ------------------------------------------------------------------ deciding

    def decide(self, runtime: RankRuntime, step: int, progress: Progress, *, resize: MeshRequest | None,
               busy: Mapping[str, float], busy_steps: int) -> Change | None:
        """The change to make after `step`, or None; the same on every rank. resize: a user's request for another mesh.

        busy: seconds in each category of span on this rank, in `busy_steps` steps. Collective.
        """
        measured = runtime.ranks.gather_objects({"busy": dict(busy), "steps": busy_steps, "cores": affinity(),
                                                 "device_bytes": device_bytes(runtime.world.device)})
        compares = self.state.norms and self._compares_outputs
        similarities = layer_similarities(runtime, self._data.eval) if compares else None
        found = None
        if runtime.world.rank == 0:
            decision = self.controller.decide(
                self.state, self._measured_facts(runtime, step, progress, measured, similarities), resize)
            self._report(step, decision.notes)
            found = {"change": decision.change and asdict(decision.change), "state": decision.state.document()}
        found = runtime.ranks.gather_objects(found)[0]
        self.state = ElasticState.read(found["state"])
        return found["change"] and Change.read(found["change"])

    def _measured_facts(self, runtime: RankRuntime, step: int, progress: Progress, measured: Sequence[RankMeasurement],
                        similarities: Similarities | None) -> DecisionFacts:
        present, before = present_mesh(runtime), self.state.inputs.similarities
        sizes = [row["device_bytes"] for row in measured if row["device_bytes"] is not None]
        changes = None
        if similarities is not None:
            if before and len(before[0]) != runtime.run.mesh.microbatch_parts:
                before = None  # they came from other samples: each row has its own
            changes = tuple(nan if before is None else similarity_loss(layer, before[number])
                            for number, layer in enumerate(similarities))

        def budget(frozen: FrozenLayers) -> MemoryBudget:
            return MemoryBudget(first=self._first, frozen=frozen, device_bytes=min(sizes, default=None))

        return DecisionFacts(
            step=step, samples=progress.samples(step), remaining_steps=progress.steps_left(step),
            num_ranks=self.num_ranks, present=present, frozen=runtime.frozen, stages=runtime.engine.stage_of_layers(),
            stage_seconds=stage_seconds(runtime, measured), activation_change=changes, similarities=similarities,
            blocks=lambda: measured_blocks(runtime, measured, self.controller.profile(self.state)),
            problem=lambda run, frozen: budget(frozen).problem(run), caches=self.caching.would_cache,
            stage_memory=lambda frozen: StageMemory(limit_bytes=min(sizes, default=None),
                                                    needed=budget(frozen).stage_bytes))

    def _report(self, step: int, notes: Sequence[Note]) -> None:
        for note in notes:
            self._tell(NoteEvent(step=step, event=note.event, text=note.text, fields=note.fields))


def ended_ties(before: Layout | None, after: Layout, step: int) -> list[NoteEvent]:
    """Notes about ties that have ended because layers froze. before: the layout on the previous mesh; None on ranks
    that it did not use."""
    known = set() if before is None else {parameter.name for parameter in before.parameters
                                          if parameter.origin is not None}
    notes = []
    for parameter in after.parameters:
        if parameter.origin is not None and parameter.name not in known:
            text = f"{parameter.name} is no longer tied to {parameter.origin}"
            if not after[parameter.origin].trainable:
                text += ", which is frozen, and continues to train with its own weights"
            notes.append(NoteEvent(step=step, event="untied", text=text, fields={
                "parameter": parameter.name, "was": parameter.origin}))
    return notes
