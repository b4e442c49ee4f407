"""Compares the logits of two copies of a model for a short text or an image, with one of our blocks in memory at a
time.

The other copy is transformers' model, for which files in Hugging Face's format are written, if transformers is
installed and the model fits into memory; otherwise the files are read again as our model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.block import State
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Transformer
from ranvier.errors import CheckpointError
from ranvier.models.any_transformers import quiet
from ranvier.models.families import family_named
from ranvier.models.vit import CHANNELS
from ranvier.system.machine import available_memory_bytes

TOLERANCE = 1e-3
"""Tolerance in standard deviations of the logits. Both models have equal weights and compute in fp32, so rounding gives
differences of about 1e-6, and a wrong weight gives differences of 0.1 and more."""
_TOKENS = 32
_COPIES = 2
"""Copies of the model in fp32 that transformers may have in memory while it loads one."""
_SPARE_BYTES = 1 << 29
_NOT_COMPUTED = frozenset({"architectures", "attn_implementation", "auto_map", "dtype", "model_type", "out_features",
                           "out_indices", "quantization_config", "stage_names", "torch_dtype", "transformers_version"})
"""Keys of config.json that are not passed to transformers: they choose code, kernels, number formats and outputs
between layers. All others are passed, including those that are not known here."""
Read = Callable[[str], Tensor]
"""Our parameter's name -> its value."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a comparison. largest: difference of two logits; scale: their standard deviation over the vocabulary,
    or their root mean square without a vocabulary; what: the inputs, in words; peer: the other model; note: why it is
    not transformers'."""

    largest: float
    scale: float
    what: str
    peer: str
    note: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the models compute the same; False if a logit is NaN."""
        return self.largest <= TOLERANCE * self.scale

    def __str__(self) -> str:
        return (f"logits of {self.what} against {self.peer}: largest difference {self.largest:.2g}, their "
                f"scale being {self.scale:.2g}")


def inputs_of(config: Transformer) -> State:
    """A fixed text with tokens of the full vocabulary; two texts, one padded, for BERT; two images for ViT."""
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


def describe_inputs(config: Transformer) -> str:
    """The inputs in words."""
    if config.family == "vit":
        return "2 images"
    return "2 texts" if config.family == "bert" else f"{min(_TOKENS, config.sequence)} tokens"


@torch.no_grad()
def logits(config: Transformer, read: Read, inputs: State, head: str = "tokens") -> Tensor:
    """The output of the head in fp32, with one block in memory at a time; for GPT [batch, tokens, vocabulary]."""
    state, tied = inputs, form_of(config).tied(config)
    family = family_named("gpt" if config.family == "auto" else config.family)
    for name, build in family.model(config, head, dtype=torch.float32).blocks.items():
        with torch.device("meta"):
            block = build()
        block = build().eval() if any(True for _ in block.buffers()) else block.to_empty(device="cpu").eval()
        for inner, parameter in block.named_parameters():
            ours = f"{name}.{inner}"
            parameter.copy_(read(tied.get(ours, ours)))
        state = block(state)
    assert isinstance(state, Tensor), "the heads of these families return one tensor"
    return state


def compare(config: Transformer, read: Read, folder: Path, *, head: str = "tokens",
            source: Pretrained | None = None) -> Comparison:
    """Compare the logits of our parameters with those of the files in `folder`.

    source: build transformers' model from config.json and the checked tensors in `folder`, and use no other files
    there; missing parts of a head are then ours. By default, transformers loads the folder as it does for any user.
    """
    inputs = inputs_of(config)
    ours = logits(config, read, inputs, head)
    theirs, peer, note = _theirs(config, head, read, folder, source, inputs)
    return comparison_of(config, head, ours, theirs, peer, note)


def comparison_of(config: Transformer, head: str, ours: Tensor, theirs: Tensor, peer: str, note: str | None = None
                  ) -> Comparison:
    """The difference of two models' outputs for `inputs_of(config)`."""
    inputs = inputs_of(config)
    if head == "span" and isinstance(inputs, dict):
        is_token = inputs["mask"].bool()
        ours, theirs = ours[is_token], theirs[is_token]
    scale = ours.std(-1).square().mean() if head == "tokens" else ours.square().mean()
    return Comparison(largest=float((ours - theirs).abs().max()), scale=float(scale.sqrt()),
                      what=describe_inputs(config), peer=peer, note=note)


