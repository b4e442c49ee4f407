"""The language model in a run, a checkpoint, or a folder in Hugging Face's format, as an engine that computes forward.

Each rank reads the parameters of its own blocks, one tensor at a time, and keeps its part of each, so the mesh may be
another one than that of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ranvier.block import Initial
from ranvier.checkpoint import state
from ranvier.checkpoint.hf.export_model import TrainedSource, newest_whole, tokenizer_of
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.hf.source_check import check_source
from ranvier.checkpoint.hf.tokenizer_files import TOKENIZER
from ranvier.config.run import TensorParallel, Transformer
from ranvier.data.cache import user_cache_folder
from ranvier.data.offline.pretrained_models import local_path
from ranvier.errors import CheckpointError
from ranvier.layout import index_of, whole
from ranvier.mesh import Mesh
from ranvier.models.families import family_named
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.world import World

_SAMPLE_TOKENS = 128
"""Tokens of the sequence by whose costs blocks are assigned to stages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A decoder's settings and parameters.

    read: our name of a parameter -> its value, whole. tokenizer: its tokenizer.json, where there is one. origin: the
    folder that was read.
    """

    config: Transformer
    read: Callable[[str], Tensor]
    tokenizer: Path | None
    origin: Path

    @property
    def longest(self) -> int:
        """Tokens that the model can see at once."""
        return self.config.max_positions or self.config.sequence


def open_model(path: Path, tell: Callable[[str], None], *, ema: bool = False) -> LanguageModel:
    """The model at `path`: a run's folder (its newest complete checkpoint), a folder of checkpoints, a checkpoint, a
    folder in Hugging Face's format, a GGUF file, or a model's name. ema: the moving average of a checkpoint's
    parameters in their place. CheckpointError, ModelError or DataError where there is none, or it is no decoder."""
    path = local_path(path, tell)
    if (path / "config.json").is_file():
        if ema:
            raise no_averages(path)
        pretrained = Pretrained(path)
        own = path / TOKENIZER
        found = _of_decoder(pretrained.head, LanguageModel(
            config=pretrained.config, read=pretrained.read, tokenizer=own if own.is_file() else None, origin=path))
        check_source(pretrained, user_cache_folder(), tell)
        return found
    source = TrainedSource(newest_whole(path, tell), None, ema=ema)
    return _of_decoder(source.head, LanguageModel(config=source.config, read=source.exact,
                                                  tokenizer=tokenizer_of(path, source), origin=source.saved.folder))


def no_averages(path: Path) -> CheckpointError:
    """The error for a folder in Hugging Face's format of which moving averages are wanted."""
    return CheckpointError("has no moving average of the parameters: it is a folder in Hugging Face's format",
                           code="folder-without-ema", where=str(path),
                           remedy="Export it with `ranvier export --ema`, or leave `--ema` out.")


def _of_decoder(head: str, model: LanguageModel) -> LanguageModel:
    if head != "tokens":
        raise CheckpointError("is no language model", code="not-a-language-model", where=str(model.origin),
                              value=f"head {head!r}",
                              remedy="Name a run of the task lm or chat, or a folder of a GPT-2 or a Llama.")
    return model


def build_engine(model: LanguageModel, world: World, mesh: Mesh, *, tensor: TensorParallel, dtype: torch.dtype,
                 timeout_seconds: float = 300.0) -> Engine:
    """An engine with the model's parameters in `dtype`; it has no optimizer. Collective over the ranks of `world`."""
    blocks = family_named(model.config.family).model(model.config, "tokens", dtype=dtype)
    ids_BS = torch.zeros(1, min(model.longest, _SAMPLE_TOKENS), dtype=torch.int64)
    sample = Microbatch(inputs=ids_BS, targets=ids_BS, samples=torch.zeros(1, dtype=torch.int64))
    engine = Engine(replace(blocks, initial=lambda name: Initial("constant", 0.0)), world, mesh=mesh,
                    tensor=replace(tensor, sequence_sharding=False), dtype=dtype, sample=sample,
                    timeout_seconds=timeout_seconds, flags=True)
    for piece in state.pieces_held(engine):
        if piece.kind == "parameter":
            value = model.read(piece.name)
            piece.tensor.copy_(value[index_of(piece.box, whole(piece.shape))])
    return engine
