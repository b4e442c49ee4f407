"""Ranvier: message-driven training of neural networks too large, or too slow, for one device.

    world = ranvier.start(data=2, pipe=2)
    engine = ranvier.Engine(blocks, world, loss=loss, optimizer=...)
    engine.train_batch(microbatches)

Names are imported when first used, so that `ranvier --help` need not load torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "start": "ranvier.launch",
    "Engine": "ranvier.pipeline.engine",
    "BatchResult": "ranvier.pipeline.result",
    "Microbatch": "ranvier.pipeline.microbatch",
    "Optim": "ranvier.run",
    "TensorParallel": "ranvier.run",
    "microbatches": "ranvier.pipeline.microbatch",
    "Mesh": "ranvier.mesh",
    "World": "ranvier.world",
    "Model": "ranvier.models.block",
    "Initial": "ranvier.models.block",
    "Run": "ranvier.run",
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
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'ranvier' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
