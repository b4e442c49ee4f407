"""Bytes that a rank of the tensor mesh receives, counted by the layers that run, next to the closed formulas.

    python -m benchmarks.tensor.counted [--quick] [--only 'stationary 2x*']

A GPT layer, the embedding and the head with its loss run forward and backward on the meta device, on groups whose
members exist in name only: any mesh and any size in a second. Every part has its own two groups, so its bytes are
counted separately. With checkpointing the layer is one segment that runs again in its backward, as in a stage.

counted   payload by ring conventions: operands, outputs and gradients of the products; of the embedding the rows of
          tokens, or the table's blocks; nothing of what is small
formula   ranvier.cost.volume; the program ends with 1 if the two differ by a byte
small     statistics of layer norms, ids of tokens, reductions of the loss: forward and backward apart
a step    sums of biases and norms that ranks have in common: once a step, whatever the number of microbatches
Table 1   of Xu et al., 2021 (Optimus), in bytes, for as many ranks: forward, and backward with its recomputation.
          Optimus' is for square meshes; it counts a broadcast over q ranks log2(q) times
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from math import isqrt
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.program import table
from benchmarks.record import results_file, write_results
from benchmarks.tensor.paper_volumes import PRODUCTS, layer_volume, paper_elements, product_volumes
from ranvier.comm.meta import MetaGroup
from ranvier.config.run import TensorParallel as Settings
from ranvier.config.run import Transformer
from ranvier.cost.volume import Bytes, Scheme, Volume, embedding_volume, head_volume
from ranvier.models.gpt import MLP, Attention, Embedding, Head
from ranvier.tensor.layers import block_splits
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.split.loss import NextTokenLoss

SETTINGS: Mapping[Scheme, Settings] = {
    "summa": Settings(scheme="summa"), "stationary": Settings(scheme="stationary"),
    "megatron": Settings(scheme="megatron"), "stationary-sequence": Settings(sequence_sharding=True),
    "megatron-sequence": Settings(scheme="megatron", sequence_sharding=True)}
MESHES = ((1, 4), (2, 2), (4, 1), (2, 3), (3, 3), (4, 4), (8, 8))
ONE_PANEL = 1 << 62

State = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a microbatch and the model; `batch` is in sequences of all rows together."""

    batch: int = 24
    sequence: int = 576
    hidden: int = 4608
    heads: int = 576
    vocab: int = 50112
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> Transformer:
        return Transformer(num_layers=1, hidden=self.hidden, heads=self.heads, vocab=self.vocab, sequence=self.sequence)

    @property
    def volume(self) -> dict[str, int]:
        """Arguments of the formulas of a layer; activations are summed in their own format, as on GPUs."""
        return {"batch": self.batch, "sequence": self.sequence, "hidden": self.hidden, "itemsize": self.dtype.itemsize,
                "sum_itemsize": self.dtype.itemsize}


class CountedGroup(MetaGroup):
    """A group that counts ids, which are integers, separately."""

    def __init__(self, purpose: str, size: int, index: int = 0, *, device: str = "cuda") -> None:
        super().__init__(purpose, size, index, device=device)
        self.id_bytes = 0

    def _count(self, tensor: Tensor, received_bytes: int) -> None:
        if tensor.is_floating_point():
            super()._count(tensor, received_bytes)
        else:
            self.id_bytes += received_bytes


