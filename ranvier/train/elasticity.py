"""A run's elastic side: when layers freeze, which mesh follows, whether outputs of frozen layers are cached.

Rank 0 decides, from numbers of all ranks, and tells the others; what it knows goes into checkpoints and, at each
transition, to ranks that come back. The decisions themselves are pure (ranvier.elastic); this is where they meet the
run's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from statistics import median

from ranvier.data.task import Prepared
from ranvier.elastic.freezing import Facts, FreezePolicy, Remembers, decide, policy_of
from ranvier.elastic.ledger import Entry, Ledger
from ranvier.elastic.microbatch_profile import MicrobatchProfile, microbatch_counts, size_of
from ranvier.errors import RanvierError
from ranvier.machine import affinity
from ranvier.mesh import Mesh
from ranvier.optim.learning_rate import learning_rate
from ranvier.pipeline.engine import Engine
from ranvier.refit import on_mesh
from ranvier.run import Run
from ranvier.train.caching import Caching
from ranvier.train.change import Change
from ranvier.train.events import Event, NoteEvent, StepEvent
from ranvier.train.files import mesh_text
from ranvier.train.formation import Formation
from ranvier.train.judging import Judge
from ranvier.train.packing import Packing, packings, work_of
from ranvier.train.room import Room, device_bytes

_TRIAL_STEPS = 3
_RECENT_STEPS = 8
"""Steps whose median says how long one takes now."""


@dataclass(kw_only=True)
class Trying:
    """A number of microbatches that is being tried, for a few steps, of which the first warms up."""

    pipe: int
    data: int
    frozen: int
    count: int
    steps: set[int] = field(default_factory=set)
    taken: list[float] = field(default_factory=list)

    def took(self, step: int, seconds: float) -> bool:
        """One more step was measured. Whether that was the last."""
        if step in self.steps:
            self.taken.append(seconds)
        return len(self.taken) == _TRIAL_STEPS

    @property
    def seconds(self) -> float:
        return min(self.taken[1:])


class Elasticity:
    """What one run knows of itself as it changes. Only `decide` is collective.

    tell: takes events. policy: decides instead of what `run.elastic.freeze` names.
    """

    def __init__(self, run: Run, data: Prepared, *, tell: Callable[[Event], None],
                 policy: FreezePolicy | None = None) -> None:
        self._first, self._num_samples, self._tell = run, len(data.train), tell
        self.policy, self._own = policy or policy_of(run.elastic), policy is not None
        self._by_hand = run.elastic.freeze == "manual" and not self._own
        self.caching = Caching(run, data, tell)
        self.evaluations = 0
        """Of the freeze policy, so far."""
        self.ledger, self.profile, self.judge = Ledger(), MicrobatchProfile(), Judge(run, self._note)
        self._size = run.batch.global_size
        """The global batch now."""
        self._since = (0, 0)
        """Step of its last change, and the samples that were taken by then."""
        self._due = False
        """Whether the policy is still to be asked: the step after which it should have been may have been left out."""
        self._norms: tuple[float, ...] | None = None
        """Of the layers' gradients in the last step, where the policy is asked after it."""
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._trial: Trying | None = None
        self._told: set[tuple[int, int]] = set()
        """(pipe, data) whose best number of microbatches has been told."""

    # ------------------------------------------------------------------ the course of the run

    def _taken(self, step: int) -> int:
        """Samples that `step` steps come to."""
        since, taken = self._since
        return taken + (step - since) * self._size

    def left(self, step: int) -> int:
        """Steps of the present size that are still to come after `step`."""
        total = self._first.train.steps * self._first.batch.global_size
        return max(0, -(-(total - self._taken(step)) // self._size))

    def learning_rate(self, step: int) -> float:
        """That of `step`: the schedule's, at the same place in the data; with "scale" in proportion to the batch."""
        first = self._first.batch.global_size
        rate = learning_rate(self._first.train, min(self._taken(step) / first, self._first.train.steps))
        return rate * self._size / first if self._first.elastic.global_batch == "scale" else rate

    def asks_after(self, step: int, before: int, after: int, frozen: int) -> bool:
        """Whether the freeze policy is asked after `step`, which takes the data from sample `before` to `after`. Once
        it is to be asked, it is after each step until one has gradients to be judged by (`saw_gradients`)."""
        elastic = self._first.elastic
        if not self.freezes:
            return False
        if self._by_hand:
            due = any(at == step or (at < step and layers > frozen and not elastic.dry_run)
                      for at, layers in self.policy.depths)
        elif elastic.every:
            due = step % elastic.every == 0
        else:
            due = after // self._num_samples > before // self._num_samples
        self._due |= due
        return self._due

    def saw_gradients(self, engine: Engine) -> None:
        """The last step was one after which the policy is asked. Collective."""
        self._norms = engine.layer_gradient_norms()

    def begins(self, step: int, engine: Engine, frozen: int) -> None:
        """The run begins, or goes on, after `step`: depths given by hand for earlier steps hold at once."""
        if self._by_hand and self.asks_after(step, 0, 0, frozen):
            self._norms = (0.0,) * len(engine.layers)

    @property
    def asked(self) -> bool:
        """Whether the policy has something to decide on."""
        return self._norms is not None

    def saw(self, event: StepEvent) -> None:
        """One more step has been told."""
        self._recent.append(event.step_seconds)
        if self._trial is not None and self._trial.took(event.step, event.step_seconds):
            trial, self._trial = self._trial, None
            self.profile = self.profile.measured(trial.pipe, trial.data, trial.frozen, trial.count, trial.seconds)

    def microbatch_size(self, now: Formation, step: int) -> int:
        """Samples in a microbatch of `step`: the run's or, where numbers of them are profiled, of the one that is being
        tried, or was the fastest. The same on every rank, since all know the same times."""
        run = now.run
        if not self._first.elastic.profile_microbatches:
            return run.batch.microbatch_size
        pipe, data = run.mesh.pipe, run.mesh.data
        share = -(-run.batch.global_size // data)
        counts = microbatch_counts(pipe, share)
        if self._trial is None and (count := self.profile.next_count(pipe, data, now.frozen, counts)) is not None:
            self._trial = Trying(pipe=pipe, data=data, frozen=now.frozen, count=count)
        elif self._trial is None and (pipe, data) not in self._told:
            self._told.add((pipe, data))
            tried = {trial.microbatches: trial.seconds for trial in self.profile.trials
                     if (trial.pipe, trial.data) == (pipe, data)}
            best = self.profile.best(pipe, data, now.frozen, counts)
            self._note(step - 1, "microbatches", f"{best} microbatches of {-(-share // best)} are the fastest on "
                       f"{mesh_text(run.mesh)} (" + ", ".join(f"{count}: {1e3 * seconds:.0f} ms" for count, seconds in
                                                             sorted(tried.items())) + ")",
                       {"microbatches": best, "seconds": {str(count): tried[count] for count in sorted(tried)}})
        count = (self._trial.count if self._trial is not None else
                 self.profile.best(pipe, data, now.frozen, counts))
        if self._trial is not None:
            self._trial.steps.add(step)
        return size_of(share, count, run.mesh.row)

    # ------------------------------------------------------------------ what goes along

    def state(self, run: Run, frozen: int) -> dict[str, object]:
        """What a checkpoint keeps, and a rank that comes back needs; JSON-serialisable."""
        changed = frozen or self.ledger.entries or run.mesh != self._first.mesh or self._since != (0, 0)
        if not self.freezes and not changed:
            return {}
        return {"frozen": frozen, "data": run.mesh.data, "pipe": run.mesh.pipe, "evaluations": self.evaluations,
                "boundaries": run.pipeline.boundaries, "global_size": run.batch.global_size,
                "first_data": self._first.mesh.data,
                "first_size": self._first.batch.global_size,
                "first_pipe": self._first.mesh.pipe, "since": list(self._since), "size": self._size,
                "due": self._due,
                "norms": self._norms and [norm if isfinite(norm) else None for norm in self._norms],
                "ledger": self.ledger.to_dict(), "profile": self.profile.to_dict(),
                "policy": self.policy.state_dict() if isinstance(self.policy, Remembers) else None,
                "refused": [list(mesh) for mesh in sorted(self.judge.refused)]}

    @property
    def freezes(self) -> bool:
        """Whether there is a policy that may freeze layers."""
        return self._own or self._first.elastic.freeze != "none"

    def load(self, state: Mapping[str, object]) -> None:
        """The inverse of `state`, but for what `Change` has."""
        if state:
            self.evaluations, self._size = int(state["evaluations"]), int(state["size"])
            self._since = (int(state["since"][0]), int(state["since"][1]))
            self._due, norms = bool(state["due"]), state["norms"]
            self._norms = norms and tuple(inf if norm is None else float(norm) for norm in norms)
            self.ledger = Ledger.from_dict(state["ledger"])
            self.profile = MicrobatchProfile.from_dict(state["profile"])
            if isinstance(self.policy, Remembers) and state.get("policy") is not None:
                self.policy.load_state_dict(state["policy"])
            self.judge.refused = {tuple(mesh) for mesh in state.get("refused", ())}  # older checkpoints have none

    def went_back(self, step: int, state: Mapping[str, object]) -> None:
        """The run is at `step` again, with the weights of a checkpoint that has `state`. Frozen layers, mesh and global
        batch stay as they are; of the steps of another size, those that were taken back count no more."""
        if step < self._since[0]:
            (since, taken), size = state.get("since", (0, 0)), state.get("global_size", self._first.batch.global_size)
            self._since = (step, taken + (step - since) * size)

    def take_up(self, state: Mapping[str, object], run: Run, engine: Engine) -> Change | None:
        """What a run that goes on must change to be what it was: its frozen layers and, where it is started on the mesh
        that it was started on before, the mesh that it had come to."""
        self.load(state)
        mesh, frozen = run.mesh, int(state["frozen"])
        if frozen > len(engine.layers):
            raise RanvierError(f"has {frozen} frozen layers, and the model {len(engine.layers)}", where="checkpoint",
                               remedy="Resume with the model that it was written with.")
        same = (mesh.data, mesh.pipe) == (state["first_data"], state["first_pipe"])
        size, boundaries = int(state["global_size"]), engine.boundaries or None
        if state["first_size"] != self._first.batch.global_size:  # another one is asked for now
            self._since, self._size = (0, 0), self._first.batch.global_size
            size = self._global_size(int(state["data"]) if same else mesh.data)
        was = replace(mesh, data=int(state["data"]), pipe=int(state["pipe"])) if same else mesh
        if not frozen and was == mesh and size == run.batch.global_size:
            return None
        reason = "frozen layers as before the run was interrupted"
        if same:
            reason, boundaries = "as before the run was interrupted", state["boundaries"] and tuple(state["boundaries"])
        there = on_mesh(replace(run, batch=replace(run.batch, global_size=size)), was)
        return Change(data=was.data, pipe=was.pipe, frozen=frozen, old_frozen=0, boundaries=boundaries,
                      global_size=size, microbatch_size=there.batch.microbatch_size, reason=reason)

    def enter(self, now: Formation, change: Change, old: Mesh, moved: int, seconds: float, step: int) -> bool:
        """The change from mesh `old` has been made. Returns whether this rank caches from now on."""
        if not self.ledger.entries or self.ledger.entries[-1].measured_cost is not None:  # nobody has judged it
            self.ledger = self.ledger.with_entry(Entry(
                step=step, old=mesh_text(old), new=mesh_text(now.run.mesh), moved_bytes=moved,
                seconds_before=median(self._recent) if self._recent else None, remaining_steps=self.left(step)))
        self.ledger = self.ledger.with_measured(cost=seconds, moved_bytes=moved)
        if change.wish is not None:
            self.judge.refused.clear()  # the user has chosen, and that holds until more layers freeze
        size = now.run.batch.global_size
        if size != self._size:
            self._since, self._size = (step, self._taken(step)), size
        self._recent.clear()
        self._trial = None
        return self.caching.enter(now, reads=self.left(step) * now.run.batch.global_size)

    def rest(self) -> None:
        """This rank is idle from now on."""
        self.caching.leave()

    def close(self) -> None:
        self.caching.close()

    def facts(self) -> dict[str, object]:
        """What this rank adds to the summary."""
        self._measure_last()
        return self.caching.facts() | ({"ledger": self.ledger.to_dict()["entries"]} if self.ledger.entries else {})

    def text(self) -> str:
        """The settings in words; empty where nothing is elastic."""
        elastic = self._first.elastic
        if not self.freezes:
            return ""
        often = f"every {elastic.every} steps" if elastic.every else "after each epoch"
        words = [f"freezes by {self._policy_text}, {often}"]
        if self._by_hand:
            words = [f"freezes by hand: {', '.join(elastic.manual)}"]
        words += [text for said, text in ((elastic.dry_run, "dry run"), (elastic.auto_pipe, "packs the pipeline"),
                                          (elastic.auto_dp, "adds replicas"), (elastic.cache, "caches")) if said]
        return ", ".join(words)

    @property
    def _policy_text(self) -> str:
        elastic = self._first.elastic
        if self._own:
            return type(self.policy).__name__
        return elastic.freeze if elastic.freeze == "manual" else f"{elastic.freeze}, alpha {elastic.alpha:.3g}"

    # ------------------------------------------------------------------ deciding

    def decide(self, now: Formation, step: int, *, resize: Mapping | None, busy: Mapping[str, float],
               busy_steps: int) -> Change | None:
        """What is to change after `step`; the same on every rank. resize: a user's wish for another mesh.

        busy: seconds in each category of span on this rank, in `busy_steps` steps. Collective.
        """
        norms, self._norms = self._norms, None
        self._due &= norms is None
        measured = now.ranks.gather_objects({"busy": dict(busy), "steps": busy_steps, "cores": affinity(),
                                             "device_bytes": device_bytes(now.world.device)})
        found = None
        self._measure_last()
        if now.world.rank == 0:
            depth = now.frozen if norms is None else self._depth(now, step, norms)
            sizes = [row["device_bytes"] for row in measured if row["device_bytes"] is not None]
            room = Room(first=self._first, frozen=depth, device_bytes=min(sizes, default=None))
            change = (self._resized(now, resize, room, step) if resize is not None else
                      self._packed(now, room, step, measured))
            found = {"change": change and change.document(), "state": self.state(now.run, now.frozen)}
        found = now.ranks.gather_objects(found)[0]
        self.load(found["state"])
        return found["change"] and Change.read(found["change"])

    def _measure_last(self) -> None:
        """What the last transition has come to, in seconds of a step."""
        if self._recent and self.ledger.entries and self.ledger.entries[-1].measured_after is None:
            self.ledger = self.ledger.with_measured(after=median(self._recent))

    def _depth(self, now: Formation, step: int, norms: tuple[float, ...]) -> int:
        """Frozen layers from now on."""
        self.evaluations += 1
        depth = decide(self.policy, Facts(step=step, evaluation=self.evaluations, frozen=now.frozen,
                                          num_layers=len(now.engine.layers), gradient_norms=norms))
        if self._first.elastic.dry_run and depth > now.frozen:
            self._note(step, "would-freeze", f"would freeze layers {now.frozen}-{depth - 1} (a dry run: nothing "
                                             "changes)", {"layers": depth, "gradient_norms": list(norms)})
            return now.frozen
        return depth

    def _packed(self, now: Formation, room: Room, step: int, measured: list[dict]) -> Change | None:
        """The change that follows from as many frozen layers as `room` is for."""
        run, elastic, depth = now.run, self._first.elastic, room.frozen
        deeper, again = depth > now.frozen, self.judge.refused_at(depth)
        reason = f"{self._policy_text}, evaluation {self.evaluations}"

        def change(packing: Packing) -> Change:
            return self._change(now, packing.mesh(run.mesh), depth, packing.boundaries or None, reason)

        chosen = None
        if elastic.auto_pipe and (deeper or again):
            profile = self.profile if elastic.profile_microbatches else None
            work = work_of(now, measured, profile)
            found = packings(self._first, now, depth, work, cached=elastic.cache and self.caching.wanted(depth),
                             batch=self._global_size, profile=profile, room=room, among=None if deeper else again)
            chosen, entry = self.judge.chosen(
                now, found, work, room, step=step, ledger=self.ledger, remaining_steps=self.left(step),
                seconds=median(self._recent) if self._recent else None,
                there=lambda packing: change(packing).applied(run))
            if entry is not None:
                self.ledger = self.ledger.with_entry(entry)
        if chosen is not None:
            return change(chosen)
        return self._change(now, run.mesh, depth, now.engine.boundaries or None, reason) if deeper else None

    def _resized(self, now: Formation, wish: Mapping, room: Room, step: int) -> Change | None:
        """A user's wish, if it can be: other replicas or stages of the ranks that the run was started with."""
        run, depth, data, pipe = now.run, room.frozen, wish.get("data"), wish.get("pipe")
        problem = wish.get("problem") or self._unfit(run.mesh, data, pipe)
        if problem is None:
            mesh = replace(run.mesh, data=data, pipe=pipe)
            change = replace(self._change(now, mesh, depth, None, "as asked with ranvier resize"), wish=wish["wish"])
            there = change.applied(run)
            found = room.problem(there)
            if found is None:
                return change
            problem = f"cannot be: {found}"
        self._note(step, "resize-refused", f"the wish for data {data} x pipe {pipe} {problem}",
                   {"data": data, "pipe": pipe, "wish": wish.get("wish")})
        return self._change(now, run.mesh, depth, now.engine.boundaries or None, "freezing") if depth > now.frozen \
            else None

    def _unfit(self, mesh: Mesh, data: object, pipe: object) -> str | None:
        """Why a run on `mesh` cannot go to one of `data` replicas and `pipe` stages, by these numbers alone."""
        most = self._first.mesh.data * self._first.mesh.pipe
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in (data, pipe)):
            return "is no mesh: give --data and --pipe, whole numbers of at least 1"
        if data * pipe > most:
            return f"needs {data * pipe} stages in all, and the run was started with {most}"
        return "is the mesh that the run has" if (data, pipe) == (mesh.data, mesh.pipe) else None

    def _global_size(self, data: int) -> int:
        """Samples of a step with so many replicas."""
        first = self._first
        if first.elastic.global_batch == "keep":
            return first.batch.global_size
        return max(1, first.batch.global_size * data // first.mesh.data)

    def _change(self, now: Formation, mesh: Mesh, frozen: int, boundaries: tuple[int, ...] | None,
                reason: str) -> Change:
        size = self._global_size(mesh.data)
        batch = replace(self._first.batch, global_size=size)
        there = on_mesh(replace(self._first, batch=batch), mesh)
        return Change(data=mesh.data, pipe=mesh.pipe, frozen=frozen, old_frozen=now.frozen, boundaries=boundaries,
                      global_size=size, microbatch_size=there.batch.microbatch_size, reason=reason)

    def _note(self, step: int, event: str, text: str, fields: Mapping[str, object]) -> None:
        self._tell(NoteEvent(step=step, event=event, text=text, fields=fields))
