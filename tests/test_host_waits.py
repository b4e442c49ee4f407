"""After its first two steps a run never waits for the device: what decides on an update stays there, and is read later.

The device is fake, with `torch.cuda.set_sync_debug_mode("error")`: every operation that would wait raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.programs import Program, batches, engine_of, world_of_one
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Guard, Launch, Optim
from ranvier.mesh import Mesh
from ranvier.optim import placement
from ranvier.optim.rules import AdamW
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.planner import count
from ranvier.planner.count import laid_out
from tests.covering import first
from tests.fake_cuda import FakeCuda

DEVICE = torch.device("cuda", 1)
CPU = torch.device("cpu")
SETTINGS = [{}, {"clip_norm": 0.1}, {"clip_norm": 0.1, "clip_from": "previous-step"},
            {"algorithm": "sgd", "clip_norm": 0.1}, {"offload": "stream", "clip_norm": 0.1},
            {"offload": "hybrid", "offload_share": 0.5, "clip_norm": 0.1, "bucket_size": 512},
            {"algorithm": "lion", "clip_norm": 0.1}, {"algorithm": "muon", "clip_norm": 0.1},
            {"algorithm": "adafactor", "offload": "stream"}, {"ema": 0.9},
            {"algorithm": "muon", "ema": 0.9, "offload": "hybrid", "offload_share": 0.5, "bucket_size": 512},
            {"offload": "host", "clip_norm": 0.1}]
FEW = [SETTINGS[place] for place in (2, 4, 8, 10, 11)]
"""One case for each place and each rule of the optimizer, and for each kind of clipping."""


def moved(batch: list[Microbatch], device: torch.device) -> list[Microbatch]:
    return [Microbatch(one.inputs.to(device), one.targets.to(device), one.samples) for one in batch]


@contextmanager
def waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(device: torch.device, settings: dict[str, object], *, errors: bool = False, precision: str = "bf16",
            write: Callable[[Tensor], object] = lambda parameter: None
            ) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms, and parameters and states at the end. errors: operations that wait in a step raise."""
    program = Program(layers=1, steps=4, optim=settings, precision=precision)
    results = []
    with engine_of(program, world_of_one(device)) as engine:
        for batch in batches(program, engine.mesh, 0):
            given = moved(batch, device)
            # earlier steps check targets and copies (`Watch`), and in fp16 ranks agree on the weight of a batch
            with waits_raise() if errors and len(results) > 1 else nullcontext():
                results.append(engine.train_batch(given))
                for parameter in engine.named_parameters().values():
                    write(parameter)
        found = [(one.loss, float(one.grad_norm or 0.0)) for one in results]
        parameters = {name: parameter.detach().clone().to("cpu") for name, parameter
                      in engine.named_parameters().items()}
        states = {f"{one.parameter} from {one.start}: {name}": state.clone().to("cpu") for one in
                  engine.flat_optimizer.slices() for name, state in (*one.states.items(), *one.whole.items())}
        return found, parameters | states


@pytest.mark.parametrize("settings", first(FEW, SETTINGS), ids=str)
def test_a_step_has_the_cpus_numbers_and_no_wait(settings):
    """With the default guard, which judges every step by its loss and its norm."""
    expected = trained(CPU, settings)
    with FakeCuda(devices=2):
        found = trained(DEVICE, settings, errors=settings.get("offload") != "host")  # the host updates: it waits
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("offload", ["none", "stream"])
def test_writes_through_data_after_each_step_are_followed(offload):
    def write(parameter):
        parameter.data[:2].mul_(0.5)

    expected = trained(CPU, {"offload": offload}, write=write)
    with FakeCuda(devices=2):
        found = trained(DEVICE, {"offload": offload}, write=write)
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_what_waits_is_noticed():
    """If the host updates, it waits for the norm, and the mode raises."""
    with FakeCuda(devices=2), pytest.raises(RuntimeError, match="synchronizing"):
        trained(DEVICE, {"offload": "host"}, errors=True)


@pytest.mark.parametrize("settings", [
    {"initial_loss_scale": 2.0**20}, {"initial_loss_scale": 64.0, "loss_scale_window": 2, "clip_norm": 0.1},
    {"initial_loss_scale": 2.0**20, "algorithm": "muon", "ema": 0.9, "offload": "stream"}], ids=str)
def test_an_overflow_is_found_on_the_device(settings):
    """In fp16, with scales that overflow for some steps and then do not, and with one that grows."""
    expected = trained(CPU, settings, precision="fp16")
    with FakeCuda(devices=2):
        found = trained(DEVICE, settings, precision="fp16", errors=True)
    norms = [norm for _, norm in expected[0]]
    assert any(map(math.isfinite, norms)) and all(map(math.isfinite, norms)) is ("clip_norm" in settings)
    assert [str(one) for one in found[0]] == [str(one) for one in expected[0]]  # nan is not equal to itself
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def product(y: Tensor, t: Tensor) -> tuple[Tensor, int]:
    return (y * t).sum(), t.numel()


