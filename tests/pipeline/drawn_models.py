"""Randomly drawn models as users write them: what blocks share, how they change their state, autograd inside their
backward, modules in evaluation mode, parameters that train later, and containers with contents of their own.

Each block is a layer of one of `KINDS` in a `Carrying`, whose state is a tensor or a dict.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ranvier.config.run import Memory, Optim, Pipeline
from ranvier.mesh import Mesh
from tests.pipeline.parity import squared
from tests.pipeline.test_inner_autograd import Adjoint, Checkpointed, FixedPoint
from tests.pipeline.test_unusual_blocks import BesideItsWeight, DifferentiatesInside, Plain, Twice

WIDTH = 4
linear = partial(nn.Linear, WIDTH, WIDTH)


class Solved(FixedPoint):
    """Its linear layer is the one inside the solver."""

    def __init__(self):
        super().__init__()
        del self.inner
        self.linear = linear()

    @property
    def inner(self):
        return self.linear


class Unembed(Plain):
    """Multiplies by the weight of a layer that it does not call."""

    def forward(self, x):
        return x + torch.tanh(nn.functional.linear(x, self.linear.weight.t()))


class Normed(Plain):
    """A BatchNorm and a dropout, in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.norm.eval()
        self.dropout.eval()

    def forward(self, x):
        return self.dropout(torch.tanh(self.norm(self.linear(x))))


class Reached(Plain):
    """A second layer that is reached from the second step on."""

    def __init__(self):
        super().__init__()
        self.late, self.is_reached = linear(), False

    def forward(self, x):
        y = super().forward(x)
        return y + self.late(x) if self.is_reached else y


KINDS = {"plain": Plain, "twice": Twice, "beside its weight": BesideItsWeight, "unembed": Unembed, "solved": Solved,
         "adjoint": Adjoint, "adjoint and plain": partial(Adjoint, True), "checkpoint": Checkpointed,
         "checkpoint and plain": partial(Checkpointed, True), "differentiates": DifferentiatesInside,
         "evaluation": Normed, "reached late": Reached}


