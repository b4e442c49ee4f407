"""Your own tracker in a training run on two ranks: `python examples/own_tracker.py`.

A tracker receives the run's events (ranvier/train/events.py), like the files and the console. This one records the
slowest step. `ranvier.testing.trackers.check_tracker` calls a tracker with every event that a run may send.
"""

import ranvier
from ranvier import Batch, Data, Mesh, Run, Train, Transformer
from ranvier.train.events import EndEvent, StepEvent


class SlowestStep:
    """Reports the slowest step after the first one, and the share of it that was waiting."""

    def __init__(self):
        self.slowest = None

    def event(self, event):
        if isinstance(event, StepEvent) and event.step > 1:
            self.slowest = max(self.slowest or event, event, key=lambda step: step.step_seconds)
        if isinstance(event, EndEvent) and self.slowest:
            step = self.slowest
            print(f"slowest step: {step.step}, {step.step_seconds:.3f} s, of which {step.bubble_fraction:.0%} waiting")

    def close(self):
        pass


if __name__ == "__main__":
    mesh = Mesh(pipe=2)
    run = Run(mesh=mesh, batch=Batch(global_size=16, microbatch_size=4),
              train=Train(steps=20, learning_rate=3e-3, sample_tokens=40), data=Data(max_bytes=1_000_000),
              model=Transformer(num_layers=2, hidden=64, heads=4, vocab=512, sequence=64))
    world = ranvier.start(mesh)
    ranvier.train(run, "own-tracker", world, trackers=[SlowestStep()])
