"""A checkpoint as a folder in Hugging Face's form, which transformers loads; tensor by tensor, in one process.

The folder gets its name when the files have been read again and give the checkpoint's logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ranvier.checkpoint import logits
from ranvier.checkpoint.new_folder import check_free, new_folder
from ranvier.checkpoint.saved import Saved, find
from ranvier.checkpoint.tensor_file import STORED, Slot, shards, write_tensors
from ranvier.data import tokenizer as tokenizers
from ranvier.errors import CheckpointError, DataError
from ranvier.models import gpt, hf
from ranvier.precision import DTYPES
from ranvier.run import Transformer

SHARD_BYTES = 1_000_000_000
TOKENIZER = "tokenizer.json"
Tell = Callable[[str], None]
"""Takes one line about what has been done."""
_model = TypeAdapter(Transformer)


def export(run: Path, out: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES,
           tokenizer: Path | None = None, tell: Tell = print) -> None:
    """Write the newest whole checkpoint of `run` (a run's folder, a folder of checkpoints, or one) to `out`.

    Args:
        dtype: number format of the files, by its name in a run; by default the checkpoint's own, of its fp32 master
            copies where it has them.
        shard_bytes: largest file of tensors, unless one tensor is larger.
        tokenizer: a tokenizer.json; by default the one that the run left in its folder.

    CheckpointError or DataError when that is not possible; nothing is left at `out` then.
    """
    check_free(out)
    saved = newest_whole(run, tell)
    try:
        source = Source(saved, dtype)
        slots = source.slots()
        with new_folder(out, sum(slot.size_bytes for slot in slots)) as folder:
            found = tokenizer or _beside(run, saved.folder)
            end = None if found is None else _write_tokenizer(folder, found, source.config)
            _write_config(folder, source, end)
            files = _write_weights(folder, source, shards(slots, shard_bytes))
            comparison = logits.compare(source.config, source.value, folder)
            logits.check(comparison, out)
            _tell(tell, source, files, found, comparison)
    finally:
        saved.close()


def newest_whole(path: Path, tell: Tell) -> Saved:
    """The newest checkpoint that `path` stands for whose files are as they were written. CheckpointError when there is
    none."""
    problems: list[CheckpointError] = []
    for folder in find(path):
        try:
            saved = Saved(folder)
            for problem in saved.damage():
                raise problem
        except CheckpointError as problem:
            problems.append(problem)
            continue
        for problem in problems:
            tell(f"left out: {problem.where}: {problem.what}")
        return saved
    raise problems[0] if problems else CheckpointError(
        "has no checkpoint", where=str(path), remedy="Name a run's folder, its folder of checkpoints, or one of them.")


class Source:
    """The parameters of a checkpoint of `ranvier train`, in the number format that the export has.

    CheckpointError when it is of a model that Hugging Face's GPT-2 is not.
    """

    def __init__(self, saved: Saved, dtype: str | None) -> None:
        self.saved = saved
        self.config = model_of(saved)
        kinds = saved.manifest.tensors
        parameters, masters = kinds.get("parameter", {}), kinds.get("master", {})
        if 12 * self.config.num_layers > len(parameters):
            raise _of_another_model(saved, f"has too few parameters for {self.config.num_layers} layers",
                                    len(parameters))
        self.names = {ours: there for ours, there in hf.names(self.config).items() if ours not in hf.TIED}
        for name in sorted(self.names.keys() ^ parameters.keys()):
            raise _of_another_model(saved, f"{'lacks the' if name in self.names else 'has a'} parameter {name}")
        self._kind = {name: "master" if name in masters else "parameter" for name in self.names}
        formats = set()
        for name, kind in self._kind.items():
            tensor = saved.tensor(kind, name)
            if tensor.shape != (wanted := hf.shape(name, self.config)):
                raise _of_another_model(saved, f"has a {kind} {name} of another shape than {wanted}", tensor.shape)
            if getattr(torch, tensor.dtype) not in STORED:
                raise _of_another_model(saved, f"has a {kind} {name} in {tensor.dtype}")
            formats.add(getattr(torch, tensor.dtype))
        self.dtype = DTYPES[dtype] if dtype else max(formats, key=lambda one: (one.itemsize, str(one)))
        self.rounds = bool(formats - {self.dtype, *_WITHIN.get(self.dtype, ())})
        """Whether numbers are rounded."""

    @property
    def has_masters(self) -> bool:
        return "master" in self._kind.values()

    def slots(self) -> list[Slot]:
        """The tensors of the export, in order."""
        return [Slot(name=there, dtype=self.dtype, shape=hf.shape_there(ours, self.config))
                for ours, there in self.names.items()]

    def exact(self, ours: str) -> Tensor:
        """One parameter as the checkpoint has it."""
        return self.saved.read(self._kind[ours], ours)

    def value(self, ours: str) -> Tensor:
        """One parameter. CheckpointError when a value is no finite number, as it is or in the export's format."""
        return finite(self.exact(ours).to(self.dtype), ours, self.saved.folder)


_WITHIN = {torch.float32: (torch.bfloat16, torch.float16),
           torch.float64: (torch.bfloat16, torch.float16, torch.float32)}
"""Formats that have every number of others."""


def finite(tensor: Tensor, name: str, where: Path) -> Tensor:
    """`tensor`. CheckpointError when an element of it is NaN or infinite."""
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"has a value that is no finite number in {str(tensor.dtype).removeprefix('torch.')}",
                              where=f"{name} in {where}",
                              remedy="Use an earlier checkpoint, or a number format with a wider range, such as fp32.")
    return tensor


