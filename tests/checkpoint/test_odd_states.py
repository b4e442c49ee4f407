"""Rare states: of users' optimizers, empty, without a place, of foreign origin; each is kept, or refused with an
error."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint import files
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.manifest import File, Manifest, Saved, SavedTensor, _overlap, encode, read_manifest
from ranvier.config.run import Optim
from ranvier.inference.trained import _fill
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, SEED, engine_on, everything, on, train
from tests.errors import raises


def of_the_user(world, mesh):
    return Engine(gpt(CONFIG), world, mesh=mesh, seed=SEED, nominal_weight=float(GLOBAL_SIZE * CONFIG.sequence),
                  optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))


@pytest.mark.parametrize("mesh", [Mesh(col=2), Mesh(row=2)], ids=str)
def test_numbers_of_a_users_optimizer_on_rows_and_columns(tmp_path, mesh):
    def rank(world):
        engine = of_the_user(world, mesh)
        train(engine, 1)
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()
        loaded = checkpoints.load()
        engine.close()
        return loaded.step

    assert run_ranks(rank, 2, timeout_seconds=60.0) == [1, 1]


def test_going_back_to_before_a_users_optimizers_first_step(tmp_path):
    """The checkpoint of step 0 is still being written when the load begins."""
    def rank(world):
        engine = of_the_user(world, Mesh())
        checkpoints = Checkpoints(engine, tmp_path)
        trained = threading.Event()
        checkpoints.save(when=lambda: trained.wait(30.0) and not time.sleep(0.3))
        first = train(engine, 2)
        assert not list(tmp_path.glob("step-*"))
        trained.set()
        assert checkpoints.load().step == 0
        again = train(engine, 2)
        engine.close()
        return first, again

    (first, again), = run_ranks(rank, 1, timeout_seconds=60.0)
    assert first == again


class Odd(nn.Module):
    """A layer with an extra state in addition to its weights."""

    def __init__(self, empty: bool = False, buffer: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if empty:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        if buffer is not None:
            self.register_buffer("buffer", buffer)

    def forward(self, x):
        return self.linear(x) + (self.empty.sum() if hasattr(self, "empty") else 0)


def saved_and_loaded(world, folder, layer):
    engine = Engine(nn.Sequential(layer, nn.Linear(4, 4)), world, optim=Optim(),
                    loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()))
    checkpoints = Checkpoints(engine, folder)
    checkpoints.save()
    told, = checkpoints.wait()
    assert told.error is None
    return checkpoints.load().step


@pytest.mark.parametrize("layer", [
    partial(Odd, empty=True), lambda: Odd(buffer=torch.polar(torch.ones(3), torch.arange(3.0)))],
    ids=["an empty parameter", "a complex buffer"])
def test_what_is_seldom_saved(tmp_path, layer):
    assert run_ranks(lambda world: saved_and_loaded(world, tmp_path, layer()), 2) == [0, 0]


class Growing(Odd):
    """Its extra state has another shape and number format after each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return torch.full((self.calls,), 0.5) if self.calls else torch.tensor(0)

    def set_extra_state(self, state):
        assert bool((state == 0.5).all())
        self.calls = len(state)


def test_extra_states_come_back_as_they_were_saved(tmp_path):
    """In training, and when a checkpoint is only used for inference."""
    def rank(world):
        def build():
            return Engine(nn.Sequential(Growing(), nn.Linear(4, 4)), world,
                          loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()))
        engine, again, other = (build() for _ in range(3))
        engine.forward_backward([(torch.ones(1, 4), torch.ones(1, 4))] * 3)
        engine.zero_grad()
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()
        loaded = Checkpoints(again, tmp_path).load()
        _fill(other, Saved(loaded.folder), ())
        return [each.blocks["0"].calls for each in (engine, again, other)]

    assert run_ranks(rank, 1) == [[3, 3, 3]]


class Extra(Odd):
    """Its extra state is not a tensor."""

    def get_extra_state(self):
        return {"calls": 3}


@pytest.mark.parametrize(("layer", "code"), [
    (lambda: Odd(buffer=torch.ones(3, dtype=torch.uint16)),
     "number-format-not-saved"),
    (Extra, "state-not-tensor")])
def test_what_has_no_place_is_refused(tmp_path, layer, code):
    with raises(code):
        run_ranks(lambda world: saved_and_loaded(world, tmp_path, layer()), 1)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
@pytest.mark.parametrize("written", [False, True])
def test_buffers_on_one_side_only_are_refused(tmp_path, written, mesh):
    """Buffers of only the checkpoint, or of only the model. Each rank checks its own blocks, and all ranks raise the
    error."""
    def rank(world, has_buffer):
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=has_buffer)]
        engine = Engine(layers, world, mesh=mesh, loss=lambda y, t: (y.sum(), 1.0))
        checkpoints = Checkpoints(engine, tmp_path)
        if has_buffer is not written:
            with raises("checkpoint-of-other-buffers", "1.num_batches_tracked"):
                checkpoints.load()
        else:
            checkpoints.save()
            checkpoints.wait()
        checkpoints.close()
        engine.close()

    run_ranks(lambda world: rank(world, written), mesh.size)
    run_ranks(lambda world: rank(world, not written), mesh.size)


@pytest.mark.parametrize("about", [{"path": "a\udcffb"}, {"x": object()}])
def test_what_json_lacks_is_refused(tmp_path, about):
    with raises("about-not-json", "Checkpoints.save"):
        on(Mesh(), lambda engine: Checkpoints(engine, tmp_path).save(about))


