"""Loss curves in half precision compared with torch's own autocast, on real text, in one picture.

    python -m benchmarks.meshes.precision [--steps 300] [--recipe RECIPE] [--formats bf16 fp16]

torch.autocast keeps fp32 parameters and casts them in each product; Ranvier has half-precision parameters with fp32
master copies; with float8 the products of its inner layers have operands of 8 bits. All see the same batches from the
same start; the reference is plain PyTorch in fp32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.meshes.losses import draw, mesh_losses, plain_losses
from benchmarks.record import results_file, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipe", default=str(Path(__file__).with_suffix(".toml")))
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp16"), default=("bf16", "fp16"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        recipe, steps, folder = options.recipe, options.steps, Path(name)
        curves = {"plain PyTorch in fp32": plain_losses(recipe, steps, folder)}
        for half in options.formats:
            curves[f"torch.autocast, {half}"] = plain_losses(recipe, steps, folder, half)
            curves[f"Ranvier, {half}"] = mesh_losses(recipe, steps, 2, 2, folder, precision=half)
            curves[f"Ranvier, {half}, half-precision sums"] = mesh_losses(
                recipe, steps, 2, 2, folder, precision=half, optim__accumulate="half", optim__offload="stream")
            curves[f"Ranvier, {half}, float8 products"] = mesh_losses(
                recipe, steps, 2, 2, folder, precision=half, model__float8="true")
    reference = np.array(curves["plain PyTorch in fp32"])
    difference = {}
    for name, losses in curves.items():
        relative = np.abs(np.array(losses) - reference) / reference
        difference[name] = {"largest": float(relative.max()), "mean of the last 50": float(relative[-50:].mean())}
        print(f"{name:34} mean loss of the last 50 {np.mean(losses[-50:]):.4f}   from fp32: largest "
              f"{relative.max():.1e}, mean of the last 50 {relative[-50:].mean():.1e}")
    path = results_file("meshes", "-".join(["precision", *options.formats]))
    write_results(path, {"steps": steps, "recipe": Path(recipe).name, "relative_difference_from_fp32": difference,
                         "curves": curves})
    draw(curves, path.with_suffix(".png"), "Half precision: torch.autocast and Ranvier (data 2 x pipe 2)")
    print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
