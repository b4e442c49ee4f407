"""torch.distributed.pipelining over Gloo, as its experts would set it up.

Stages are cut between sublayers like ours, shapes are static (no negotiation at the first step), outputs are not
returned. A tied weight lives on the first and the last stage; after the backwards its two gradients are summed between
those two ranks, and both update their copies in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from benchmarks.pipeline.contender import Contender, Place
from benchmarks.pipeline.workload import Loss, Stepper, Workload, build_blocks


def stages_per_rank(schedule: str) -> int:
    """Stages that a rank holds under torch's schedule of this name."""
    return 2 if issubclass(getattr(pipelining, schedule), PipelineScheduleMulti) else 1


@contextmanager
def open_torch(workload: Workload, contender: Contender, place: Place) -> Iterator[Stepper]:
    """Settings: `schedule`, the name of torch's class; `boundaries`, the first block of each stage after the first.

    With several stages to a rank, rank r holds stages r, r + ranks, ...
    """
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.size)
    kind = getattr(pipelining, contender.settings["schedule"])
    model = workload.model()
    edges = list(pairwise((0, *contender.settings["boundaries"], workload.num_blocks)))
    mine = range(place.rank, len(edges), place.size)
    stages = [_stage(workload, nn.Sequential(*build_blocks(workload, model, range(*edges[index])).values()), index,
                     len(edges)) for index in mine]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return model.loss(logits, targets)[0] / workload.tokens_per_step

    schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
                    n_microbatches=workload.microbatches, loss_fn=loss, scale_grads=False)
    optimizer = workload.optimizer([parameter for stage in stages for parameter in stage.submod.parameters()])
    is_first, is_last = place.rank == 0, place.rank == place.size - 1
    ends = dist.new_group([0, place.size - 1]) if workload.tied else None
    tied = None
    if workload.tied and (is_first or is_last):
        tied = stages[0].submod[0].token.weight if is_first else stages[-1].submod[-1].projection.weight
    keeps_outputs = "return_outputs" not in inspect.signature(schedule.step).parameters
    options = {} if keeps_outputs else {"return_outputs": False}

    def step(number: int) -> Loss:
        inputs, targets = workload.batch(number)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*([inputs] if is_first else []), target=targets if is_last else None, losses=losses,
                      **options)
        if tied is not None:
            dist.all_reduce(tied.grad, group=ends)
        optimizer.step()
        return lambda: sum(losses).item() if is_last else None

    yield Stepper(run=step, report=lambda: {"order": _order(schedule)} if is_first else {})
    dist.barrier()
    dist.destroy_process_group()


def _stage(workload: Workload, module: nn.Module, index: int, count: int) -> PipelineStage:
    shape = workload.microbatch_size, workload.sequence
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(*shape, workload.hidden, device="meta", requires_grad=True)
    logits = torch.empty(*shape, workload.vocab, device="meta", requires_grad=True)
    return PipelineStage(module, index, count, torch.device("cpu"), input_args=(ids if index == 0 else hidden,),
                         output_args=(logits if index == count - 1 else hidden,))


def _order(schedule) -> list[list[tuple[int, str, int]]] | None:
    """Actions of a schedule of several stages, per rank: (stage, F or B or I or W, microbatch)."""
    if not isinstance(schedule, PipelineScheduleMulti):
        return None
    return [[(action.stage_index, action.computation_type.value, action.microbatch_index) for action in actions
             if action is not None and action.microbatch_index is not None]
            for _, actions in sorted(schedule.pipeline_order.items())]
