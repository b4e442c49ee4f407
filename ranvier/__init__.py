"""Ranvier: message-driven training of neural networks too large, or too slow, for one device.

    world = ranvier.start(data=2, pipe=2)
    engine = ranvier.Engine(blocks, world, loss=loss, optimizer=...)
    engine.train_batch(microbatches)

Names are imported when first used, so that `ranvier --help` need not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranvier import tensor as tensor
    from ranvier import testing as testing
    from ranvier.block import Initial as Initial
    from ranvier.block import Model as Model
    from ranvier.checkpoint.checkpoints import Checkpoints as Checkpoints
    from ranvier.config.run import Batch as Batch
    from ranvier.config.run import Checkpoint as Checkpoint
    from ranvier.config.run import Comm as Comm
    from ranvier.config.run import Data as Data
    from ranvier.config.run import Elastic as Elastic
    from ranvier.config.run import Guard as Guard
    from ranvier.config.run import Launch as Launch
    from ranvier.config.run import Log as Log
    from ranvier.config.run import Lora as Lora
    from ranvier.config.run import Memory as Memory
    from ranvier.config.run import MeshSettings as MeshSettings
    from ranvier.config.run import Optim as Optim
    from ranvier.config.run import Pipeline as Pipeline
    from ranvier.config.run import Preference as Preference
    from ranvier.config.run import Run as Run
    from ranvier.config.run import TensorParallel as TensorParallel
    from ranvier.config.run import Train as Train
    from ranvier.config.run import Transformer as Transformer
    from ranvier.data.shard_loader import shard_loader as shard_loader
    from ranvier.errors import CheckpointError as CheckpointError
    from ranvier.errors import ConfigError as ConfigError
    from ranvier.errors import DataError as DataError
    from ranvier.errors import LaunchError as LaunchError
    from ranvier.errors import MessageTimeout as MessageTimeout
    from ranvier.errors import ModelError as ModelError
    from ranvier.errors import OutOfMemory as OutOfMemory
    from ranvier.errors import RanvierError as RanvierError
    from ranvier.errors import TransportError as TransportError
    from ranvier.launch.run_function import run as run
    from ranvier.launch.start import start as start
    from ranvier.mesh import Mesh as Mesh
    from ranvier.models.blocks_of import blocks_of as blocks_of
    from ranvier.models.from_transformers import from_transformers as from_transformers
    from ranvier.models.lora import with_adapters as with_adapters
    from ranvier.pipeline.engine import Engine as Engine
    from ranvier.pipeline.microbatch import Microbatch as Microbatch
    from ranvier.pipeline.microbatch import microbatches as microbatches
    from ranvier.pipeline.result import BatchResult as BatchResult
    from ranvier.plan.plan import Plan as Plan
    from ranvier.train.loop import train as train
    from ranvier.world import World as World

_HOMES = {
    "ranvier.block": ("Initial", "Model"),
    "ranvier.checkpoint.checkpoints": ("Checkpoints",),
    "ranvier.config.run": ("Batch", "Checkpoint", "Comm", "Data", "Elastic", "Guard", "Launch", "Log", "Lora", "Memory",
                           "MeshSettings", "Optim", "Pipeline", "Preference", "Run", "TensorParallel", "Train",
                           "Transformer"),
    "ranvier.data.shard_loader": ("shard_loader",),
    "ranvier.errors": ("CheckpointError", "ConfigError", "DataError", "LaunchError", "MessageTimeout", "ModelError",
                       "OutOfMemory", "RanvierError", "TransportError"),
    "ranvier.launch.run_function": ("run",),
    "ranvier.launch.start": ("start",),
    "ranvier.mesh": ("Mesh",),
    "ranvier.models.blocks_of": ("blocks_of",),
    "ranvier.models.from_transformers": ("from_transformers",),
    "ranvier.models.lora": ("with_adapters",),
    "ranvier.pipeline.engine": ("Engine",),
    "ranvier.pipeline.microbatch": ("Microbatch", "microbatches"),
    "ranvier.pipeline.result": ("BatchResult",),
    "ranvier.plan.plan": ("Plan",),
    "ranvier.train": ("train",),
    "ranvier.world": ("World",),
}
"""Module -> its public names; type checkers read the imports above."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = ("tensor", "testing")
"""Packages that programs use by their full names: ranvier.testing.check_blocks."""
__all__ = sorted(_HOME_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"ranvier.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ranvier' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF[name])
    found = globals()[name] = globals().get(name) or getattr(home, name)  # a package of this name is set by now
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
