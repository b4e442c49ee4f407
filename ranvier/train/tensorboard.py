"""TensorBoard events, in the run folder's own `tensorboard` folder, for those who compare many runs."""

from __future__ import annotations

from pathlib import Path

from tensorboardX import SummaryWriter

from ranvier.train.events import EndEvent, EvalEvent, Event, NoteEvent, StepEvent, TransitionEvent
from ranvier.train.files import step_fields, writing


class TensorBoard:
    """Scalars under train/, speed/ and eval/; the sample and the notes as text. RanvierError when it cannot write.

    after: the step after which a run goes on whose curves are here; 0 for a new one.
    """

    def __init__(self, run_dir: Path, after: int = 0) -> None:
        self._folder = run_dir / "tensorboard"
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not after:
                for stale in self._folder.glob("events.out.tfevents.*"):  # another run's curve would overlay this one's
                    stale.unlink()
            self._writer = SummaryWriter(str(self._folder), purge_step=after + 1 if after else None)

    def event(self, event: Event) -> None:
        with writing(self._folder):
            match event:
                case StepEvent():
                    self._step(event)
                case EvalEvent():
                    self._writer.add_scalar("eval/loss", event.loss, event.step)
                    for name, score in event.scores.items():
                        self._writer.add_scalar(f"eval/{name.removeprefix('eval_')}", score, event.step)
                case TransitionEvent():
                    self._writer.add_text("notes/transition", str(event), event.step)
                    self._writer.add_scalar("mesh/transition_seconds", event.seconds, event.step)
                    self._writer.add_scalar("mesh/transition_bytes", event.bytes_moved, event.step)
                case NoteEvent():
                    self._writer.add_text(f"notes/{event.event}", event.text, event.step)
                case EndEvent() if event.sample:
                    self._writer.add_text("sample", event.sample, event.step)

    def _step(self, event: StepEvent) -> None:
        fields = step_fields(event)
        for name in ("loss", "grad_norm", "learning_rate"):
            self._writer.add_scalar(f"train/{name}", fields[name], event.step)
        for name in ("tokens_per_second", "step_seconds", "bubble_fraction", "wait_seconds", "flops_per_second",
                     "model_flops_utilisation"):
            self._writer.add_scalar(f"speed/{name}", fields[name], event.step)
        for name in ("loss_scale", "skipped_steps", "frozen_layers", "data", "pipe"):
            if name in fields:
                group = "mesh" if name in ("data", "pipe") else "train"
                self._writer.add_scalar(f"{group}/{name}", fields[name], event.step)

    def close(self) -> None:
        self._writer.close()
