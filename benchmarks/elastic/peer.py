"""The peer: a plain loop of torch's DDP over Gloo, fine-tuning transformers' model from the same weights.

    torchrun --nproc-per-node 4 -m benchmarks.elastic.peer RUN.toml INITIAL_FOLDER

Samples and their order, held-out samples, batch, number format, learning rates, AdamW's settings, parameters with
weight decay, clipping and dropout rates are the run's. Each rank takes its share of a batch in one piece; attention is
torch's scaled_dot_product_attention, as in ours; AdamW is torch's fused one; gradients are bucket views. Batches are
padded to their longest sample, as ours are. One process is a plain loop, without DDP. Adapters are PEFT's, from the
same start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic.initial import ADAPTERS
from benchmarks.elastic.outcome import CLOCK
from ranvier.config import read
from ranvier.config.run import Optim, Run
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare
from ranvier.data.sampler import Sampler
from ranvier.data.task import Prepared, sample_lengths
from ranvier.optim.learning_rate import learning_rate
from ranvier.precision import DTYPES
from ranvier.system.machine import threads_per_rank

_CLASSES = {"bert": transformers.BertForSequenceClassification, "vit": transformers.ViTForImageClassification,
            "llama": transformers.LlamaForCausalLM}
_EVAL_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    step: int
    loss: float
    accuracy: float | None
    count: int
    seconds: float
    ended: float
    """Seconds from the start of training to its end."""

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the task, by their names in our files."""
        return {} if self.accuracy is None else {"eval_accuracy": self.accuracy, "eval_count": self.count}


def network_of(initial: Path, run: Run) -> nn.Module:
    """transformers' model of the folder, with PEFT's adapters if there are any, or with as many layers frozen from the
    start as the run says."""
    kind = json.loads((initial / "config.json").read_text())["model_type"]
    network = _CLASSES[kind].from_pretrained(initial).to(DTYPES[run.precision])
    if (initial / ADAPTERS).exists():
        from peft import PeftModel  # only adapters need that package

        return PeftModel.from_pretrained(network, initial / ADAPTERS, is_trainable=True).get_base_model()
    depth = int(run.elastic.manual[0].removeprefix("0:")) if run.elastic.freeze == "manual" else 0
    if depth and kind == "llama" and network.config.tie_word_embeddings:  # as ours: the head's table still trains
        network.config.tie_word_embeddings = False
        network.lm_head.weight = nn.Parameter(network.lm_head.weight.detach().clone())
    for module in bottom(network)[:depth + 1] if depth else ():
        module.requires_grad_(False)
    return network


def bottom(network: nn.Module) -> list[nn.Module]:
    """The embedding and the layers."""
    body = getattr(network, network.base_model_prefix)
    layers = next(module for module in body.modules() if isinstance(module, nn.ModuleList))
    return [next(body.children()), *layers]


def to_train(network: nn.Module, run: Run) -> None:
    """Set training mode. Dropout is enabled; in frozen layers below the first trained one only if the run enables it
    there."""
    network.train()
    for module in () if run.elastic.frozen_dropout else bottom(network):
        if any(parameter.requires_grad for parameter in module.parameters()):
            return
        module.eval()


