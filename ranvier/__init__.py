"""Ranvier: message-driven training of neural networks too large, or too slow, for one device.

    world = ranvier.start(data=2, pipe=2)
    engine = ranvier.Engine(blocks, world, loss=loss, optimizer=...)
    engine.train_batch(microbatches)

Names are imported when first used, so that `ranvier --help` need not load torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "start": "ranvier.launch.start",
    "run": "ranvier.launch.run_function",
    "Engine": "ranvier.pipeline.engine",
    "BatchResult": "ranvier.pipeline.result",
    "Microbatch": "ranvier.pipeline.microbatch",
    "Guard": "ranvier.config.run",
    "Lora": "ranvier.config.run",
    "Memory": "ranvier.config.run",
    "Optim": "ranvier.config.run",
    "Pipeline": "ranvier.config.run",
    "TensorParallel": "ranvier.config.run",
    "microbatches": "ranvier.pipeline.microbatch",
    "shard_loader": "ranvier.data.shard_loader",
    "Mesh": "ranvier.mesh",
    "World": "ranvier.world",
    "Model": "ranvier.block",
    "Initial": "ranvier.block",
    "Run": "ranvier.config.run",
    "RanvierError": "ranvier.errors",
    "CheckpointError": "ranvier.errors",
    "Checkpoints": "ranvier.checkpoint.checkpoints",
    "ConfigError": "ranvier.errors",
    "DataError": "ranvier.errors",
    "LaunchError": "ranvier.errors",
    "MessageTimeout": "ranvier.errors",
    "ModelError": "ranvier.errors",
    "OutOfMemory": "ranvier.errors",
    "TransportError": "ranvier.errors",
    "with_adapters": "ranvier.models.lora",
    "blocks_of": "ranvier.models.blocks_of",
    "from_transformers": "ranvier.models.from_transformers",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ranvier' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
