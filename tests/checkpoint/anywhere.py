"""A small GPT on any mesh, fed with one sequence of global batches: shared by the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from ranvier.checkpoint.manifest import MANIFEST, Manifest, Saved, encode
from ranvier.config.run import Optim, TensorParallel, Transformer
from ranvier.data.arrays import Arrays, Form, Tokens
from ranvier.data.lm import Sequences
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks

CONFIG = Transformer(num_layers=2, hidden=8, heads=4, vocab=61, sequence=8, dropout=0.1)
LLAMA = Transformer(family="llama", num_layers=2, hidden=8, heads=4, kv_heads=2, intermediate=16, vocab=61, sequence=8,
                    qk_norm="head", tied=True)
GLOBAL_SIZE = 8
SEED = 3
_NUMBERS = np.random.default_rng(0).integers(0, CONFIG.vocab, 1 + 64 * CONFIG.sequence)
TOKENS = Tokens(Arrays(
    folder=Path("made-up"), arrays={"tokens": _NUMBERS}, facts={"vocab": CONFIG.vocab, "cut": False}, digest="",
    forms={"tokens": Form(dtype="int64", shape=_NUMBERS.shape, digest="")}))
SAMPLES = Sequences(TOKENS, CONFIG.sequence)


def engine_on(world, mesh: Mesh, *, dtype=torch.float32, scheme: str = "stationary", model=None, optim=None,
              pipeline=None, **options) -> Engine:
    """An engine of the small GPT; options are Optim's unless they are Engine's."""
    optim = optim or Optim(**{"bucket_size": 200, "chunk_buckets": 2, "weight_decay": 0.1, **options})
    return Engine(model or gpt(CONFIG, dtype=dtype), world, mesh=mesh, seed=SEED, dtype=dtype, learning_rate=1e-2,
                  nominal_weight=float(GLOBAL_SIZE * CONFIG.sequence), tensor=TensorParallel(scheme=scheme),
                  optim=optim, pipeline=pipeline)


def train(engine: Engine, steps: int) -> list[float]:
    """`steps` more steps, on the batches that belong to them; their losses."""
    mesh, at = engine.mesh, engine.coordinates
    loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=2,
                    replica=at.data, num_replicas=mesh.data, part=at.row, num_parts=mesh.row,
                    needs_inputs=engine.is_first_stage, needs_targets=engine.is_last_stage)
    return [engine.train_batch(loader.microbatches(engine.steps)).loss for _ in range(steps)]


def on(mesh: Mesh, work, **options) -> list:
    """work(engine) on every rank of `mesh`, as threads."""
    def rank(world):
        engine = engine_on(world, mesh, **options)
        result = work(engine)
        engine.close()
        return result

    return run_ranks(rank, mesh.size, timeout_seconds=120.0)


def everything(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """All tensors of a checkpoint except those of torch's generators, unsharded."""
    saved = Saved(folder)
    assert list(saved.damage()) == []
    return {(kind, name): saved.read(kind, name) for kind, tensors in saved.manifest.tensors.items()
            for name in tensors if kind != "random"}


def write_manifest(folder: Path, document: dict) -> None:
    """Write `document` as the manifest, with a correct checksum if it is a valid manifest."""
    data = json.dumps(document)
    try:
        written = encode(TypeAdapter(Manifest).validate_json(data))
    except ValidationError:
        written = data.encode()
    (folder / MANIFEST).write_bytes(written)


def assert_same(first: dict, second: dict) -> None:
    """Assert that all tensors are bit-identical."""
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype is second[key].dtype and torch.equal(tensor, second[key]), key
