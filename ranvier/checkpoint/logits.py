"""Whether two copies of a model compute the same: logits of a short text or an image, block by block where that saves
memory.

The other copy is transformers' where it is installed and fits into memory, since that is what a file in Hugging
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
from torch.nn import functional

from ranvier.checkpoint.pretrained import Pretrained
from ranvier.errors import CheckpointError
from ranvier.machine import available_memory_bytes
from ranvier.models import hf
from ranvier.models.block import Model, State
from ranvier.models.families import module_of
from ranvier.models.vit import CHANNELS
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
    """largest: difference of two logits; scale: their standard deviation over the vocabulary, or where there is none
    their root mean square; what: they are of; peer: who computed the others; note: why that was not transformers."""

    largest: float
    scale: float
    what: str
    peer: str
    note: str | None = None

    @property
    def is_equal(self) -> bool:
        return self.largest <= TOLERANCE * self.scale  # of NaN too

    def __str__(self) -> str:
        return (f"logits of {self.what} against {self.peer}: largest difference {self.largest:.2g}, their "
                f"scale being {self.scale:.2g}")


def inputs_of(config: Transformer) -> State:
    """A fixed text from all over the vocabulary; two of them, one padded, for BERT; two images for ViT."""
    if config.family == "vit":
        shape = (2, CHANNELS, config.image_size, config.image_size)
        return torch.sin(torch.arange(prod(shape)) * 0.7919 % 100).view(shape)
    length = min(_TOKENS, config.sequence)
    if config.family != "bert":
        return (torch.arange(length) * 7919 % config.vocab)[None]
    ids = (torch.arange(2 * length) * 7919 % config.vocab).view(2, length)
    place = torch.arange(length).expand(2, length)
    return {"ids": ids, "mask": (place < torch.tensor([[length], [(length + 1) // 2]])).long(),
            "types": (place >= length // 2).long()}


def in_words(config: Transformer) -> str:
    """What the logits are of."""
    if config.family == "vit":
        return "2 images"
    return "2 texts" if config.family == "bert" else f"{min(_TOKENS, config.sequence)} tokens"


@torch.no_grad()
def logits(config: Transformer, read: Read, inputs: State, head: str = "tokens") -> Tensor:
    """The output of the head in fp32, with one block in memory at a time; of GPT [batch, tokens, vocabulary]."""
    state, tied = inputs, hf.form_of(config).tied
    for name, build in _model(config, head).blocks.items():
        with torch.device("meta"):
            block = build()
        block.to_empty(device="cpu").eval()
        for inner, parameter in block.named_parameters():
            ours = f"{name}.{inner}"
            parameter.copy_(read(tied.get(ours, ours)))
        state = block(state)
    return state


def _model(config: Transformer, head: str) -> Model:
    return module_of("gpt" if config.family == "auto" else config.family).model(config, head)


def compare(config: Transformer, read: Read, folder: Path, *, head: str = "tokens",
            source: Pretrained | None = None) -> Comparison:
    """The logits of our parameters against those of the files in `folder`.

    source: build transformers' model from what was looked at in `folder`, and leave all else that may be there alone;
    what a head lacks there is then ours. By default transformers loads the folder as any user would.
    """
    inputs = inputs_of(config)
    ours = logits(config, read, inputs, head)
    theirs, peer, note = _theirs(config, head, read, folder, source, inputs)
    if head == "span":
        is_token = inputs["mask"].bool()
        ours, theirs = ours[is_token], theirs[is_token]
    scale = ours.std(-1).square().mean() if head == "tokens" else ours.square().mean()
    return Comparison(largest=float((ours - theirs).abs().max()), scale=float(scale.sqrt()), what=in_words(config),
                      peer=peer, note=note)


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


def _theirs(config: Transformer, head: str, read: Read, folder: Path, source: Pretrained | None,
            inputs: State) -> tuple[Tensor, str, str | None]:
    """The logits of the files in `folder`, who computed them, and why that was not transformers."""
    try:
        import transformers
    except ImportError:
        return _ours_again(folder, head, read, inputs), "Ranvier's own reading of the files", (
            "transformers is not installed")
    sizes = (prod(place.shape) for place in hf.form_of(config).places(config, head).values())
    needed = _SPARE_BYTES + _COPIES * 4 * sum(sizes)
    if (free := available_memory_bytes()) < needed:
        return (_ours_again(folder, head, read, inputs), "Ranvier's own reading of the files",
                f"transformers' model needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free")
    with _quiet(transformers), torch.no_grad():
        if source is None:
            kind = getattr(transformers, hf.form_of(config).class_of[head])
            model = kind.from_pretrained(folder, local_files_only=True)
        else:
            model = _built(transformers, source, head, read)
        found = _forward(model.float().eval(), inputs, head)
    if source is not None and source.form.write is None:  # features of the first token
        found = functional.linear(found, read("head.classifier.weight").float(), read("head.classifier.bias").float())
    return found, f"transformers {transformers.__version__}", None


def _built(transformers, source: Pretrained, head: str, read: Read):
    """transformers' model of a folder's settings and tensors, and of what it lacks of a head, which is ours."""
    kind = getattr(transformers, source.form.class_of[head])
    tensors = source.state_dict()
    if source.form.write is None:
        tensors = {name.removeprefix(source.form.prefix): tensor for name, tensor in tensors.items()}
    else:
        places = source.form.places(source.config, head)
        for ours in source.missing:
            tensors |= zip(places[ours].names, hf.tensors_there(places[ours], read(ours).float()), strict=True)
    return kind.from_pretrained(None, config=kind.config_class(**source.settings), state_dict=tensors)


def _forward(model, inputs: State, head: str) -> Tensor:
    if isinstance(inputs, Tensor):
        found = model(inputs)
        return found.last_hidden_state[:, 0] if "logits" not in found else found.logits
    found = model(input_ids=inputs["ids"], attention_mask=inputs["mask"], token_type_ids=inputs["types"])
    return torch.stack([found.start_logits, found.end_logits], -1) if head == "span" else found.logits


def _ours_again(folder: Path, head: str, read: Read, inputs: State) -> Tensor:
    found = Pretrained(folder)
    return logits(found.config, lambda ours: read(ours) if ours in found.missing else found.read(ours), inputs, head)


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
