"""Cuts a model into stages for a mesh, and places each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ranvier.block import LossBlock, Model, State, meta_device
from ranvier.comm.meta import MetaGroup
from ranvier.config.rules import check_boundaries
from ranvier.config.run import TensorParallel
from ranvier.cost.blocks import BlockCost
from ranvier.errors import ConfigError, ModelError
from ranvier.layout import Box, Layout, Parameter
from ranvier.mesh import Mesh, Position, StagePlacement
from ranvier.originals.same_memory import refuse_parameters_over_one_memory
from ranvier.plan.block_costs import block_costs, build_on_meta, known_or_counted
from ranvier.plan.kernel_count import AS_WRITTEN, Counting
from ranvier.plan.partition import partition_for, uniform
from ranvier.plan.shared_buffers import buffers_of_several_stages
from ranvier.plan.shared_places import SharedPlace, code_of_stages, code_with_others_parameters, shared_places
from ranvier.system.terminal import TextTable
from ranvier.tensor.layers import VocabularyLinear, block_splits
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.meta_mesh import MetaMesh
from ranvier.tensor.quantized_weight import BLOCK
from ranvier.tensor.split.layers import split_layers, split_loss
from ranvier.tensor.split.loss import vocabulary_of

Sample = tuple[State, object]
"""Inputs and targets of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage in the table: its blocks, and what they hold and cost."""

    stage: int
    pipeline_rank: int
    """Place in the pipeline of the ranks that hold it."""
    blocks: tuple[str, ...]
    num_parameters: int
    num_trainable: int
    cost: float
    """Share of the model's cost, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class StageTable:
    """The cut of a model into stages. `str()` is the table that a run prints."""

    rows: tuple[StageRow, ...]
    boundaries: tuple[int, ...]
    costs: tuple[BlockCost, ...] | None
    """Per block, if a sample was given."""
    placement: StagePlacement
    shared_buffers: Mapping[str, str] = field(default_factory=dict)
    """Result of `buffers_of_several_stages`."""
    shared_places: tuple[SharedPlace, ...] = ()
    """Places outside of the carried state through which stages may affect each other."""
    with_others_parameters: frozenset[str] = frozenset()
    """Result of `code_with_others_parameters`."""

    def stage_costs(self) -> list[tuple[BlockCost, ...]]:
        """The costs of each stage's blocks, which must have been counted."""
        assert self.costs is not None
        edges = (0, *self.boundaries, len(self.costs))
        return [self.costs[start:stop] for start, stop in pairwise(edges)]

    def __str__(self) -> str:
        columns = {"stage": [str(row.stage) for row in self.rows],
                   "pipe": [str(row.pipeline_rank) for row in self.rows],
                   "blocks": [str(len(row.blocks)) for row in self.rows],
                   "parameters": [f"{row.num_parameters:,}" for row in self.rows],
                   "trainable": [f"{row.num_trainable:,}" for row in self.rows],
                   "cost": [f"{row.cost:.1%}" for row in self.rows],
                   "from .. to": [" .. ".join(dict.fromkeys((row.blocks[0], row.blocks[-1]))) for row in self.rows]}
        if self.placement.per_rank == 1:
            del columns["pipe"]
        if columns["trainable"] == columns["parameters"]:
            del columns["trainable"]
        return str(TextTable(header=list(columns), rows=list(zip(*columns.values(), strict=True)),
                             words=(len(columns) - 1,)))