def model_of(saved: Saved) -> Transformer:
    """The model's settings in the manifest. CheckpointError when there are none that can be."""
    run = saved.manifest.about.get("run")
    try:
        config = _model.validate_json(json.dumps(run.get("model") if isinstance(run, dict) else None), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, ("about", "run", "model", *first["loc"])))
        raise _of_another_model(saved, f"does not say which GPT it is of: {place}: {first['msg']}") from error
    for problem in gpt.problems(config):
        raise _of_another_model(saved, f"is of no possible GPT: {problem.where} {problem.what}", problem.value)
    return config


def _of_another_model(saved: Saved, what: str, value: object = None) -> CheckpointError:
    return CheckpointError(what, where=f"checkpoint {saved.folder}", value=value,
                           remedy="Only checkpoints of `ranvier train`, whose models are GPTs, can be exported.")


# --- files -----------------------------------------------------------------------------------------------------------


def _write_weights(folder: Path, source: Source, parts: list[list[Slot]]) -> list[str]:
    """model.safetensors, or numbered shards and their index. Returns their names."""
    ours = {there: name for name, there in source.names.items()}

    def tensors(part: list[Slot]) -> Iterator[Tensor]:
        for slot in part:
            yield hf.tensor_to_hf(ours[slot.name], source.value(ours[slot.name]), source.config)

    files = ["model.safetensors"] if len(parts) == 1 else [
        f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(files, parts, strict=True):
        write_tensors(folder / file, part, tensors(part))
    if len(parts) > 1:
        placed = {slot.name: file for file, part in zip(files, parts, strict=True) for slot in part}
        total = sum(slot.size_bytes for part in parts for slot in part)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})
    return files


def _write_config(folder: Path, source: Source, end: int | None) -> None:
    """config.json. end: the token that separates texts, where that is known."""
    dtype = str(source.dtype).removeprefix("torch.")  # under its old name and its new one
    _write_json(folder / "config.json", {**hf.gpt2_config(source.config), "bos_token_id": end, "eos_token_id": end,
                                         "torch_dtype": dtype, "dtype": dtype})


def _beside(run: Path, checkpoint: Path) -> Path | None:
    """The tokenizer that the run has left in its folder."""
    places = [run, *([checkpoint.parent.parent] if checkpoint.parent.name == "checkpoint" else [])]
    return next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)


def _write_tokenizer(folder: Path, path: Path, config: Transformer) -> int:
    """tokenizer.json and what transformers wants to know of it. Returns the number of the token that separates texts.

    DataError when it is none, or not one for this model.
    """
    tokenizer = tokenizers.load(path)
    if tokenizer.vocab > config.vocab:
        raise DataError(f"has more tokens than the model, whose vocabulary is {config.vocab}", where=str(path),
                        value=tokenizer.vocab, remedy="Name the run's own with --tokenizer.")
    shutil.copyfile(path, folder / TOKENIZER)
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.sequence,
        "bos_token": tokenizers.END_OF_TEXT, "eos_token": tokenizers.END_OF_TEXT, "unk_token": tokenizers.END_OF_TEXT,
        "clean_up_tokenization_spaces": False})
    return tokenizer.end


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _tell(tell: Tell, source: Source, files: list[str], tokenizer: Path | None,
          comparison: logits.Comparison) -> None:
    saved, config = source.saved, source.config
    name = next(name for name, dtype in DTYPES.items() if dtype is source.dtype)
    num_parameters = sum(slot.size_bytes for slot in source.slots()) // source.dtype.itemsize
    tell(f"{saved.folder}, step {saved.manifest.step}: {num_parameters:,} parameters in {name}"
         + (", from master copies" if source.has_masters else "")
         + f", in {len(files)} file{'s' if len(files) > 1 else ''}")
    tell(f"tokenizer: {tokenizer}" if tokenizer else
         f"without a tokenizer: the run's folder has no {TOKENIZER}; --tokenizer names one")
    logits.tell(comparison, tell)
    if source.rounds:
        ids = logits.token_ids(config)
        moved = (logits.logits(config, source.exact, ids) - logits.logits(config, source.value, ids)).abs().max()
        if moved:
            tell(f"rounding to {name} has changed logits by at most {float(moved):.2g}")
