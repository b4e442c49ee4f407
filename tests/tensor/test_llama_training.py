"""The family llama in training: offloaded and sharded optimizer states against torch's AdamW, bf16 against fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ranvier.mesh import Mesh
from tests.tensor.test_llama_gradients import make
from tests.tensor.test_tensor_training import assert_half_precision, assert_trains, optim


@pytest.mark.parametrize(("mesh", "scheme", "kind", "options"), [
    (Mesh(pipe=2), "stationary", "qwen3", {"offload": "host"}),
    pytest.param(Mesh(col=4), "megatron", "llama", {"offload": "stream"}, marks=pytest.mark.slow),
    pytest.param(Mesh(data=2, pipe=2), "stationary", "gemma2", {"offload": "stream", "shard": True},
                 marks=pytest.mark.slow),
    pytest.param(Mesh(data=2, row=2, col=2), "summa", "olmo2", {"offload": "host"}, marks=pytest.mark.slow)], ids=str)
def test_states_that_are_offloaded_or_sharded(mesh, scheme, kind, options):
    assert_trains(partial(make, kind, num_layers=2), mesh, scheme=scheme, optim=optim(**options))


@pytest.mark.parametrize(("mesh", "scheme", "kind", "options"), [
    (Mesh(col=2), "sequence", "llama", {"accumulate": "half", "offload": "stream"}),
    pytest.param(Mesh(data=2, pipe=2), "stationary", "qwen3", {}, marks=pytest.mark.slow),
    pytest.param(Mesh(col=4), "sequence", "llama", {"accumulate": "half", "offload": "stream"}, marks=pytest.mark.slow),
    pytest.param(Mesh(row=2, col=2), "stationary", "mistral", {"offload": "host"}, marks=pytest.mark.slow),
    pytest.param(Mesh(row=2, col=2), "summa", "gemma2", {}, marks=pytest.mark.slow)], ids=str)
def test_bf16_follows_the_reference(mesh, scheme, kind, options):
    changed = {"dropout": 0.0} if kind == "mistral" else {}
    assert_half_precision(partial(make, kind, num_layers=2, **changed), mesh, scheme, torch.bfloat16, options)