def global_parameters(model: Model, modules: Mapping[str, nn.Module]) -> tuple[Parameter, ...]:
    """All parameters of the model by global name, with the owner of tied ones. Raises ModelError for invalid ties."""
    found: dict[str, Parameter] = {}
    objects: dict[str, nn.Parameter] = {}
    layers = {block for layer in model.layers for block in layer} or set(modules)
    for number, (block, module) in enumerate(modules.items()):
        for path, part in module.named_modules(prefix=block):
            if isinstance(part, torch.jit.ScriptModule):
                raise ModelError("is compiled by torch.jit, whose modules take no hooks and do not run again under "
                                 "recomputation", code="scripted-module", where=f"module {path}",
                                 value=type(part).__name__,
                                 remedy="Give the module from before torch.jit.script or torch.jit.trace; "
                                        "torch.compile and scripted functions are accepted.")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            what = f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {block}.{name}"
            if nn.parameter.is_lazy(tensor):
                raise ModelError("has no shape yet", code="lazy-parameter", where=what, value=type(tensor).__name__,
                                 remedy="Run the modules on a sample, model(sample), before the engine gets them.")
            if not isinstance(tensor, nn.Parameter) and tensor.layout is not torch.strided:
                raise ModelError("is sparse, but replicas and checkpoints exchange dense memory",
                                 code="sparse-buffer", where=what, value=tensor.layout,
                                 remedy="Register its indices and values as buffers, and build the sparse tensor "
                                        "from them in the forward.")
        for name, parameter in module.named_parameters():
            full = f"{block}.{name}"
            if parameter.layout is not torch.strided or is_traceable_wrapper_subclass(parameter):
                raise ModelError("is not a plain tensor that ranks could hold parts of", code="wrapped-parameter",
                                 where=f"parameter {full}",
                                 value=f"{type(parameter.data).__name__}, {parameter.layout}",
                                 remedy="Give the modules from before fully_shard, parallelize_module or a library's "
                                        "quantization: the engine shards them itself.")
            if parameter.is_complex() and parameter.requires_grad:
                raise ModelError("is complex and trains, and gradients add up as real numbers",
                                 code="complex-parameter", where=f"parameter {full}", value=parameter.dtype,
                                 remedy="Hold a parameter of real numbers [..., 2], and compute with "
                                        "torch.view_as_complex of it.")
            objects[full] = parameter
            found[full] = Parameter(full, tuple(parameter.shape), number, full, parameter.requires_grad,
                                    in_layer=block in layers, origin=model.untied.get(full),
                                    quantized=model.quantized.get(full))
    refuse_parameters_over_one_memory(objects)
    grouped: set[str] = set()
    for group in model.tied:
        for name in group:
            if name not in found:
                raise ModelError("is declared as tied but is not a parameter of the model",
                                 code="tied-unknown-parameter", where="model.tied", value=name,
                                 remedy="Name parameters as 'block.parameter'.")
            if name in grouped:
                raise ModelError("is in two groups", code="tied-in-two-groups", where="model.tied", value=name,
                                 remedy="Put all names of one parameter into one group, each once.")
            grouped.add(name)
        owner = found[group[0]]
        for name in group[1:]:
            end = found[name]
            if end.shape != owner.shape:
                raise ModelError(f"is tied to {owner.name} of shape {owner.shape}", code="tied-shapes-differ",
                                 where=f"parameter {name}", value=end.shape, remedy="Tie parameters of the same shape.")
            if end.trainable != owner.trainable:
                raise ModelError(f"is tied to {owner.name}, and only one of the two is frozen", code="tied-one-frozen",
                                 where=f"parameter {name}", value=f"requires_grad={end.trainable}",
                                 remedy="Untie them, or freeze both.")
            found[name] = replace(end, owner=owner.name)
    first: dict[nn.Parameter, str] = {}
    for name, parameter in objects.items():
        other = first.setdefault(parameter, name)
        if found[other].owner != found[name].owner:
            raise ModelError(f"is {other} under another name", code="tied-undeclared", where=f"parameter {name}",
                             value=name, remedy=f"Declare them as tied: Model(tied=(({other!r}, {name!r}),)).")
    return tuple(found.values())


def cut(model: Model, mesh: Mesh, *, boundaries: Sequence[int] | None, how: Literal["cost", "uniform"],
        sample: Sample | None, dtype: torch.dtype, device: str, tensor: TensorParallel | None = None,
        placement: StagePlacement | None = None, counting: Counting = AS_WRITTEN) -> tuple[StageTable, Layout]:
    """Decide the stages, and which ranks hold and own each parameter; the same on every rank.

    With `sample` (inputs and targets of the usual shape, on the tensor mesh a row's share; their values do not matter)
    the costs of one rank are counted and the chain of blocks is checked; without it a block costs its number of
    parameters. counting: what the device fuses.
    """
    tensor = tensor or TensorParallel()
    parts = Parts(model, mesh, tensor, device)
    costs = None
    if sample is not None:
        costs = known_or_counted(model, sample, (mesh.row, mesh.col, tensor, dtype, device, counting),
                                 partial(block_costs, parts.model, *sample, dtype, counting))
    stages, layout = parts.cut(mesh, costs, boundaries=boundaries, how=how, placement=placement)
    layout.check()
    _check_quantized(layout)
    of_blocks = {block: layout.stage_of(number) for number, block in enumerate(parts.modules)}
    reaches = code_of_stages(of_blocks, parts.modules, model.loss)
    buffers = buffers_of_several_stages(layout, parts.modules)
    return replace(stages, shared_buffers=buffers, shared_places=shared_places(reaches),
                   with_others_parameters=code_with_others_parameters(
                       reaches, of_blocks, parts.modules, model.loss)), layout


