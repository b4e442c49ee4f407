"""A checkpoint as a folder in Hugging Face's form, which transformers loads; tensor by tensor, in one process.

The folder gets its name when the files have been read again and give the checkpoint's logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from torch import Tensor

from ranvier.checkpoint import logits
from ranvier.checkpoint.new_folder import check_free, new_folder
from ranvier.checkpoint.saved import Saved, find
from ranvier.checkpoint.tensor_file import STORED, Slot, shards, write_tensors
from ranvier.data import tokenizer as tokenizers
from ranvier.errors import CheckpointError, DataError
from ranvier.models import families, hf
from ranvier.precision import DTYPES
from ranvier.run import Run, Transformer

SHARD_BYTES = 1_000_000_000
TOKENIZER = "tokenizer.json"
Tell = Callable[[str], None]
"""Takes one line about what has been done."""
_PARAMETERS_OF_LAYER = 12
_run = TypeAdapter(Run)


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
            found = tokenizer or (_beside(run, saved.folder) if source.config.family != "vit" else None)
            end = None if found is None else _write_tokenizer(folder, found, source.config)
            _write_config(folder, source, end)
            files = _write_weights(folder, source, shards(slots, shard_bytes))
            comparison = logits.compare(source.config, source.value, folder, head=source.head)
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

    config: settings; head: what it gives; form: Hugging Face's names and layout of it. CheckpointError when it is of a
    model that no form here has.
    """

    def __init__(self, saved: Saved, dtype: str | None) -> None:
        self.saved = saved
        self.config, self.head = model_of(saved)
        self.form = hf.form_of(self.config)
        kinds = saved.manifest.tensors
        parameters, masters = kinds.get("parameter", {}), kinds.get("master", {})
        if _PARAMETERS_OF_LAYER * self.config.num_layers > len(parameters):
            raise _of_another_model(saved, f"has too few parameters for {self.config.num_layers} layers",
                                    len(parameters))
        self.places = self.form.places(self.config, self.head)
        for name in sorted(self.places.keys() ^ parameters.keys()):
            raise _of_another_model(saved, f"{'lacks the' if name in self.places else 'has a'} parameter {name}")
        self._kind = {name: "master" if name in masters else "parameter" for name in self.places}
        formats = set()
        for name, kind in self._kind.items():
            tensor = saved.tensor(kind, name)
            if tensor.shape != (wanted := self.places[name].shape):
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
        return [Slot(name=name, dtype=self.dtype, shape=shape) for place in self.places.values()
                for name, shape in zip(place.names, place.shapes, strict=True)]

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


def model_of(saved: Saved) -> tuple[Transformer, str]:
    """The model's settings in the manifest, with its family, and the head that its task has. CheckpointError when there
    are none that can be."""
    run = saved.manifest.about.get("run")
    try:
        found = _run.validate_json(json.dumps({key: run[key] for key in ("model", "data") if key in run}
                                              if isinstance(run, dict) and "model" in run else None), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, ("about", "run", *(first["loc"] or ("model",)))))
        raise _of_another_model(saved, f"does not say which model it is of: {place}: {first['msg']}") from error
    for problem in families.problems(found):
        raise _of_another_model(saved, f"is of no possible model: {problem.where} {problem.what}", problem.value)
    config = replace(found.model, family=families.family_of(found))
    classifier = saved.manifest.tensors.get("parameter", {}).get("head.classifier.bias")
    if config.num_classes == "auto" and classifier is not None and len(classifier.shape) == 1 and classifier.shape[0]:
        config = replace(config, num_classes=classifier.shape[0])
    return config, families.head_of(found.data.task)


def _of_another_model(saved: Saved, what: str, value: object = None) -> CheckpointError:
    return CheckpointError(what, where=f"checkpoint {saved.folder}", value=value,
                           remedy="Only checkpoints of `ranvier train`, whose models are GPTs, BERTs and ViTs, can be "
                                  "exported.")


# --- files -----------------------------------------------------------------------------------------------------------


def _write_weights(folder: Path, source: Source, parts: list[list[Slot]]) -> list[str]:
    """model.safetensors, or numbered shards and their index. Returns their names."""
    ours = {there: (name, number) for name, place in source.places.items() for number, there in enumerate(place.names)}

    def tensors(part: list[Slot]) -> Iterator[Tensor]:
        for slot in part:
            name, number = ours[slot.name]
            yield hf.tensors_there(source.places[name], source.value(name))[number]

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
    ends = {"bos_token_id": end, "eos_token_id": end} if source.head == "tokens" else {}
    _write_json(folder / "config.json", {**source.form.write(source.config, source.head), **_labels(source), **ends,
                                         "torch_dtype": dtype, "dtype": dtype})


def _labels(source: Source) -> dict[str, object]:
    """Names of classes, where the run has written them into its checkpoints."""
    names, classes = source.saved.manifest.about.get("labels"), source.config.num_classes
    if source.head != "classes" or not isinstance(names, (list, tuple)) or len(names) != classes or not all(
            isinstance(name, str) for name in names):
        return {}
    return {"id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)}}


def _beside(run: Path, checkpoint: Path) -> Path | None:
    """The tokenizer that the run has left in its folder."""
    places = [run, *([checkpoint.parent.parent] if checkpoint.parent.name == "checkpoint" else [])]
    return next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)


def _write_tokenizer(folder: Path, path: Path, config: Transformer) -> int | None:
    """tokenizer.json and what transformers wants to know of it. Returns the number of the token that separates GPT's
    texts.

    DataError when it is none, or not one for this model.
    """
    if config.family == "bert":
        return _write_wordpiece(folder, path, config)
    tokenizer = tokenizers.load(path)
    _check_vocabulary(path, tokenizer.vocab, config)
    shutil.copyfile(path, folder / TOKENIZER)
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.sequence,
        "bos_token": tokenizers.END_OF_TEXT, "eos_token": tokenizers.END_OF_TEXT, "unk_token": tokenizers.END_OF_TEXT,
        "clean_up_tokenization_spaces": False})
    return tokenizer.end


def _write_wordpiece(folder: Path, path: Path, config: Transformer) -> None:
    """The tokenizer.json of a BERT; its tokens that separate texts are in it."""
    _check_vocabulary(path, wordpiece_vocab(path), config)
    shutil.copyfile(path, folder / TOKENIZER)
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.sequence, "cls_token": "[CLS]",
        "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"})


def wordpiece_vocab(path: Path) -> int:
    """Tokens of a tokenizer.json. DataError when it is none."""
    try:
        return Tokenizer.from_file(str(path)).get_vocab_size()
    except Exception as error:  # the library raises nothing more precise
        raise DataError("is no tokenizer", where=str(path), value=str(error).partition("\n")[0],
                        remedy="Name the run's own with --tokenizer.") from error


def _check_vocabulary(path: Path, vocab: int, config: Transformer) -> None:
    if vocab > config.vocab:
        raise DataError(f"has more tokens than the model, whose vocabulary is {config.vocab}", where=str(path),
                        value=vocab, remedy="Name the run's own with --tokenizer.")


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
    if config.family != "vit":
        tell(f"tokenizer: {tokenizer}" if tokenizer else
             f"without a tokenizer: the run's folder has no {TOKENIZER}; --tokenizer names one")
    logits.tell(comparison, tell)
    if source.rounds:
        inputs = logits.inputs_of(config)
        exact, rounded = (logits.logits(config, read, inputs, source.head) for read in (source.exact, source.value))
        moved = (exact - rounded).abs().max()
        if moved:
            tell(f"rounding to {name} has changed logits by at most {float(moved):.2g}")
