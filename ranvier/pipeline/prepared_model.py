"""The model and the arguments that a user gives the engine, checked and completed, and their plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ranvier.block import Loss, Model, Modules, as_model, freeze, frozen_prefix, names_in_whole, ready_made
from ranvier.config import rules
from ranvier.config.run import Memory, Optim, Pipeline, TensorParallel
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.optim.step import OptimizerFactory
from ranvier.pipeline.autocast import check_autocast
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.rank_stages import some_train
from ranvier.plan.block_costs import build_on_meta
from ranvier.plan.formats import check_formats
from ranvier.plan.plan import Plan, make
from ranvier.precision import is_half
from ranvier.schedule.schedule import Policy, check_policy_object
from ranvier.world import World


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A user's model as the engine takes it.

    model: with its frozen layers, and the formats of what stays in fp32.
    dtype: of parameters, buffers and activations. autocast, float8: of products, as of `Engine`.
    frozen, frozen_above: as of `Engine`. frozen_blocks: how many come with the first `frozen` layers.
    names_in_whole: global name of a parameter or buffer -> its names in the module that `blocks_of` was given.
    in_evaluation: whether all of it came in evaluation mode.
    """

    model: Model
    dtype: torch.dtype
    autocast: torch.dtype | None
    float8: bool
    frozen: int
    frozen_above: tuple[int, ...]
    frozen_blocks: int
    names_in_whole: dict[str, tuple[str, ...]]
    in_evaluation: bool


def prepare(given: Model | Modules, loss: Loss | None, *, world: World, dtype: torch.dtype | None,
            autocast: torch.dtype | None, float8: bool, keep_fp32: str | Sequence[str], frozen: int,
            frozen_above: Sequence[int], optim: Optim | None, own_optimizer: bool) -> PreparedModel:
    """The model with these settings of the engine. ModelError or ConfigError for what does not fit it."""
    model = as_model(given, loss)
    modules = ready_made(model).values()
    if dtype is None:
        dtype = torch.float32 if autocast or float8 else _format_of(modules, world)
    check_autocast(autocast, dtype=dtype, float8=float8)
    names, in_evaluation = names_in_whole(model), bool(modules) and not some_train(modules)
    if keep_fp32:
        keep_fp32 = [keep_fp32] if isinstance(keep_fp32, str) else keep_fp32
        model = replace(model, keep_fp32=(*model.keep_fp32, *keep_fp32))
        if not is_half(dtype) and world.rank == 0:
            warnings.warn(f"Engine(keep_fp32=...) has no effect: dtype is {dtype}", stacklevel=4)
    model = freeze(model, frozen, frozen_above)
    if keep_fp32 or is_half(dtype):
        check_formats(model, build_on_meta(model), dtype, own=own_optimizer,
                      accumulates_half=optim is not None and optim.accumulate == "half")
    return PreparedModel(model=model, dtype=dtype, autocast=autocast, float8=float8, frozen=frozen,
                         frozen_above=tuple(frozen_above), frozen_blocks=frozen_prefix(model, frozen),
                         names_in_whole=names, in_evaluation=in_evaluation)


def make_plan(given: PreparedModel, world: World, mesh: Mesh | None, sample: Microbatch | None, *,
              policy: Policy | None, pipeline: Pipeline | None, tensor: TensorParallel | None, memory: Memory | None,
              optim: Optim | None, own_optimizer: bool) -> Plan:
    """The plan of an engine that is given none. ConfigError for a mesh of another size, and as of `plan.make`."""
    mesh = mesh or world.mesh or Mesh.of_replicas(world.size)
    if mesh.size != world.size:
        raise ConfigError(f"has {mesh.size} ranks, but {world.size} were started", code="mesh-of-other-size",
                          where="mesh", value=str(mesh),
                          remedy="Make data x pipe x row x col equal to the number of ranks.")
    if optim is not None and optim.ema and not own_optimizer:
        raise ConfigError("is supported only by Ranvier's own optimizers", code="ema-with-own-optimizer",
                          where="optim.ema", value=optim.ema,
                          remedy="Give optim= without optimizer=, or use torch.optim.swa_utils.AveragedModel.")
    if optim is not None and not own_optimizer and world.rank == 0 and (
            idle := rules.idle_beside_torch_optimizer(optim)):
        warnings.warn(f"Optim({', '.join(f'{name}=...' for name in idle)}) has no effect beside optimizer=: that "
                      "is Ranvier's own optimizer's", stacklevel=4)
    shape = None if sample is None or sample.inputs is None else (sample.inputs, sample.targets)
    return make(given.model, mesh, sample=shape, pipeline=pipeline or Pipeline(), tensor=tensor or TensorParallel(),
                memory=memory or Memory(), optim=optim, own_optimizer=own_optimizer, policy=policy, dtype=given.dtype,
                device=world.device.type)


def check_arguments(policy: Policy | None, optimizer: OptimizerFactory | None,
                    **arguments: tuple[object, type]) -> None:
    """ConfigError for the first argument of the engine that is not of its type (name -> its value, the type)."""
    for name, (value, kind) in arguments.items():
        if value is not None and not isinstance(value, kind):
            example = "torch.bfloat16" if kind is torch.dtype else f"ranvier.{kind.__name__}(...)"
            raise ConfigError(f"is not a {kind.__module__.partition('.')[0]}.{kind.__name__}",
                              code="argument-of-other-type", where=f"Engine({name}=...)", value=repr(value),
                              remedy=f"Pass {name}={example}, or leave it out.")
    if isinstance(policy, str):
        raise ConfigError("is not a policy object", code="policy-object-is-a-name", where="Engine(policy=...)",
                          value=policy, remedy="Name a policy in Pipeline(policy=...).")
    if policy is not None:
        check_policy_object(policy)
    if optimizer is not None and not callable(optimizer):
        raise ConfigError("is not a function that makes one of this rank's parameters", code="optimizer-not-a-factory",
                          where="optimizer", value=type(optimizer).__name__,
                          remedy="Pass optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3).")


def _format_of(modules: Iterable[nn.Module], world: World) -> torch.dtype:
    """fp64 where that is what the parameters of a user's modules have, else fp32; a warning where all are in half
    precision, as transformers loads most models."""
    found = {one.dtype for module in modules for one in module.parameters() if one.is_floating_point()}
    if len(found) == 1 and is_half(half := next(iter(found))) and world.rank == 0:
        warnings.warn(f"the model is in {half}, and trains in fp32: Engine(dtype={half}) trains it in its own format, "
                      "with fp32 master copies", stacklevel=5)
    return torch.float64 if found == {torch.float64} else torch.float32