def check(comparison: Comparison, where: Path) -> None:
    """CheckpointError if the logits differ or are NaN. where: of the new folder, for the error."""
    if not comparison.is_equal:
        raise CheckpointError(f"does not compute the same as its source: {comparison}. It was removed",
                              code="export-computes-otherwise", where=str(where),
                              remedy="Please report this, with the model's settings.")


def report(comparison: Comparison, line: Callable[[str], None]) -> None:
    """Report the peer and the result to `line`."""
    if comparison.note:
        line(f"{comparison.note}: compared with {comparison.peer}")
    line(str(comparison))


def _theirs(config: Transformer, head: str, read: Read, folder: Path, source: Pretrained | None,
            inputs: State) -> tuple[Tensor, str, str | None]:
    """(the logits of the files in `folder`, the model that computed them, why it is not transformers')."""
    def ours_again(note: str) -> tuple[Tensor, str, str]:
        found = Pretrained(folder)
        ours = logits(found.config, lambda name: read(name) if name in found.missing else found.read(name), inputs,
                      head)
        return ours, "Ranvier's own reading of the files", note

    try:
        import transformers
    except ImportError:
        return ours_again("transformers is not installed")
    needed = needed_bytes(place.shape for place in form_of(config).places(config, head).values())
    if (free := available_memory_bytes()) < needed and config.family != "transformers":  # which is already in memory
        return ours_again(f"transformers' model needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are "
                          "free")
    peer = f"transformers {transformers.__version__}"
    if source is not None:
        try:
            return source_logits(transformers, source, head, read), peer, None
        except Exception as error:  # any error of transformers, for settings of another version
            return ours_again(f"{peer} does not load the model ({first_line(error)})")
    with quiet(transformers), torch.no_grad():
        kind = getattr(transformers, form_of(config).class_of[head])
        model = kind.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
        found = _forward(model.eval(), inputs, head)
    return found, peer, None


def needed_bytes(shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes that transformers may need while it loads a model with parameters of these shapes."""
    return _SPARE_BYTES + _COPIES * 4 * sum(map(prod, shapes))


def source_logits(transformers: Any, source: Pretrained, head: str, read: Read,
                  change: Callable[[Any], Any] = lambda model: model) -> Tensor:
    """The logits of transformers' model of a folder; missing parts of a head are ours. change: returns another model to
    use instead, such as one with adapters. Draws none of this process's random numbers."""
    with quiet(transformers), torch.no_grad(), torch.random.fork_rng(devices=()):
        model = change(_build_peer(transformers, source, head, read).float().eval()).eval()
        found = _forward(model, inputs_of(source.config), head)
    if source.form.write is None and source.form.any_head:  # features of the first token
        found = functional.linear(found, read("head.classifier.weight").float(), read("head.classifier.bias").float())
    return found


def _build_peer(transformers: Any, source: Pretrained, head: str, read: Read) -> Any:
    """The model of transformers with the settings and tensors of a folder; missing parts of a head are ours."""
    kind = getattr(transformers, source.form.class_of[head])
    tensors = source.state_dict()
    if source.form.write is None and source.form.any_head:
        tensors = {name.removeprefix(source.form.prefix): tensor for name, tensor in tensors.items()}
    else:
        places = source.form.places(source.config, head)
        for ours in source.missing:
            tensors |= zip(places[ours].names, hf.tensors_there(places[ours], read(ours).float()), strict=True)
    settings = {key: value for key, value in source.document.items()
                if key not in _NOT_COMPUTED and not key.startswith("_") and not key.endswith("_token_id")}
    if source.form.family == "llama" or head == "tokens":  # Phi-3's default may be outside a cut vocabulary
        settings["pad_token_id"] = None
    return kind.from_pretrained(None, config=kind.config_class(**settings), state_dict=tensors,
                                attn_implementation="eager", local_files_only=True)


def _forward(model: Any, inputs: State, head: str) -> Tensor:
    """The logits of a model of transformers, or the scores of each token; for a model without a head, the features of
    the first token."""
    if hasattr(model, "score"):  # its forward returns only those of the last token
        scores: Tensor = model.score(model.base_model(inputs).last_hidden_state)
        return scores
    found = model(inputs) if isinstance(inputs, Tensor) else model(
        input_ids=inputs["ids"], attention_mask=inputs["mask"], token_type_ids=inputs["types"])
    if head == "span":
        return torch.stack([found.start_logits, found.end_logits], -1)
    result: Tensor = found.logits if "logits" in found else found.last_hidden_state[:, 0]
    return result


def first_line(error: Exception) -> str:
    """The first line of another package's error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
