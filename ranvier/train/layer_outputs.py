"""Outputs of a run's layers for the same few held-out samples, for freeze policies that use them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ranvier.block import State, as_named_tensors
from ranvier.data.loader import Loader, longest_first
from ranvier.data.sampler import Sampler
from ranvier.data.subset import Subset
from ranvier.data.task import Dataset
from ranvier.elastic.similarity import Similarity, normalised, products
from ranvier.errors import ConfigError
from ranvier.inference.evaluation import length_multiple, lengths_of, loader_options
from ranvier.tensor.columns import plain
from ranvier.train.runtime import RankRuntime

SAMPLES = 8
"""Held-out samples of each row of the mesh. Longer ones come first, since padding carries no information."""


def check_samples(data: Dataset, rows: int, policy: str) -> None:
    """ConfigError for held-out data with too few samples for `policy` to compare."""
    if len(data) < 2 * rows:
        raise ConfigError(f"compares the layers' outputs for at least {2 * rows} held-out samples, but there are "
                          f"{len(data)}", code="too-few-held-out-samples", where="elastic.freeze", value=policy,
                          remedy="Hold out more samples, or set another freeze policy.")


def layer_similarities(runtime: RankRuntime, data: Dataset) -> list[list[Similarity]]:
    """Similarities of each layer and each row, on every rank; the same on every mesh with this many rows. NaN for a
    layer whose output does not have the samples as its first dim. Collective."""
    engine, run = runtime.engine, runtime.run
    rows, per_row = engine.mesh.microbatch_parts, min(SAMPLES, len(data) // engine.mesh.microbatch_parts)
    lengths = lengths_of(run, data)
    chosen = np.arange(len(data)) if lengths is None else longest_first(lengths)
    table = chosen[:rows * per_row].reshape(rows, per_row)
    each = max(1, run.batch.microbatch_size // rows)
    order = np.concatenate([table[:, first:first + each].reshape(-1) for first in range(0, per_row, each)])
    if lengths is not None:  # all samples get the same padding, whatever the size of a microbatch
        lengths = np.full(len(order), lengths[order].max())
    options = loader_options(engine, each * rows, length_multiple(run)) | {"replica": 0, "num_replicas": 1}
    loader = Loader(Subset(data, order), Sampler(len(order), None), global_size=len(order), total=len(order),
                    lengths=lengths, **options)
    parts: dict[int, list[Tensor]] = {}
    hooks = [engine.blocks[layer[-1]].register_forward_hook(_keeping(parts.setdefault(number, [])))
             for number, layer in enumerate(engine.layers) if layer[-1] in engine.blocks]
    try:
        engine.evaluate(loader.microbatches(0))
    finally:
        for hook in hooks:
            hook.remove()
    at = engine.coordinates
    outputs = {} if at.replica else {number: torch.cat(kept) for number, kept in parts.items()}
    own_products = {number: products(kept).tolist() if len(kept) == per_row else None
                    for number, kept in outputs.items()}
    found = runtime.ranks.gather_objects({"part": at.microbatch_part, "products": own_products})
    nothing = torch.full((per_row, per_row), torch.nan, dtype=torch.float64)
    sums: list[list[Tensor | None]] = [[None] * rows for _ in engine.layers]
    for rank in found:
        for number, part in rank["products"].items():
            before, part = sums[int(number)][rank["part"]], nothing if part is None else torch.tensor(part).double()
            sums[int(number)][rank["part"]] = part if before is None else before + part
    return [[normalised(nothing if part is None else part) for part in layer] for layer in sums]


def _keeping(outputs: list[Tensor]) -> Callable[[nn.Module, object, State], None]:
    """A hook that keeps each microbatch's outputs, in host memory."""
    def hook(module: nn.Module, inputs: object, output: State) -> None:
        floats = [tensor.detach().to("cpu", torch.float32)
                  for tensor in as_named_tensors(plain(output), "a layer").values()
                  if tensor.is_floating_point()]
        outputs.append(torch.cat([tensor.reshape(len(tensor), -1) for tensor in floats], dim=1))

    return hook
