"""A plain PyTorch training loop on one process: the reference curve. Imports nothing of Ranvier except the model.

    python plain_loop.py batches.npy config.json losses.json

batches.npy: [steps, sequences, tokens + 1] int64, the global batches. config.json: the model's sizes, seed, learning
rates of all steps, AdamW's settings, and `autocast`: null, or the half precision of torch.autocast (with a gradient
scaler for fp16), with parameters in fp32.
"""

import json
import sys

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ranvier.block import initialise
from ranvier.config.run import Transformer
from ranvier.models.gpt import gpt


def main(batches_file: str, config_file: str, losses_file: str) -> None:
    with open(config_file) as file:
        config = json.load(file)
    torch.set_num_threads(1)
    model = gpt(Transformer(**config["model"]))
    blocks = {name: build() for name, build in model.blocks.items()}
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            initialise(parameter, f"{block}.{name}", model.initial(f"{block}.{name}"), config["seed"])
    blocks["head"].projection.weight = blocks["embedding"].token.weight
    network = nn.Sequential(*blocks.values())
    optimizer = torch.optim.AdamW(network.parameters(), fused=True, **config["adamw"])
    half = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}[config["autocast"]]
    scaler = GradScaler("cpu", enabled=half is torch.float16)
    losses = []
    for batch, rate in zip(np.load(batches_file, mmap_mode="r"), config["learning_rates"], strict=True):
        tokens = torch.from_numpy(batch.copy())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half, enabled=half is not torch.float32):
            total, weight = model.loss(network(tokens[:, :-1]), tokens[:, 1:])
        scaler.scale(total / weight).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append((total / weight).item())
    with open(losses_file, "w") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