class Carrying(nn.Module):
    """A layer between states: returns a tensor, a new dict, or the dict that it was given, changed."""

    def __init__(self, layer: nn.Module, gives: str) -> None:
        super().__init__()
        self.layer, self.gives = layer, gives

    def forward(self, state: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        x, kept = (state, None) if isinstance(state, Tensor) else (state["x"], state.pop("kept", None))
        y = self.layer(x) if kept is None else self.layer(x) + 0.5 * kept
        if self.gives == "a tensor":
            return y
        found = state if isinstance(state, dict) and self.gives == "its dict" else {}
        found["x"], found["kept"] = y, torch.sin(x)
        return found


def loss(outputs: Tensor | dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a last state of any kind."""
    return squared(outputs if isinstance(outputs, Tensor) else outputs["x"] + outputs["kept"], targets)


class Named(nn.Sequential):
    """A container with a class of its own."""


class Scaled(nn.ModuleList):
    """A container with a parameter of its own."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.ones(()))


def hooked(blocks: list[nn.Module]) -> nn.Sequential:
    """A container with a hook."""
    container = nn.Sequential(*blocks)
    container.register_forward_hook(lambda module, args, y: 2 * y)
    return container


CONTAINERS: dict[str, Callable[[list[nn.Module]], object]] = {
    "a list": list, "a Sequential": lambda blocks: nn.Sequential(*blocks), "a ModuleList": nn.ModuleList,
    "a dict": lambda blocks: {str(number): block for number, block in enumerate(blocks)}}
REFUSED: dict[str, Callable[[list[nn.Module]], object]] = {
    "a subclass": lambda blocks: Named(*blocks), "with a parameter": Scaled, "with a hook": hooked}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One model with the settings of its engine.

    kinds, gives: by block. groups: blocks that share; shares: what they share. frozen: names of parameters that
    train from the second step on. container: of `CONTAINERS`, or of `REFUSED`.
    """

    mesh: Mesh
    pipeline: Pipeline
    memory: Memory
    optim: Optim | None
    kinds: tuple[str, ...]
    gives: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    shares: str = "weights"
    frozen: frozenset[str] = field(default_factory=frozenset)
    container: str = "a list"

    def blocks(self) -> list[nn.Module]:
        """The same blocks each time, as new objects."""
        torch.manual_seed(1)
        layers = [KINDS[kind]() for kind in self.kinds]
        for first, *others in self.groups:
            for other in others:
                if self.shares == "weights":
                    layers[other].linear.weight = layers[first].linear.weight
                elif self.shares == "layers":
                    layers[other].linear = layers[first].linear
        made = [Carrying(layer, gives) for layer, gives in zip(layers, self.gives, strict=True)]
        if self.shares == "blocks":
            for first, *others in self.groups:
                for other in others:
                    made[other] = made[first]
        return made

    def model(self) -> object:
        """The blocks in their container."""
        return (CONTAINERS | REFUSED)[self.container](self.blocks())

    @property
    def differentiates_beside_a_hook(self) -> bool:
        """Whether a block may compute a gradient of a tensor on which an earlier one has put a hook: refused."""
        kinds = [type(block.layer) for block in self.blocks()]
        return any(Solved in kinds[:place] for place, kind in enumerate(kinds) if kind is DifferentiatesInside)

    @property
    def frozen_names(self) -> set[str]:
        """`frozen`, with all names of a shared parameter or none of them: the first block of its group decides."""
        names = set(self.frozen)
        for first, *others in self.groups:
            for part in ("weight",) if self.shares == "weights" else ("weight", "bias"):
                ends = {f"{other}.layer.linear.{part}" for other in others}
                names = names | ends if f"{first}.layer.linear.{part}" in names else names - ends
        return names

    def before_step(self, step: int, parameters: Mapping[str, nn.Parameter], blocks: Mapping[str, nn.Module]) -> None:
        """Changes that the user's program makes before a step. step: from 0."""
        for name in self.frozen_names & parameters.keys():
            parameters[name].requires_grad_(step > 0)
        for module in (module for block in blocks.values() for module in block.modules()):
            if isinstance(module, Reached):
                module.is_reached = step > 0


def draw_model(draw: random.Random) -> Drawn:
    """A random model."""
    mesh = Mesh(data=draw.choice([1, 1, 2]), pipe=draw.choice([1, 2, 3]))
    per_rank = draw.choice([1, 2]) if mesh.pipe > 1 else 1
    count = mesh.pipe * per_rank + draw.randrange(3)
    shuffled = draw.sample(range(count), count)
    cut = draw.randrange(count + 1)
    kinds = tuple(draw.choice([*KINDS, "plain", "plain"]) for _ in range(count))
    policy = draw.choice(["message-driven", "message-driven", "gpipe", "1f1b"] if per_rank == 1
                         else ["message-driven", "gpipe"])
    defers = policy == "message-driven" and draw.random() < 0.5
    frozen = frozenset(f"{number}.layer.linear.{part}" for number in range(count) for part in ("weight", "bias")
                       if draw.random() < 0.15)
    groups = tuple(tuple(sorted(group)) for group in (shuffled[:cut], shuffled[cut:]) if len(group) > 1)
    return Drawn(
        mesh=mesh, kinds=kinds, groups=groups if draw.random() < 0.7 else (),
        gives=tuple(draw.choice(["a tensor", "a tensor", "a new dict", "its dict"]) for _ in range(count)),
        shares=draw.choice(["weights", "layers", "blocks"]), frozen=frozen if draw.random() < 0.5 else frozenset(),
        memory=Memory(recompute=draw.choice(["none", "none", 1, 2])),
        optim=draw.choice([None, Optim(weight_decay=0.1)]),
        pipeline=Pipeline(stages_per_rank=per_rank, policy=policy, defer_bytes=1 << 20 if defers else "auto",
                          placement=draw.choice(["v-shape", "interleaved"]) if per_rank > 1 else "v-shape"),
        container=draw.choice([*CONTAINERS, *CONTAINERS, *REFUSED]))
