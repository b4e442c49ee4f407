"""Whether two copies of a GPT compute the same: logits of one short text, block by block where that saves memory.

The other copy is transformers' GPT-2 where it is installed and fits into memory, since that is what a file in Hugging
Face's form is for; else the file is read again as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ranvier.checkpoint.pretrained import Pretrained
from ranvier.errors import CheckpointError
from ranvier.machine import available_memory_bytes
from ranvier.models import hf
from ranvier.models.gpt import gpt
from ranvier.run import Transformer

TOLERANCE = 1e-3
"""Of the logits' standard deviation. Both sides have equal weights and compute in fp32, so they differ by roundings
alone: by 1e-6 or so; a weight in a wrong place by 0.1 and more."""
_TOKENS = 32
_COPIES = 2
"""Copies of the model in fp32 that transformers may have in memory while it loads one."""
_SPARE_BYTES = 1 << 29
Read = Callable[[str], Tensor]
"""Our parameter's name -> its value."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """largest: difference of two logits; scale: their standard deviation over the vocabulary; peer: who computed the
    others; note: why that was not transformers."""

    largest: float
    scale: float
    num_tokens: int
    peer: str
    note: str | None = None

    @property
    def is_equal(self) -> bool:
        return self.largest <= TOLERANCE * self.scale  # of NaN too

    def __str__(self) -> str:
        return (f"logits of {self.num_tokens} tokens against {self.peer}: largest difference {self.largest:.2g}, their "
                f"standard deviation being {self.scale:.2g}")


def token_ids(config: Transformer) -> Tensor:
    """[1, tokens]: a fixed text from all over the vocabulary."""
    return (torch.arange(min(_TOKENS, config.sequence)) * 7919 % config.vocab)[None]


@torch.no_grad()
def logits(config: Transformer, read: Read, ids: Tensor) -> Tensor:
    """[batch, tokens, vocabulary] in fp32, with one block in memory at a time."""
    state = ids
    for name, build in gpt(config).blocks.items():
        with torch.device("meta"):
            block = build()
        block.to_empty(device="cpu").eval()
        for inner, parameter in block.named_parameters():
            ours = f"{name}.{inner}"
            parameter.copy_(read(hf.TIED.get(ours, ours)))
        state = block(state)
    return state


def compare(config: Transformer, read: Read, folder: Path, settings: dict[str, object] | None = None) -> Comparison:
    """The logits of our parameters against those of the files in `folder`.

    settings: build transformers' model from these and the tensors of `folder` that were looked at, and leave all else
    that may be there alone; by default it loads the folder as any user would.
    """
    ids = token_ids(config)
    ours = logits(config, read, ids)
    theirs, peer, note = _theirs(config, folder, settings, ids)
    return Comparison(largest=float((ours - theirs).abs().max()), scale=float(ours.std(-1).square().mean().sqrt()),
                      num_tokens=ids.shape[1], peer=peer, note=note)


def check(comparison: Comparison, where: Path) -> None:
    """CheckpointError when the logits differ, or are no numbers."""
    if not comparison.is_equal:
        raise CheckpointError(f"computes something else than its source: {comparison}. Nothing was left there",
                              where=str(where), remedy="Please report this, with the model's settings.")


def tell(comparison: Comparison, line: Callable[[str], None]) -> None:
    """Say how it was compared, and what came out."""
    if comparison.note:
        line(f"{comparison.note}: compared with {comparison.peer}")
    line(str(comparison))


def _theirs(config: Transformer, folder: Path, settings: dict[str, object] | None,
            ids: Tensor) -> tuple[Tensor, str, str | None]:
    """The logits of the files in `folder`, who computed them, and why that was not transformers."""
    try:
        import transformers
    except ImportError:
        return _ours_again(folder, ids), "Ranvier's own reading of the files", "transformers is not installed"
    needed = _SPARE_BYTES + _COPIES * sum(4 * prod(hf.shape(name, config)) for name in hf.names(config))
    if (free := available_memory_bytes()) < needed:
        return (_ours_again(folder, ids), "Ranvier's own reading of the files",
                f"transformers' model needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free")
    with _quiet(transformers):
        if settings is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        else:
            model = transformers.GPT2LMHeadModel.from_pretrained(
                None, config=transformers.GPT2Config(**settings), state_dict=Pretrained(folder).state_dict())
    with torch.no_grad():
        return model.float().eval()(ids).logits, f"transformers {transformers.__version__}", None


def _ours_again(folder: Path, ids: Tensor) -> Tensor:
    found = Pretrained(folder)
    return logits(found.config, found.read, ids)


@contextmanager
def _quiet(transformers) -> Iterator[None]:
    """Without the progress bars and reports of a library that loads a model."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