class Meter:
    """One rank of a row x col mesh in name only, with a `TensorMesh` for each part that runs on it. device: hosts
    exchange small sums in one round, and receive more than in the rings of the formulas."""

    def __init__(self, scheme: Scheme, row: int, col: int, at: tuple[int, int] = (0, 0),
                 panel_bytes: int | None = None, *, device: str = "cuda") -> None:
        self.device = device
        self.scheme, self.row, self.col, self.at = scheme, row, col, at
        self.settings, self._panel_bytes = SETTINGS[scheme], panel_bytes
        self._meshes: dict[str, TensorMesh] = {}
        self._groups: list[tuple[CountedGroup, CountedGroup]] = []

    def mesh(self, part: str) -> TensorMesh:
        if part not in self._meshes:
            self._groups.append((CountedGroup("row", self.row, self.at[0], device=self.device),
                                 CountedGroup("col", self.col, self.at[1], device=self.device)))
            self._meshes[part] = TensorMesh(*self._groups[-1], self.settings, device=self.device,
                                            panel_bytes=self._panel_bytes)
        return self._meshes[part]

    def split(self, block: nn.Module) -> nn.Module:
        """`block` with each of its layers on a mesh of that layer's name."""
        for name, layer in list(block.named_children()):
            setattr(block, name, split_layers(layer, self.mesh(name), name))
        return block

    def residual(self, sizes: Sizes) -> Tensor:
        """This rank's part of the residual stream."""
        shape = [sizes.batch // self.row, sizes.sequence, sizes.hidden]
        for dim in self.mesh("residual").activations.cut_dims:
            shape[dim + 1] //= self.col
        return torch.empty(shape, dtype=sizes.dtype, device="meta", requires_grad=True)

    def received(self) -> dict[str, Bytes]:
        """Bytes of each part so far; "ids" are those of all parts together."""
        found = {part: Bytes(mesh.over_cols.bytes_received, mesh.over_rows.bytes_received)
                 for part, mesh in self._meshes.items()}
        return found | {"ids": Bytes(sum(cols.id_bytes for _, cols in self._groups),
                                     sum(rows.id_bytes for rows, _ in self._groups))}

    def run(self, x: Tensor, forward: State) -> dict[str, Volume]:
        """Volume that each part receives in `forward(x)` and in its backward."""
        y = forward(x)
        before = self.received()
        y.backward(torch.empty_like(y))
        return {part: Volume(forward=before[part], backward=Bytes(total.activations - before[part].activations,
                                                                  total.weights - before[part].weights))
                for part, total in self.received().items()}

    def sums(self, block: nn.Module, splits: Mapping) -> int:
        """Bytes of the sums, once a step, of gradients of parameters that ranks of a split block have in common."""
        groups = {axis: CountedGroup(axis, size) for axis, size in (("row", self.row), ("col", self.col))}
        for axis, group in groups.items():
            size = sum(parameter.numel() for name, parameter in block.named_parameters()
                       if splits[name].summed == (axis,))
            group.all_reduce(torch.empty(size, dtype=next(block.parameters()).dtype, device="meta"))
        return sum(group.bytes_received for group in groups.values())


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Volume that one block receives: each part that has payload, all small messages, and the sums of a step."""

    parts: Mapping[str, Volume]
    small: Volume
    step_bytes: int


def count_layer(meter: Meter, sizes: Sizes, *, checkpointed: bool = False) -> Counted:
    """Volume of a transformer layer, by product."""
    with torch.device("meta"):
        whole = nn.ModuleList([Attention(sizes.config, sizes.dtype), MLP(sizes.config, sizes.dtype)])
        splits = block_splits("layer", whole, meter.settings)
        layer = nn.ModuleList(meter.split(block) for block in whole)
    for linear in layer.modules():
        if isinstance(linear, SplitLinear):
            linear.recomputed = checkpointed

    def forward(x: Tensor) -> Tensor:
        return layer[1](layer[0](x))

    found = meter.run(meter.residual(sizes), lambda x: checkpoint(
        forward, x, use_reentrant=False, preserve_rng_state=False) if checkpointed else forward(x))
    return Counted(parts={name: found[name] for name in PRODUCTS}, small=found["norm"],
                   step_bytes=meter.sums(layer, splits))


def count_embedding(meter: Meter, sizes: Sizes) -> Counted:
    """Volume of the embedding. An all-to-all along a column brings tokens, not weights."""
    with torch.device("meta"):
        whole = Embedding(sizes.config, sizes.dtype)
        splits = block_splits("embedding", whole, meter.settings)
        block = meter.split(whole)
        ids = torch.zeros(sizes.batch // meter.row, sizes.sequence, dtype=torch.int64)
    found = meter.run(ids, block)
    token = found["token"]
    if meter.scheme.startswith("stationary"):
        token = Volume(forward=Bytes(activations=token.forward.total), backward=Bytes(activations=token.backward.total))
    return Counted(parts={"embedding": token}, small=found["ids"], step_bytes=meter.sums(block, splits))


def count_head(meter: Meter, sizes: Sizes) -> Counted:
    """Volume of the head; its norm and the loss are small."""
    with torch.device("meta"):
        whole = Head(sizes.config, sizes.dtype)
        splits = block_splits("head", whole, meter.settings)
        block = meter.split(whole)
        loss = split_layers(NextTokenLoss(sizes.vocab), meter.mesh("loss"), "loss")
        targets = torch.zeros(sizes.batch // meter.row, sizes.sequence, dtype=torch.int64)
    found = meter.run(meter.residual(sizes), lambda x: loss(block(x), targets)[0])
    small = Volume(forward=found["norm"].forward + found["loss"].forward,
                   backward=found["norm"].backward + found["loss"].backward)
    return Counted(parts={"head": found["projection"]}, small=small, step_bytes=meter.sums(block, splits))


def formulas(scheme: Scheme, row: int, col: int, sizes: Sizes, *, checkpointed: bool) -> dict[str, Volume]:
    """The closed formula of every part. Summa has no gathered operands that could be kept."""
    again: Literal["again", "kept"] = "again" if scheme == "summa" else "kept"
    shape = dict(row=row, col=col, **sizes.volume)
    recompute = again if checkpointed else "none"
    return {**product_volumes(scheme, **shape, recompute=recompute),
            "layer": layer_volume(scheme, **shape, recompute=recompute),
            "embedding": embedding_volume(scheme, vocab=sizes.vocab, **shape),
            "head": head_volume(scheme, vocab=sizes.vocab, **shape)}


def whole(parts: Mapping[str, Volume]) -> Volume:
    """Volume of all parts together."""
    return Volume(forward=sum((each.forward for each in parts.values()), Bytes()),
                  backward=sum((each.backward for each in parts.values()), Bytes()))


def paper_bytes(ranks: int, sizes: Sizes) -> dict[str, list[float] | None]:
    """Table 1's forward and backward; None for Optimus if no square mesh has this many ranks."""
    shape = dict(ranks=ranks, batch=sizes.batch, sequence=sizes.sequence, hidden=sizes.hidden)
    return {scheme: [sizes.dtype.itemsize * elements for elements in paper_elements(scheme, **shape)]
            if scheme == "megatron" or isqrt(ranks) ** 2 == ranks else None for scheme in ("summa", "megatron")}


def cases(meshes: Sequence[tuple[int, int]] = MESHES) -> list[tuple[Scheme, int, int]]:
    """Every scheme on every mesh; Megatron's on one row with as many ranks."""
    one_row = sorted({row * col for row, col in meshes})
    return [(scheme, row, col) for scheme in SETTINGS
            for row, col in ([(1, ranks) for ranks in one_row] if scheme.startswith("megatron") else meshes)]


def rows_of(scheme: Scheme, row: int, col: int, sizes: Sizes) -> Iterator[dict]:
    """Rows of one scheme on one mesh: each part without checkpointing, and the parts of a layer with it."""
    paper = paper_bytes(row * col, sizes)
    for checkpointed in (False, True):
        expected = formulas(scheme, row, col, sizes, checkpointed=checkpointed)
        found = [("layer", count_layer(Meter(scheme, row, col), sizes, checkpointed=checkpointed))]
        if not checkpointed:
            found += [("embedding", count_embedding(Meter(scheme, row, col), sizes)),
                      ("head", count_head(Meter(scheme, row, col), sizes))]
        for name, one in found:
            parts = {**one.parts, "layer": whole(one.parts)} if name == "layer" else one.parts
            for part, volume in parts.items():
                entry = {"scheme": scheme, "mesh": [row, col], "checkpointed": checkpointed, "part": part,
                         "counted": asdict(volume), "formula": asdict(
                             Volume(forward=expected[part].forward, backward=expected[part].backward))}
                entry["equal"] = entry["counted"] == entry["formula"]
                if part == name:
                    entry |= {"small_forward": one.small.forward.total, "small_backward": one.small.backward.total,
                              "step_bytes": one.step_bytes}
                if part == "layer":
                    entry["paper"] = {which: pair and {"forward": pair[0], "backward": pair[1] if checkpointed else
                                                       None} for which, pair in paper.items()}
                yield entry


def shown(rows: Sequence[Mapping]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}"

    def paper(row: Mapping, which: str) -> str:
        found = row.get("paper", {}).get(which)
        return "-" if found is None else " / ".join(number(found[way]) for way in ("forward", "backward"))

    return table(("scheme", "mesh", "checkpoint", "part", "forward", "formula", "backward", "formula", "equal",
                  "small forward", "small backward", "a step", "Table 1 Optimus", "Table 1 Megatron"),
                 [(row["scheme"], "x".join(map(str, row["mesh"])), "yes" if row["checkpointed"] else "no", row["part"],
                   *(number(sum(row[which][way].values())) for way in ("forward", "backward")
                     for which in ("counted", "formula")), "yes" if row["equal"] else "NO",
                   *(number(row.get(name)) for name in ("small_forward", "small_backward", "step_bytes")),
                   paper(row, "summa"), paper(row, "megatron")) for row in rows])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--output", type=Path,
                        help="the file of results; by default benchmarks/results/tensor/counted-DATE")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"],
                        help="of 'SCHEME ROWxCOL', e.g. 'summa 2x*'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    for name in ("batch", "sequence", "hidden", "heads", "vocab"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    quick = dict(batch=24, sequence=576, hidden=576, heads=576, vocab=576) if options.quick else {}
    given = {name: value for name in ("batch", "sequence", "hidden", "heads", "vocab")
             if (value := getattr(options, name)) is not None}
    options.sizes = Sizes(**{**quick, **given}, dtype=getattr(torch, options.dtype))
    options.cases = [(scheme, row, col) for scheme, row, col in cases()
                     if any(fnmatch(f"{scheme} {row}x{col}", pattern) for pattern in options.only)]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sizes = options.sizes
    print(__doc__.partition("\n\n")[2].partition("\n\n")[2])
    print(f"bytes received per rank and microbatch: b {sizes.batch}, s {sizes.sequence}, h {sizes.hidden}, "
          f"n {sizes.heads}, V {sizes.vocab}, {options.dtype}")
    rows = [found for scheme, row, col in options.cases for found in rows_of(scheme, row, col, sizes)]
    print(shown(rows))
    different = sum(not row["equal"] for row in rows)
    print(f"{len(rows) - different} of {len(rows)} counts equal their formula to the byte")
    path = options.output or results_file("tensor", "counted", quick=options.quick)
    write_results(path, {"sizes": {**asdict(sizes), "dtype": options.dtype}, "rows": rows, "different": different})
    print(f"wrote {path}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