def with_a_bad_step(device: torch.device, bad: bool, **optim: object) -> tuple[list[str | None], int, list[Tensor]]:
    """Three steps; in the second the gradient, but not the loss, is infinite. bad: false leaves that step out."""
    torch.manual_seed(0)
    engine = Engine(nn.Sequential(nn.Linear(3, 2), LargeGradients()), world_of_one(device), loss=product,
                    optim=Optim(**optim), learning_rate=0.1, guard=Guard(bad_step="skip", loss_spike_factor=100.0))
    results = []
    for number in range(3):
        x = torch.arange(6.0).view(2, 3) + number
        if number == 1 and not bad:
            continue
        target = torch.full((2, 1), 3e38 if number == 1 else 1.0)
        if number == 1:
            x = torch.zeros(2, 3)
        results.append(engine.train_batch([Microbatch(x.to(device), target.to(device), torch.arange(2))]))
    steps = engine.flat_optimizer.steps
    parameters = [parameter.detach().clone().to("cpu") for parameter in engine.named_parameters().values()]
    parameters += [state.clone().to("cpu") for one in engine.flat_optimizer.slices()
                   for state in (*one.states.values(), *one.whole.values())]
    usual = engine.bad_steps.state()
    found = [one.bad for one in results], steps, [*parameters, torch.tensor(usual["losses"])]
    engine.close()
    return found


class LargeGradients(nn.Module):
    """A layer that returns zeros, and whose weights have gradients as large as the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()) @ self.weight * 4.0 + 0.0 * x.sum(1, keepdim=True)


@pytest.mark.parametrize("optim", [{}, {"clip_norm": 0.5}, {"offload": "stream"}, {"algorithm": "sgd"},
                                   {"offload": "host"}, {"algorithm": "lion"}, {"algorithm": "muon"},
                                   {"algorithm": "adafactor"}, {"algorithm": "lion", "ema": 0.9, "offload": "stream"},
                                   ], ids=str)
@pytest.mark.parametrize("device", [CPU, DEVICE], ids=str)
def test_a_step_whose_norm_is_bad_changes_nothing(device, optim):
    """Parameters, states, the count of steps and the usual losses are bit-identical to those of a run without the step;
    the result says at any time what was bad."""
    with FakeCuda(devices=2) if device is DEVICE else nullcontext():
        bad, steps, values = with_a_bad_step(device, True, **optim)
        none, fewer, expected = with_a_bad_step(device, False, **optim)
    assert bad[0] is bad[2] is None and bad[1].startswith("gradient norm is ") and none == [None, None]
    assert steps == fewer == 2
    assert all(torch.equal(one, two) for one, two in zip(values, expected, strict=True))


def test_batches_of_one_step_are_judged_in_order():
    """`forward_backward` twice, then `step`: the guard and the loss scale have the same state as on a CPU."""
    def judged(device: torch.device) -> object:
        program = Program(layers=1, steps=6, optim={"initial_loss_scale": 2.0**20, "loss_scale_window": 2},
                          precision="fp16", microbatches=1)
        with engine_of(program, world_of_one(device)) as engine:
            for number, batch in enumerate(batches(program, engine.mesh, 0)):
                result = engine.forward_backward(moved(batch, device))
                if number % 2:
                    engine.step(result)
            return engine.flat_optimizer.steps, engine.loss_scale, engine.bad_steps.state()

    with FakeCuda(devices=2):
        assert judged(DEVICE) == judged(CPU)


def test_a_rule_updates_unless_it_is_told_not_to():
    """A 1 on the device leaves parameters and states unchanged; with 0 the update is bit-identical to a plain one."""
    rule = AdamW(Optim())
    for skip in (0.0, 1.0):
        parameters, gradients = torch.arange(7.0), torch.full((7,), float("inf") if skip else 0.5)
        states = {name: torch.full((7,), 0.25) for name in rule.states}
        plain, plain_states = parameters.clone(), {name: state.clone() for name, state in states.items()}
        if not skip:
            rule.update(plain, gradients.clone(), plain_states, step=3, learning_rate=0.1, weight_decay=0.1)
        rule.update_unless(torch.tensor(skip), parameters, gradients, states, step=3, learning_rate=0.1,
                           weight_decay=0.1)
        assert torch.equal(parameters, plain)
        assert all(torch.equal(states[name], plain_states[name]) for name in states)


@pytest.mark.parametrize("settings", [
    {}, {"algorithm": "lion"}, {"algorithm": "muon"}, {"algorithm": "adafactor", "offload": "stream"}, {"ema": 0.9},
    {"algorithm": "lion", "ema": 0.9, "bucket_size": 4096}, {"algorithm": "lion", "offload": "host"}], ids=str)
def test_copies_for_a_step_that_may_be_skipped_are_predicted(settings, monkeypatch):
    """All bytes that are copied at the same time, in the run's own buckets: the tensors that a bucket's rule writes."""
    copied, unless = [0], placement._undo_if_skipped

    def counted(skip, written, *rest, **named):
        if skip is not None:
            copied.append(sum(tensor.numel() * tensor.element_size() for tensor in written))
        unless(skip, written, *rest, **named)

    monkeypatch.setattr(placement, "_undo_if_skipped", counted)
    monkeypatch.setattr(count, "working_bytes", lambda *_: 0)  # the bytes of the rules themselves
    program = Program(layers=1, steps=1, optim=settings, precision="bf16", sequence=2, samples=1)
    with FakeCuda(devices=2), engine_of(program, world_of_one(DEVICE)) as engine:
        for batch in batches(program, engine.mesh, 0):
            engine.train_batch(moved(batch, DEVICE))
    run = ResolvedRun(mesh=Mesh(), precision="bf16", optim=Optim(**settings), launch=Launch(device="cuda"),
                      batch=Batch(microbatch_size=1), model=program.transformer)
    predicted, unguarded = (sum(laid_out(replace(run, guard=Guard(bad_step=each)))[1][0].device[name] for name in (
        "workspace", "activations", "deferred")) for each in ("stop", "none"))
    assert max(copied) <= predicted and (predicted == max(max(copied), unguarded) or settings["algorithm"] == "muon")
    assert (max(copied) > unguarded) == (settings.get("offload") != "host" and bool(settings))