def optimizer_of(network: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW with the run's settings. Our class token is a vector, which has no weight decay; theirs has three dims."""
    assert optim.algorithm == "adamw" and not optim.groups
    decaying, others = [], []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = optim.decay == "all" or (parameter.dim() > 1 and not name.endswith("cls_token"))
        (decaying if decays else others).append(parameter)
    return torch.optim.AdamW([{"params": decaying, "weight_decay": optim.weight_decay},
                              {"params": others, "weight_decay": 0.0}], lr=1.0, betas=optim.betas, eps=optim.epsilon,
                             fused=True)


def logits_of(network: nn.Module, inputs: Tensor | dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Logits [samples, classes], or [samples, tokens, vocabulary]."""
    if isinstance(inputs, dict):
        return network(input_ids=inputs["ids"], attention_mask=inputs["mask"], token_type_ids=inputs["types"]).logits
    if inputs.is_floating_point():
        return network(pixel_values=inputs.to(dtype)).logits
    return network(input_ids=inputs, use_cache=False).logits


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def train_peer(run: Run, initial: Path) -> None:
    """Train as `run` says, and write metrics.jsonl, events.jsonl and the clock into its folder, in our format.
    Collective over the default process group; every rank must have an equal share of a batch."""
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[run.precision]
    assert run.batch.global_size % size == 0
    data = prepare(run)
    network = network_of(initial, run)
    to_train(network, run)
    whole = DistributedDataParallel(network, gradient_as_bucket_view=True) if size > 1 else network
    optimizer = optimizer_of(network, run.optim)
    lengths = sample_lengths(data.train)
    loader = Loader(data.train, Sampler(len(data.train), run.seed, lengths=lengths), lengths=lengths,
                    global_size=run.batch.global_size, microbatch_size=run.batch.global_size // size, replica=rank,
                    num_replicas=size)
    torch.manual_seed(run.seed + rank)  # dropout
    losses, seconds, evaluations = torch.zeros(run.train.steps, dtype=torch.float64), [], []
    dist.barrier()
    began = before = time.monotonic()
    for step in range(1, run.train.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.train, step)
        (batch,) = loader.microbatches(step - 1)
        loss = loss_of(logits_of(whole, batch.inputs, dtype), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        if run.optim.clip_norm:
            nn.utils.clip_grad_norm_(network.parameters(), run.optim.clip_norm)
        optimizer.step()
        losses[step - 1] = loss.detach()
        now = time.monotonic()
        seconds.append(now - before)
        if step == run.train.steps or (run.train.eval_every and step % run.train.eval_every == 0):
            evaluations.append(evaluate(network, data, run, step, began))
        before = time.monotonic()
    wall = time.monotonic() - began
    dist.all_reduce(losses)
    if rank == 0:
        write(run, size, run.batch.global_size * round(data.weight), (losses / size).tolist(), seconds, evaluations,
              wall)


def evaluate(network: nn.Module, data: Prepared, run: Run, step: int, start: float) -> Evaluation:
    """Evaluate all held-out samples once (for text, the run's number of sequences); each rank takes a share of each
    batch."""
    began, rank, size = time.monotonic(), dist.get_rank(), dist.get_world_size()
    lengths, is_scored = sample_lengths(data.eval), data.scoring is not None
    total = len(data.eval) if is_scored else min(run.train.eval_sequences, len(data.eval))
    loader = Loader(data.eval, Sampler(len(data.eval), None), global_size=_EVAL_SAMPLES * size, lengths=lengths,
                    microbatch_size=_EVAL_SAMPLES, replica=rank, num_replicas=size, total=total)
    sums = torch.zeros(3, dtype=torch.float64)
    network.eval()
    with torch.inference_mode():
        for number in range(-(-total // loader.global_size)):
            for batch in loader.microbatches(number):
                logits = logits_of(network, batch.inputs, DTYPES[run.precision])
                targets = torch.as_tensor(batch.targets)
                sums += torch.tensor([loss_of(logits, targets, "sum").item(),
                                      (logits.argmax(-1) == targets).sum().item(), targets.numel()])
    to_train(network, run)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return Evaluation(step=step, loss=loss / count, accuracy=right / count if is_scored else None, count=int(count),
                      seconds=time.monotonic() - began, ended=time.monotonic() - start)


def write(run: Run, size: int, targets: int, losses: list[float], seconds: list[float],
          evaluations: list[Evaluation], wall: float) -> None:
    """Write the files of a run's folder that these programs read. targets: targets of a step."""
    folder = run.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    steps = [{"step": step, "loss": loss, "tokens": targets, "step_seconds": took}
             for step, (loss, took) in enumerate(zip(losses, seconds, strict=True), start=1)]
    events = [{"step": 0, "event": "start", "mesh": {"data": size, "pipe": 1}}]
    events += [{"step": one.step, "event": "eval", "loss": one.loss, "seconds": one.seconds,
                **one.scores} for one in evaluations]
    for name, lines in (("metrics.jsonl", steps), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = [{"seconds": one.ended, "eval_seconds": one.seconds, "eval_loss": one.loss, **one.scores}
              for one in evaluations]
    (folder / CLOCK).write_text(json.dumps({"seconds": wall, "evaluations": points}) + "\n")


def main(path: str, initial: str) -> None:
    torch.set_num_threads(threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo")
    train_peer(read.merge([read.load(path)[1]]).run, Path(initial))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
