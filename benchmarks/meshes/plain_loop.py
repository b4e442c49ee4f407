"""A plain PyTorch training loop on one process: the reference curve. Imports nothing of Ranvier but the model.

    python plain_loop.py batches.npy config.json losses.json

batches.npy: [steps, sequences, tokens + 1] int64, the global batches. config.json: the model's sizes, seed, learning
rates of all steps and AdamW's settings.
"""

import json
import sys

import numpy as np
import torch
from torch import nn

from ranvier.models.block import initialise
from ranvier.models.gpt import GPT, gpt


def main(batches_file: str, config_file: str, losses_file: str) -> None:
    with open(config_file) as file:
        config = json.load(file)
    torch.set_num_threads(1)
    model = gpt(GPT(**config["model"]))
    blocks = {name: build() for name, build in model.blocks.items()}
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            initialise(parameter, f"{block}.{name}", model.initial(f"{block}.{name}"), config["seed"])
    blocks["head"].projection.weight = blocks["embedding"].token.weight
    network = nn.Sequential(*blocks.values())
    optimizer = torch.optim.AdamW(network.parameters(), fused=True, **config["adamw"])
    losses = []
    for batch, rate in zip(np.load(batches_file, mmap_mode="r"), config["learning_rates"], strict=True):
        tokens = torch.from_numpy(batch.copy())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total, weight = model.loss(network(tokens[:, :-1]), tokens[:, 1:])
        (total / weight).backward()
        optimizer.step()
        losses.append((total / weight).item())
    with open(losses_file, "w") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