def _check_quantized(layout: Layout) -> None:
    """Raise ConfigError if ranks would have parts of the blocks of a quantized weight, each of which has one scale."""
    mesh = layout.mesh
    for parameter in (parameter for parameter in layout.parameters if parameter.quantized is not None):
        for position in mesh.positions:
            start, stop = layout.box(parameter, position)[1]
            if start % BLOCK or stop % BLOCK:
                raise ConfigError(f"divides the blocks of {BLOCK} inputs with one scale in {parameter.name}, whose "
                                  f"inputs are {parameter.shape[1]}", code="quantized-block-split",
                                  where="lora.base-format",
                                  value=f"{parameter.quantized} on {mesh.row} rows and {mesh.col} columns",
                                  remedy="Use fewer rows or columns, or leave out `--lora.base-format`.")


def _refuse_sync_batch_norm(modules: Mapping[str, nn.Module]) -> None:
    """If a replica has several ranks, raise ModelError for a SyncBatchNorm over all ranks of torch.distributed: ranks
    of other stages do not call it."""
    for block, module in modules.items():
        for path, part in module.named_modules(prefix=block):
            if isinstance(part, nn.SyncBatchNorm) and part.training and part.process_group is None:
                raise ModelError("waits in each forward for all ranks, and those of other stages do not call it",
                                 code="sync-batch-norm", where=f"module {path}", value="SyncBatchNorm",
                                 remedy="Leave out convert_sync_batchnorm: with BatchNorm replicas keep the first "
                                        "one's statistics (Engine(buffers=...)).")


class Parts:
    """A model on a tensor mesh, for any number of stages: its parameters, and which ranks hold what of them.

    model: with one rank's part of each block, as it runs on such a device. modules: the full blocks, of which lazily
        built ones have no storage; they are the same for every tensor mesh.
    """

    def __init__(self, model: Model, mesh: Mesh, tensor: TensorParallel, device: str,
                 modules: Mapping[str, nn.Module] | None = None) -> None:
        self._device = device
        self._layouts: dict[object, Layout] = {}
        self.modules = modules = build_on_meta(model) if modules is None else modules
        self.names = tuple(modules)
        self.parameters, self.shards = global_parameters(model, modules), None
        if mesh.size > mesh.num_replicas:
            _refuse_sync_batch_norm(modules)
        self._sizes = [1.0 + sum(parameter.numel() for parameter in module.parameters())
                       for module in modules.values()]
        if mesh.stage_size > 1:
            self.parameters, self.shards = _split(self.parameters, modules, mesh, tensor)
            _check_loss(model, [module for module in modules.values() if not isinstance(module, LossBlock)][-1], mesh)
            model = split_model(model, meta_mesh(mesh, tensor, device))
        self.model = model

    def cut(self, mesh: Mesh, costs: Sequence[BlockCost] | None, *, boundaries: Sequence[int] | None,
            how: Literal["cost", "uniform"], placement: StagePlacement | None = None) -> tuple[StageTable, Layout]:
        """The stages of a mesh with this tensor mesh, by each block's cost, or number of parameters. Unchecked."""
        placement = placement or StagePlacement(num_ranks=mesh.pipeline_size)
        count, num_stages = len(self.names), placement.num_stages
        weights = [cost.weight(self._device) for cost in costs] if costs else self._sizes
        if boundaries is not None:
            boundaries = check_boundaries(boundaries, count, num_stages)
        else:
            if placement.num_ranks <= count < num_stages:
                raise ConfigError(f"makes {num_stages} stages of the model's {count} blocks",
                                  code="more-virtual-stages-than-blocks", where="pipeline.stages-per-rank",
                                  value=placement.per_rank,
                                  remedy=f"Set `--pipeline.stages-per-rank {count // placement.num_ranks}`, or use a "
                                         "deeper model.")
            boundaries = uniform(count, num_stages) if how == "uniform" else partition_for(weights, placement)
        key = mesh, boundaries, placement
        if key not in self._layouts:
            self._layouts[key] = Layout(mesh=mesh, num_blocks=count, boundaries=boundaries, parameters=self.parameters,
                                        shards=self.shards, placement=placement)
        layout = self._layouts[key]
        return _table(layout, self.names, weights, tuple(costs) if costs else None), layout


