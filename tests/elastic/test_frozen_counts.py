"""A frozen prefix gets no gradients, and keeps no activations and no optimizer states."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from ranvier.block import freeze, frozen_prefix
from ranvier.comm.message import MessageKind
from ranvier.config.run import Optim, Pipeline
from ranvier.data.lm import Sequences
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.layout import frozen_blocks
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, SEED, TOKENS
from tests.errors import raises

SAMPLES = Sequences(TOKENS, CONFIG.sequence)
UNTIED = replace(gpt(CONFIG, dtype=torch.float64), tied=())


def counted(frozen, boundaries, **options):
    """For each of three stages: kinds of messages sent back, most graphs kept at the same time, bytes of states, loss,
    number of microbatches, limit in flight."""
    mesh = Mesh(pipe=3)

    def work(world):
        engine = Engine(UNTIED, world, mesh=mesh, seed=SEED, dtype=torch.float64, learning_rate=1e-2, frozen=frozen,
                        pipeline=Pipeline(boundaries=boundaries), optim=Optim(bucket_size=64), **options)
        sent, stored, send, forward = Counter(), [0], engine._connections.transport.send, engine._stages.first.forward

        def counting_send(destination, message):
            if message.kind in (MessageKind.BACKWARD, MessageKind.CREDIT):
                sent[message.kind.name] += 1
            send(destination, message)

        def counting_forward(*args, **kwargs):
            outcome = forward(*args, **kwargs)
            stored.append(len(engine._stages.first._graphs))
            return outcome

        engine._connections.transport.send, engine._stages.first.forward = counting_send, counting_forward
        loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=2,
                        needs_inputs=engine.is_first_stage, needs_targets=engine.is_last_stage)
        batch = loader.microbatches(0)
        loss = engine.train_batch(batch).loss
        states = sum(size for place in engine.memory().values() for name, size in place.items()
                     if name in ("moments", "gradients"))
        in_flight = engine.in_flight
        engine.close()
        return dict(sent), max(stored), states, loss, len(batch), in_flight

    return run_ranks(work, 3, timeout_seconds=60.0)


def test_a_frozen_stage_gets_credits_and_keeps_nothing():
    first, second, third = counted(1, (3, 5))  # embedding and layer 0; layer 1's two blocks; head
    batch = first[4]
    assert first[0] == {} and first[1:3] == (0, 0)
    assert second[0] == {"CREDIT": batch} and second[1] > 0 and second[2] > 0
    assert third[0] == {"BACKWARD": batch} and third[2] > 0


def test_stages_that_only_pass_on():
    first, second, third = counted(2, (3, 5))  # only the head trains
    batch = first[4]
    assert [stage[1:3] for stage in (first, second)] == [(0, 0), (0, 0)]
    assert (second[0], third[0]) == ({"CREDIT": batch}, {"CREDIT": batch})
    assert third[1] > 0
    assert first[5] == 5  # three stages in flight, and two more for the stages that store nothing


def test_nothing_frozen_sends_gradients_everywhere():
    first, second, third = counted(0, (3, 5))
    assert (second[0], third[0]) == ({"BACKWARD": first[4]}, {"BACKWARD": first[4]})
    assert all(stage[1] > 0 and stage[2] > 0 for stage in (first, second, third))
    assert first[5] == 3


def count_saved(module, name, found):
    """Add to `found` the bytes that autograd saves in the forward passes of `module`."""
    hooks = []

    def pack(tensor):
        found[name] += tensor.nbytes
        return tensor

    def enter(*_):
        hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
        hooks[-1].__enter__()

    def leave(*_):
        hooks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def kept(frozen):
    """Bytes that each block of both stages keeps in a batch; the cut is within layer 1."""
    def work(world):
        engine = Engine(UNTIED, world, mesh=Mesh(pipe=2), seed=SEED, dtype=torch.float64, learning_rate=1e-2,
                        frozen=frozen, pipeline=Pipeline(boundaries=(4,)), optim=Optim(bucket_size=64))
        found = Counter()
        for _, name, module in engine._stages.blocks:
            count_saved(module, name, found)
        loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=2,
                        needs_inputs=engine.is_first_stage, needs_targets=engine.is_last_stage)
        engine.train_batch(loader.microbatches(0))
        engine.close()
        return found

    return run_ranks(work, 2, timeout_seconds=60.0)


def test_frozen_blocks_of_a_stage_that_trains_others_keep_nothing():
    """Layer 1, which two stages share, keeps nothing either once it is frozen too."""
    names = list(UNTIED.blocks)
    first, second = kept(0)
    assert [name for name in names if first[name]] == names[:4]
    assert [name for name in names if second[name]] == names[4:]
    part, rest = kept(1)
    assert [name for name in names if part[name]] == ["layer1.attention"]
    assert 0 < part["layer1.attention"] <= first["layer1.attention"] and rest == second
    part, rest = kept(2)
    assert not sum(part.values()) and [name for name in names if rest[name]] == ["head"]


def test_frozen_layers_drop_out_unless_they_are_told_not_to():
    dropping, still = counted(1, (3, 5)), counted(1, (3, 5), frozen_dropout=False)
    assert CONFIG.dropout > 0
    assert dropping[0][3] != still[0][3]


def test_which_blocks_are_frozen_with_a_layer():
    names = list(UNTIED.blocks)
    assert [frozen_blocks(UNTIED.layers, names, depth) for depth in (0, 1, 2)] == [0, 3, 5]
    assert [frozen_prefix(UNTIED, depth) for depth in (0, 1, 2)] == [0, 3, 5]
    trainable = [next(build().parameters()).requires_grad for build in freeze(UNTIED, 1).blocks.values()]
    assert trainable == [False, False, False, True, True, True]
    for depth in (-1, 3):
        with raises("frozen-layers-count", 2):
            frozen_prefix(UNTIED, depth)
