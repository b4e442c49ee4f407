"""Finds the block, microbatch and replica in which a bad step began.

Nothing was updated, so the same batch can run again, with the same dropout, one microbatch at a time: hooks on every
block look at what comes out of it, and at the gradient that leaves it backward. Gradients are held: none is reduced, so
that each rank keeps its own. What the ranks have seen is gathered, and all of them draw the same conclusion.

    1. parameters that were not finite before the step
    2. the first microbatch with a value that is not finite in its forward: inputs, first block, targets, loss
    3. the first microbatch with one in its backward, and the last of its blocks, which the backward reached first
    4. the microbatch with the largest loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ranvier.comm.protocol import Group
from ranvier.layout import Layout
from ranvier.mesh import Coordinates, Mesh
from ranvier.optim.gradients import Gradients
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.rank_stages import RankStages
from ranvier.tensor.columns import plain

FindingKind = Literal["parameter", "inputs", "output", "targets", "loss", "gradient", "largest loss", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Origin of a bad step; `str()` is one line for people.

    kind: where it was seen. block: its block, for output and gradient. parameter: for kind parameter, and for gradient
        if it was a parameter's. microbatch: of `replica`, from 0. rank: the first that saw it.
    """

    kind: FindingKind
    text: str
    block: str | None = None
    parameter: str | None = None
    microbatch: int | None = None
    replica: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A non-finite value that a rank has seen.

    flaw: nan or inf. microbatch: -1 for parameters. place: the block's number; one before the first for inputs, one and
    two after the last for targets and the loss. block: None for the loss. parameter: its name, if the value is a
    parameter or a parameter's gradient; other gradients are those of the block's input.
    """

    kind: FindingKind
    flaw: str
    microbatch: int = -1
    place: int = 0
    block: str | None = None
    parameter: str | None = None


@torch.no_grad()  # a recomputed block checks fewer tensors, and must save the same number
def nonfinite_kind(tensors: Iterable[object]) -> str | None:
    """"nan" or "inf" if a floating-point tensor among `tensors` has one; "nan" if it has both."""
    found = None
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            if bool(torch.isnan(tensor).any()):
                return "nan"
            found = "inf"
    return found


class _Watch:
    """Hooks on the blocks of a stage that record what is not finite, once per place and microbatch."""

    def __init__(self, blocks: Sequence[tuple[int, str, nn.Module]], num_blocks: int) -> None:
        self.microbatch = 0
        self._findings: dict[tuple[object, ...], Finding] = {}
        self._num_blocks = num_blocks
        self._handles = []
        for number, name, module in blocks:
            self._handles += [module.register_forward_pre_hook(partial(self._enters, number, name)),
                              module.register_forward_hook(partial(self._leaves, number, name))]

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    def note(self, kind: FindingKind, tensors: Iterable[object], place: int, block: str | None = None,
             parameter: str | None = None) -> None:
        """Remember what is not finite among `tensors`."""
        key = kind, self.microbatch, place
        if key not in self._findings and (flaw := nonfinite_kind(tensors)) is not None:
            self._findings[key] = Finding(kind=kind, flaw=flaw, microbatch=self.microbatch, place=place, block=block,
                                      parameter=parameter)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enters(self, number: int, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._watch_gradient(args, number, name)

    def _leaves(self, number: int, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self.note("output", tree_leaves(plain(output)), number, name)
        if number == self._num_blocks - 1:
            self._watch_gradient(output, number + 1, None)

    def _watch_gradient(self, state: object, place: int, block: str | None) -> None:
        for tensor in tree_leaves(plain(state)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(
                    lambda gradient: self.note("gradient", [gradient], place, block))


def examine(microbatches: Sequence[Microbatch], *, stages: RankStages, layout: Layout, at: Coordinates,
            gradients: Gradients, judges_gradients: bool, ranks: Group, run: Callable[[Sequence[Microbatch]], None]
            ) -> Cause:
    """Run `microbatches` again and find what is wrong with them. Collective; gradients are meaningless afterwards.

    judges_gradients: whether gradients that are not finite are wrong (in fp16 they are not).
    run: forwards and backwards of some microbatches of this replica; every rank calls it the same number of times.
    """
    # in reverse: a parameter that several blocks have is recorded with the first of them
    held = {parameter: (number, block, f"{block}.{name}") for number, block, module in reversed(stages.blocks)
            for name, parameter in module.named_parameters()}
    findings = [Finding(kind="parameter", flaw=flaw, place=number, block=block, parameter=name)
              for parameter, (number, block, name) in reversed(held.items())
              if (flaw := nonfinite_kind([parameter.detach()])) is not None]
    buffers = [(buffer, buffer.clone()) for _, _, module in stages.blocks for buffer in module.buffers()]
    losses: list[tuple[int, float, float]] = []
    watch = _Watch(stages.blocks, layout.num_blocks)
    try:
        for number in range(max(ranks.gather_objects(len(microbatches)))):
            watch.microbatch, one = number, microbatches[number:number + 1]
            watch.note("inputs", tree_leaves([each.inputs for each in one]), -1)
            watch.note("targets", tree_leaves([each.targets for each in one]), layout.num_blocks)
            gradients.begin()
            gradients.hold()
            run(one)
            if one and at.pipeline_rank == layout.stages.rank_of(layout.stages.num_stages - 1):
                losses.append((number, *stages.last.loss_and_weight.tolist()))
                watch.note("loss", [stages.last.loss_and_weight[:1]], layout.num_blocks + 1)
            for parameter, (place, block, name) in held.items():
                if parameter.requires_grad:
                    watch.note("gradient", [parameter.grad], place, block, name)
    finally:
        watch.close()
        for buffer, kept in buffers:
            buffer.data.copy_(kept)
    findings += [finding for finding in watch.findings if judges_gradients or finding.kind != "gradient"]
    everything = ranks.gather_objects({"findings": [vars(finding) for finding in findings],
                                       "losses": losses if at.is_first_with_samples else []})
    return conclude([[Finding(**finding) for finding in one["findings"]] for one in everything],
                    [one["losses"] for one in everything], layout.mesh)


def conclude(findings: Sequence[Sequence[Finding]], losses: Sequence[Sequence[tuple[int, float, float]]],
             mesh: Mesh) -> Cause:
    """The cause, from what each rank has seen. losses: (microbatch, sum of losses, weight) of each rank's own share;
    from columns with the same values, only the first's."""
    seen = [(finding, rank, mesh.coordinates(rank).replica) for rank, each in enumerate(findings) for finding in each]
    of_kind = {kind: [entry for entry in seen if entry[0].kind == kind] for kind in get_args(FindingKind)}
    if of_kind["parameter"]:
        return _parameter(of_kind["parameter"], mesh)
    wrong = [entry for kind in ("output", "loss", "gradient") for entry in of_kind[kind]]
    places = {(finding.microbatch, replica) for finding, _, replica in wrong}
    data = [entry for kind in ("inputs", "targets") for entry in of_kind[kind]  # that had an effect
            if (entry[0].microbatch, entry[2]) in places]
    if forward := [*data, *of_kind["output"], *of_kind["loss"]]:
        return _cause_of(*min(forward, key=lambda entry: (entry[0].microbatch, entry[2], entry[0].place, entry[1])))
    if of_kind["gradient"]:
        # weights' gradients are summed over rows in the backward: a rank that sees others, too, is nearer
        return _cause_of(*min(of_kind["gradient"], key=lambda entry: (
            entry[0].microbatch, entry[2], -entry[0].place, entry[0].parameter is not None, entry[1])))
    return _largest(losses, mesh)