def test_a_step_instead_of_notes_is_refused(tmp_path):
    with raises("about-not-dict", 3):
        on(Mesh(), lambda engine: Checkpoints(engine, tmp_path).save(3))


def test_whatever_fails_in_a_writer_is_told(tmp_path, monkeypatch):
    """An error on one rank that is not a disk error: there is no checkpoint, and training continues."""
    write = files.write_part

    def fails(path, tensors):
        if path.name == "part-00001.safetensors":
            raise MemoryError("no room")
        return write(path, tensors)

    monkeypatch.setattr(files, "write_part", fails)

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        return [one.error for one in checkpoints.wait()]

    assert on(Mesh(data=2), work) == [["MemoryError: no room (rank 1)"]] * 2


def test_a_program_that_never_asks_is_warned_of_what_was_not_written(tmp_path):
    """A second Checkpoints of the process has taken the folder; the last call comes after it is closed."""
    def work(engine):
        first, second = Checkpoints(engine, tmp_path), Checkpoints(engine, tmp_path)
        first.claim()
        second.save()
        first.save()
        with pytest.warns(UserWarning, match="checkpoint of step 0 is not written"):
            first.save()
        with pytest.warns(UserWarning, match="checkpoint of step 0 is not written"):
            first.close()
        second.close()
        with raises("checkpoints-closed"):
            second.save()

    on(Mesh(), work)


def test_a_checkpoint_that_nobody_could_read_gets_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(files.manifests, "contradictions", lambda manifest: iter(["one piece is there twice"]))

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        return [one.error for one in checkpoints.wait()]

    (error,), = on(Mesh(), work)
    assert "would be damaged: one piece is there twice" in error and list(tmp_path.glob("*step-*")) == []


def test_another_optimizer_of_torchs(tmp_path):
    def rank(world, kind):
        engine = Engine(nn.Sequential(nn.Linear(4, 4)), world, loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()),
                        optimizer=lambda parameters: kind(parameters, lr=0.1))
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.load()
        engine.train_batch([(torch.ones(2, 4), torch.zeros(2, 4))])
        checkpoints.save()
        checkpoints.wait()

    run_ranks(lambda world: rank(world, torch.optim.AdamW), 1)
    with raises("checkpoint-of-other-optimizer", "SGD"):
        run_ranks(lambda world: rank(world, torch.optim.SGD), 1)


def test_a_link_to_a_checkpoint_goes_as_a_link(tmp_path):
    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path / "kept", keep=1)
        for _ in range(2):
            train(engine, 1)
            checkpoints.save()
            checkpoints.wait()
            if engine.steps == 1:
                (tmp_path / "kept" / "step-1").rename(tmp_path / "elsewhere")
                (tmp_path / "kept" / "step-1").symlink_to(tmp_path / "elsewhere")

    on(Mesh(), work)
    assert [path.name for path in (tmp_path / "kept").glob("*step-*")] == ["step-2"]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_generators_of_a_stranger(tmp_path):
    """An invalid state of a generator is a CheckpointError."""
    def rank(world):
        engine = engine_on(world, Mesh())
        checkpoints = Checkpoints(engine, tmp_path)
        before = torch.get_rng_state
        torch.get_rng_state = lambda: torch.full_like(before(), 255)
        try:
            checkpoints.save()
        finally:
            torch.get_rng_state = before
        checkpoints.wait()
        with raises("generator-state"):
            checkpoints.load()
        engine.close()

    run_ranks(rank, 1, timeout_seconds=60.0)


@pytest.mark.slow
def test_a_manifest_of_many_pieces_takes_no_minutes(tmp_path):
    """Pieces that all begin at one row are distinguished by the other dim; pieces that no dim distinguishes are
    refused."""
    count = 20_000
    pieces = tuple((0, f"p{at}", ((0, 1), (at, at + 1))) for at in range(count))
    (tmp_path / "manifest.json").write_bytes(encode(Manifest(
        step=1, optimizer_steps=1, loss_scale=None, frozen=(), files=(File("part-00000.safetensors", 10 * count, 0),),
        tensors={"parameter": {"x": SavedTensor(dtype="uint8", shape=(1, count), pieces=pieces)}})))
    began = time.process_time()
    read_manifest(tmp_path)
    assert time.process_time() - began < 30.0  # quadratic time would be many minutes
    assert _overlap([((at, at + 3000), (3000 - at, 3001 - at)) for at in range(3000)])


def test_what_was_frozen_is_frozen_again_and_told(tmp_path):
    """Freezing is part of the state; a program that wants to train the parameter unfreezes it after the load."""
    def rank(world, frozen, thawed=False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(not frozen)
        engine = Engine(model, world, optim=Optim(), loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()))
        checkpoints = Checkpoints(engine, tmp_path)
        loaded = checkpoints.load()
        for name in loaded.frozen if loaded and thawed else ():
            engine.named_parameters()[name].requires_grad_(True)
        engine.train_batch([(torch.ones(2, 4), torch.zeros(2, 4))])
        checkpoints.save()
        checkpoints.wait()
        engine.close()
        return loaded and loaded.frozen

    assert run_ranks(lambda world: rank(world, True), 1) == [None]
    assert run_ranks(lambda world: rank(world, False), 1) == [("0.bias", "0.weight")]
    assert run_ranks(lambda world: rank(world, False, thawed=True), 1) == [("0.bias", "0.weight")]
    weights = [everything(tmp_path / f"step-{step}")["parameter", "0.weight"] for step in (1, 2, 3)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
