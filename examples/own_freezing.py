"""A freeze policy of your own: `python examples/own_freezing.py`.

A freeze policy answers one question, how many layers shall be frozen, from each layer's gradient norm. This one is
AutoFreeze's (Liu et al., 2021): a layer has converged when its gradient changes less from one evaluation to the next
than that of the median active layer, and the layers below the first that has not are frozen. (The article's gradients
are sums since the last evaluation; here they are those of the step.) A plain loop on one rank asks it, and `decide`
checks every answer.
"""

from statistics import median

import torch
from torch import nn

from ranvier.elastic.freezing import Facts, decide

LAYERS, WIDTH, STEPS, EVERY = 8, 16, 160, 20


class GradientChange:
    """Freezes what changes least; keeps the norms of the evaluation before."""

    def __init__(self):
        self.before = None

    def frozen_layers(self, facts):
        norms, before, self.before = facts.gradient_norms, self.before, facts.gradient_norms
        active = range(facts.frozen, facts.num_layers)
        if before is None or not active:
            return facts.frozen
        change = {layer: abs(before[layer] - norms[layer]) / max(before[layer], 1e-12) for layer in active}
        least = median(change.values())
        return next((layer for layer in active if change[layer] >= least), facts.frozen)


def gradient_norms(layers, frozen):
    """L2 norm of each layer's gradient, 0.0 for frozen ones."""
    return tuple(0.0 if number < frozen else torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
                 for number, layer in enumerate(layers))


def main():
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    head, policy, frozen = nn.Linear(WIDTH, 1), GradientChange(), 0
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], lr=3e-3)
    inputs = torch.randn(256, WIDTH)
    targets = inputs[:, :4].sum(1, keepdim=True).sin()
    for step in range(1, STEPS + 1):
        loss = (head(layers(inputs)) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step % EVERY == 0:
            facts = Facts(step=step, evaluation=step // EVERY, frozen=frozen, num_layers=LAYERS,
                          gradient_norms=gradient_norms(layers, frozen))
            frozen = decide(policy, facts)
            layers[:frozen].requires_grad_(False)
            print(f"step {step}: loss {loss.item():.4f}, {frozen} of {LAYERS} layers frozen")
        optimizer.step()


if __name__ == "__main__":
    main()