def _parameter(seen: Sequence[tuple[Finding, int, int]], mesh: Mesh) -> Cause:
    """The first parameter in model order, and the replicas where it is not finite, unless all are affected."""
    first, rank, replica = min(seen, key=lambda entry: (entry[0].place, entry[1]))
    replicas = sorted({replica for finding, _, replica in seen if finding.parameter == first.parameter})
    alone = f", on replica {' and '.join(map(str, replicas))} alone" if len(replicas) < mesh.num_replicas else ""
    others = len({finding.parameter for finding, _, _ in seen}) - 1
    more = f", nor {'are' if others > 1 else 'is'} {others} more" if others else ""
    return Cause(kind="parameter", block=first.block, parameter=first.parameter, rank=rank, replica=replica,
                 text=f"parameter {first.parameter} is not finite{alone}: it had {first.flaw} before the step{more}")


def _cause_of(finding: Finding, rank: int, replica: int) -> Cause:
    where, flaw = f"microbatch {finding.microbatch} of replica {replica}", finding.flaw
    match finding.kind:
        case "inputs" | "targets":
            text = f"{where}: its {finding.kind} have {flaw}"
        case "output":
            text = f"block {finding.block}, {where}: its output has {flaw}"
        case "loss":
            text = f"the loss, {where}: it is {flaw}, while every block's output is finite"
        case _:
            what = f"the gradient of {finding.parameter or ('its input' if finding.block else 'what it was given')}"
            text = f"{f'block {finding.block}' if finding.block else 'the loss'}, {where}: {what} has {flaw}"
    return Cause(kind=finding.kind, text=text, block=finding.block, parameter=finding.parameter,
                 microbatch=finding.microbatch, replica=replica, rank=rank)


def _largest(losses: Sequence[Sequence[tuple[int, float, float]]], mesh: Mesh) -> Cause:
    """The microbatch with the largest mean loss, rows together."""
    sums: dict[tuple[int, int], list[float]] = {}
    for rank, each in enumerate(losses):
        for number, total, weight in each:
            entry = sums.setdefault((number, mesh.coordinates(rank).replica), [0.0, 0.0])
            entry[0] += total
            entry[1] += weight
    means = {place: total / weight for place, (total, weight) in sorted(sums.items()) if weight}
    if not means:
        return Cause(kind="nothing", text="no microbatch has a valid target")
    number, replica = max(means, key=means.__getitem__)
    return Cause(kind="largest loss", microbatch=number, replica=replica,
                 text=f"microbatch {number} of replica {replica}: its loss is the largest, "
                      f"{means[number, replica]:.6g}; all outputs and gradients are finite")
