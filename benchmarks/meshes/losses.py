"""Loss curves of one run on several meshes and of a plain PyTorch loop, in one picture (AxoNN's Figure 10).

    python -m benchmarks.meshes.losses [--steps 200] [--recipe gpt-tiny]

Every mesh trains the same model from the same start on the same batches with 4 ranks; the curves agree up to rounding.
The plain loop imports nothing of Ranvier except the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.record import results_file, write_results
from ranvier.config import read
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare
from ranvier.data.sampler import Sampler
from ranvier.optim.learning_rate import learning_rate

HERE = Path(__file__).parent
MESHES = ((1, 1), (2, 2), (1, 4), (4, 1))


def mesh_losses(recipe: str, steps: int, data: int, pipe: int, folder: Path, **more: str) -> list[float]:
    """Losses of `ranvier train` on data x pipe, one per step. more: flags by name, "_" for "-" and "__" for "."."""
    run_dir = folder / "-".join([f"data{data}-pipe{pipe}", *more.values()])
    flags = {"--mesh.data": data, "--mesh.pipe": pipe, "--train.steps": steps, "--train.sample-tokens": 0,
             "--run-dir": run_dir} | {f"--{name.replace('__', '.').replace('_', '-')}": value
                                      for name, value in more.items()}
    subprocess.run([sys.executable, "-m", "ranvier", "train", recipe, *(str(word) for pair in flags.items()
                                                                        for word in pair)], check=True)
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def plain_losses(recipe: str, steps: int, folder: Path, autocast: str | None = None) -> list[float]:
    """Losses of the plain loop on exactly the batches that the meshes see. autocast: bf16 or fp16, torch's own."""
    run = read.merge([read.load(recipe)[1]]).run
    samples = prepare(run).train
    loader = Loader(samples, Sampler(len(samples), run.seed), global_size=run.batch.global_size,
                    microbatch_size=run.batch.global_size)
    batches = []
    for step in range(steps):
        (whole,) = loader.microbatches(step)
        targets: Any = whole.targets
        batches.append(np.concatenate([whole.inputs.numpy(), targets.numpy()[:, -1:]], axis=1))
    np.save(folder / "batches.npy", np.stack(batches))
    train, optim = run.train, run.optim
    (folder / "config.json").write_text(json.dumps({
        "model": asdict(run.model), "seed": run.seed, "autocast": autocast,
        "learning_rates": [learning_rate(train, step) for step in range(1, steps + 1)],
        "adamw": {"betas": optim.betas, "eps": optim.epsilon, "weight_decay": optim.weight_decay}}))
    subprocess.run([sys.executable, str(HERE / "plain_loop.py"), str(folder / "batches.npy"),
                    str(folder / "config.json"), str(folder / "losses.json")], check=True)
    return json.loads((folder / "losses.json").read_text())


def draw(curves: dict[str, list[float]], path: Path, title: str) -> None:
    """Draw curves above, and differences from the first curve below."""
    figure = Figure(figsize=(8, 7))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    first = next(iter(curves))
    reference = np.array(curves[first])
    for number, (name, losses) in enumerate(curves.items()):
        steps = np.arange(1, len(losses) + 1)
        above.plot(steps, losses, label=name, color=f"C{number}", linewidth=max(1, 5 - number * 0.9), alpha=0.8)
        if name != first:
            below.semilogy(steps, np.maximum(np.abs(np.array(losses) - reference) / reference, 1e-9), label=name,
                           color=f"C{number}", linewidth=1)
    above.set_ylabel("training loss")
    above.set_title(title)
    above.legend(frameon=False)
    below.set_ylabel(f"relative difference\nfrom {first}")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", default="gpt-tiny")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        curves = {"plain PyTorch": plain_losses(options.recipe, options.steps, folder)}
        for data, pipe in MESHES:
            curves[f"data {data} x pipe {pipe}"] = mesh_losses(options.recipe, options.steps, data, pipe, folder)
    reference = np.array(curves["plain PyTorch"])
    worst = {name: float(np.max(np.abs(np.array(losses) - reference) / reference)) for name, losses in curves.items()}
    for name, losses in curves.items():
        print(f"{name:18} last loss {losses[-1]:.6f}   largest relative difference {worst[name]:.1e}")
    path = results_file("meshes", "losses")
    write_results(path, {"steps": options.steps, "recipe": options.recipe, "largest_relative_difference": worst,
                         "curves": curves})
    draw(curves, path.with_suffix(".png"), "One run on several meshes, and a plain PyTorch loop")
    print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
