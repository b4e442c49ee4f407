"""What an entry of the cache depends on, as text: frozen weights by their bytes, and all else by its name.

The hash of a prefix is a chain, so that the prefixes of one list of blocks are all known after one pass:

    digest[0] = ""      digest[i + 1] = hash(digest[i], number, name, every tensor of block i by name, format and bytes)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

Block = tuple[int, str, nn.Module]
"""(number in the model, name, module) of a block."""

_VERSION = 1
_PIECE = 1 << 24


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and all buffers, those that are not saved too: outputs depend on them just so."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def stamp(blocks: Sequence[Block]) -> tuple:
    """Differs after any of these tensors was replaced or changed in place, as far as torch counts that (not through
    `.data`). Costs no more than a look at each."""
    return tuple((id(tensor), tensor.data_ptr(), tensor._version)
                 for _, _, module in blocks for _, tensor in _tensors(module))


def digests(blocks: Sequence[Block]) -> list[str]:
    """The hash of every prefix: item i is of the first i blocks."""
    found = [""]
    for number, name, module in blocks:
        digest = hashlib.blake2b(repr((found[-1], number, name)).encode(), digest_size=16)
        for label, tensor in _tensors(module):
            digest.update(repr((label, str(tensor.dtype), tuple(tensor.shape))).encode())
            flat = tensor.detach().flatten()
            for start in range(0, len(flat), _PIECE):
                piece = flat[start:start + _PIECE].clone(memory_format=torch.contiguous_format)
                digest.update(piece.view(torch.uint8).cpu().numpy())
        found.append(digest.hexdigest())
    return found


def about(*, depth: int, weights: str, fingerprint: str, inputs: list, precision: str, part: str) -> dict:
    """Everything that two entries of one sample must have in common to be the same; JSON."""
    return {"version": _VERSION, "torch": torch.__version__, "depth": depth, "weights": weights,
            "fingerprint": fingerprint, "inputs": inputs, "precision": precision, "part": part}


def key(description: dict) -> str:
    """The name of the files of everything that fits `description`."""
    return hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16).hexdigest()
