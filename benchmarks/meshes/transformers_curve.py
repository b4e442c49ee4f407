"""Loss curves of a small Llama in bf16 compared with transformers' own, from the same weights on the same batches, in
one picture.

    python -m benchmarks.meshes.transformers_curve [--steps 500]

The model is made by transformers and saved; Ranvier starts from that folder (--model.pretrained) on a pipeline of 2,
with bf16 parameters and fp32 master copies. The peer is transformers' model in a plain loop under torch.autocast, like
its Trainer with bf16; the reference is the same loop in fp32.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from pathlib import Path

import numpy as np
import tomli_w
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.meshes.losses import draw, mesh_losses
from benchmarks.record import results_file, write_results
from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.config import read
from ranvier.config.run import Run
from ranvier.data import tokenizer
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare
from ranvier.data.sampler import Sampler
from ranvier.optim.learning_rate import learning_rate

MODEL = dict(vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True)
YARDSTICK = "transformers, fp32"


def save_model(folder: Path) -> Path:
    """transformers' Llama with its own initial weights, and a tokenizer of Python's standard library."""
    import transformers

    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(folder)
    texts = (path.read_text() for path in sorted(Path(ast.__file__).parent.glob("a*.py")))
    tokenizer.train(texts, MODEL["vocab_size"]).save(folder / "tokenizer.json")
    return folder


def write_recipe(path: Path, model: Path, steps: int) -> Path:
    """Write a run of 8 sequences a step on Python's standard library, from the weights in `model`."""
    path.write_text(tomli_w.dumps({
        "model": {"family": "llama", "pretrained": str(model), "sequence": 64, "vocab": 512},
        "data": {"corpus": "python-stdlib", "tokenizer": "bpe", "max_bytes": 2_000_000 if steps > 50 else 500_000},
        "batch": {"global_size": 8, "microbatch_size": 4},
        "train": {"steps": steps, "learning_rate": 1e-3, "warmup_steps": 60, "sample_tokens": 0},
        "optim": {"betas": [0.9, 0.95]}}))
    return path


def batches_of(run: Run, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The inputs and targets of each step, as the meshes see them."""
    samples = prepare(run).train
    size = run.batch.global_size
    loader = Loader(samples, Sampler(len(samples), run.seed), global_size=size, microbatch_size=size)
    wholes = [whole for step in range(steps) for whole in loader.microbatches(step)]
    return [(whole.inputs, whole.targets) for whole in wholes]


def peer_losses(model: Path, run: Run, batches: list[tuple[Tensor, Tensor]], *, autocast: bool) -> list[float]:
    """Losses of transformers' model in a plain loop."""
    import transformers

    llama = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optim = run.optim
    optimizer = torch.optim.AdamW(llama.parameters(), betas=optim.betas, eps=optim.epsilon,
                                  weight_decay=optim.weight_decay)
    losses = []
    for step, (inputs, targets) in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.train, step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = llama(inputs).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="Does it work? 6 steps.")
    parser.add_argument("--output", type=Path, help="The JSON file; by default in benchmarks/results.")
    options = parser.parse_args()
    steps = 6 if options.quick else options.steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "llama")
        recipe = write_recipe(folder / "llama.toml", model, steps)
        run = resolve_pretrained(read.merge([read.load(str(recipe))[1]]).run)
        batches = batches_of(run, steps)
        curves = {YARDSTICK: peer_losses(model, run, batches, autocast=False),
                  "transformers, bf16 (autocast)": peer_losses(model, run, batches, autocast=True),
                  "Ranvier, bf16, pipe 2": mesh_losses(str(recipe), steps, 1, 2, folder, precision="bf16")}
    difference = {}
    for name, losses in curves.items():
        relative = np.abs(np.array(losses) - curves[YARDSTICK]) / curves[YARDSTICK]
        difference[name] = {"largest": float(relative.max()), "mean of the last 50": float(relative[-50:].mean()),
                            "mean loss of the last 50": float(np.mean(losses[-50:]))}
        print(f"{name:32} mean loss of the last 50 {np.mean(losses[-50:]):.4f}   from fp32: largest "
              f"{relative.max():.1e}, mean of the last 50 {relative[-50:].mean():.1e}")
    path = options.output or results_file("meshes", "transformers-curve", quick=options.quick)
    write_results(path, {"steps": steps, "model": MODEL, "relative_difference_from_fp32": difference, "curves": curves})
    draw(curves, path.with_suffix(".png"), "A small Llama in bf16: transformers and Ranvier, the same batches")
    print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