def _split(parameters: Sequence[Parameter], modules: Mapping[str, nn.Module], mesh: Mesh, tensor: TensorParallel
           ) -> tuple[tuple[Parameter, ...], dict[str, dict[Position, Box]]]:
    """The parameters with the axes along which their gradients are summed, and which position holds what of each."""
    splits = {f"{block}.{name}": split for block, module in modules.items()
              for name, split in block_splits(block, module, tensor, mesh.col).items()}
    kinds = {(splits[parameter.name], parameter.shape) for parameter in parameters}  # few kinds, many parameters
    boxes = {(split, shape): split.boxes(shape, mesh) for split, shape in kinds}
    return (tuple(replace(parameter, summed=splits[parameter.name].summed) for parameter in parameters),
            {parameter.name: boxes[splits[parameter.name], parameter.shape] for parameter in parameters})


def _check_loss(model: Model, last: nn.Module, mesh: Mesh) -> None:
    """Raise ModelError if a loss that does not support it would get one column's part of the logits."""
    if (mesh.feature_parts > 1 and any(isinstance(layer, VocabularyLinear) for layer in last.modules())
            and vocabulary_of(model.loss) is None):
        raise ModelError("cannot take logits whose vocabulary is split over columns", code="loss-needs-whole-vocab",
                         where="loss", value=getattr(model.loss, "__name__", type(model.loss).__name__),
                         remedy="Use ranvier.tensor.split.loss.NextTokenLoss(vocab), or a module that uses "
                                "TokenLosses(vocab) from there, or set `--mesh.col 1`.")


def meta_mesh(mesh: Mesh, tensor: TensorParallel, device: str) -> MetaMesh:
    """The tensor mesh of a stage of such devices as its first rank sees it, for blocks on the meta device: nothing
    moves, and what is counted (panels, what sums work in) is that device's."""
    return MetaMesh(MetaGroup("row", mesh.row, device=device), MetaGroup("col", mesh.col, device=device), tensor,
                      device=device)


def split_model(model: Model, mesh: TensorMesh) -> Model:
    """Return the same model with builders that make this rank's part of each block. Parameters of ready-made modules
    are copied."""
    def build(name: str, whole: Callable[[], nn.Module]) -> nn.Module:
        if model.initial is None:
            return split_layers(whole(), mesh, f"block {name}", in_chain=True)
        with meta_device():
            module = whole()
        if next(module.buffers(), None) is not None:  # their values are the builder's
            module = whole()
        return split_layers(module, mesh, f"block {name}", in_chain=True)

    return replace(model, loss=split_loss(model.loss, mesh),
                   blocks={name: partial(build, name, whole) for name, whole in model.blocks.items()})


def _table(layout: Layout, names: tuple[str, ...], weights: Sequence[float],
           costs: tuple[BlockCost, ...] | None) -> StageTable:
    rows = []
    for stage in range(layout.stages.num_stages):
        blocks, pipe = layout.blocks(stage), layout.stages.rank_of(stage)
        counts = {layout.key(parameter): (parameter.numel, parameter.trainable)
                  for parameter in layout.parameters_of(pipe) if parameter.block in blocks}
        rows.append(StageRow(stage=stage, pipeline_rank=pipe, blocks=names[blocks.start:blocks.stop],
                             num_parameters=sum(numel for numel, _ in counts.values()),
                             num_trainable=sum(numel for numel, trainable in counts.values() if trainable),
                             cost=sum(weights[block] for block in blocks) / (sum(weights) or 1.0)))
    return StageTable(rows=tuple(rows), boundaries=layout.boundaries, costs=costs, placement=layout.stages)
