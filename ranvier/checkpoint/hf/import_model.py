"""Import of a model in Hugging Face's format as a checkpoint to train from; tensor by tensor, in one process.

    OUT/
      checkpoint/step-0/    parameters, and fp32 master copies where they are in half precision; no optimizer state
      run.toml              a recipe with the model's settings: ranvier train OUT/run.toml --resume OUT
      tokenizer.json        the model's, which run.toml names; without one that can be read, training is refused until
                            the user puts it there
      generation_config.json, tokenizer_config.json, ...      of language models: as they are, for an export

OUT gets its name when the checkpoint has been read again and gives the logits of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import tomli_w
import torch
from torch import Tensor

from ranvier import __version__
from ranvier.checkpoint import files
from ranvier.checkpoint.files import check_free, new_folder
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf import logits
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.hf.source_check import check_equal, compare_source, value_of
from ranvier.checkpoint.hf.tokenizer_files import TOKENIZER, import_files_beside, import_tokenizer
from ranvier.checkpoint.manifest import File, Manifest, Saved, SavedTensor, step_folder
from ranvier.config import read
from ranvier.config.run import Data
from ranvier.data.cache import Progress
from ranvier.data.class_numbers import named_labels_in
from ranvier.data.tokenizer import GPT2_VOCAB
from ranvier.layout import whole
from ranvier.precision import DTYPES, is_half, wide
from ranvier.system.tensor_file import Slot, shards, write_tensors

PART_BYTES = 1_000_000_000
LEARNING_RATE = 1e-4
"""Learning rate of the recipe: the default is meant for weights that start from random values."""


def import_model(model: Path, out: Path, *, precision: str | None = None, part_bytes: int = PART_BYTES,
                 tell: Progress = print) -> dict[str, object]:
    """Write a checkpoint of the model in the folder `model` to `out`. Returns the settings to train it with, nested
    like a recipe. Parameters of a head that the folder does not have are initialised from the seed 0.

    Args:
        precision: number format of the parameters, by its name in a run; by default that of the files (fp32 if they
            have several). Half precision has fp32 master copies with the values of the files.
        part_bytes: size of the largest file of tensors, unless one tensor is larger.
        tell: takes one line about what was done.

    ModelError, CheckpointError or DataError if that is not possible; nothing is left at `out` then.
    """
    check_free(out)
    source = Pretrained(model)
    if precision is None:
        found = next(iter(source.dtypes)) if len(source.dtypes) == 1 else torch.float32
        precision = next(name for name, dtype in DTYPES.items() if dtype is found)
    slots = _slots(source, DTYPES[precision])
    with new_folder(out, sum(slot.size_bytes for slot in slots.values())) as folder:
        tokenizer = import_tokenizer(model, folder / TOKENIZER, source.config, tell)
        if source.config.family not in ("bert", "vit"):
            import_files_beside(model, folder, tell)
        recipe = _recipe(source, precision, out.absolute() / TOKENIZER, has_tokenizer=(folder / TOKENIZER).exists())
        (folder / "run.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
        labels = named_labels_in(model) if source.head == "classes" and not source.missing else ()
        about = {"run": recipe, "samples": 0, **({} if tokenizer is None else {"tokenizer": tokenizer}),
                 **({"labels": list(labels)} if labels else {})}
        _write_checkpoint(folder, source, slots, shards(list(slots.values()), part_bytes), about)
        saved = Saved(step_folder(folder / "checkpoint", 0))
        kind = "master" if is_half(DTYPES[precision]) else "parameter"
        comparison = logits.compare(source.config, lambda name: saved.read(kind, name), model, head=source.head,
                                    source=source)
        saved.close()
        logits.check(comparison, out)
        part = compare_source(source) if comparison.note else None  # which fits where the whole model does not
        if isinstance(part, logits.Comparison):
            check_equal(part, source.folder)
    _report(tell, source, slots, precision, out / TOKENIZER, comparison)
    if isinstance(part, logits.Comparison):
        tell(str(part))
    return recipe


def _slots(source: Pretrained, dtype: torch.dtype) -> dict[tuple[str, str], Slot]:
    """(kind, our name) -> the tensor to be written."""
    found = {}
    for name, place in form_of(source.config).places(source.config, source.head).items():
        for kind, its in [("parameter", dtype), *([("master", wide(dtype))] if is_half(dtype) else [])]:
            found[kind, name] = Slot(name=f"{kind}/{name}", dtype=its, shape=place.shape)
    return found


def _write_checkpoint(folder: Path, source: Pretrained, slots: dict[tuple[str, str], Slot], parts: list[list[Slot]],
                      about: dict[str, object]) -> None:
    """Write checkpoint/step-0."""
    temporary = files.temporary_folder(folder / "checkpoint", 0, "import")
    temporary.mkdir(parents=True)
    names = {slot.name: name for (_, name), slot in slots.items()}

    def tensors(part: list[Slot]) -> Iterator[Tensor]:
        for slot in part:
            yield hf.finite(value_of(source, names[slot.name]).to(slot.dtype), names[slot.name], source.folder)

    written = [File(name, *write_tensors(temporary / name, part, tensors(part)))
               for index, part in enumerate(parts) for name in [files.part_name(index)]]
    place = {slot.name: index for index, part in enumerate(parts) for slot in part}
    found: dict[str, dict[str, SavedTensor]] = {}
    for (kind, name), slot in slots.items():
        found.setdefault(kind, {})[name] = SavedTensor(
            dtype=str(slot.dtype).removeprefix("torch."), shape=slot.shape,
            pieces=((place[slot.name], slot.name, whole(slot.shape)),))
    files.publish(temporary, step_folder(folder / "checkpoint", 0), Manifest(
        step=0, optimizer_steps=0, loss_scale=None, frozen=(), files=tuple(written), tensors=found,
        about={**about, "versions": {"ranvier": __version__, "torch": metadata.version("torch")}}))


def _recipe(source: Pretrained, precision: str, tokenizer: Path, *, has_tokenizer: bool) -> dict[str, object]:
    """The settings for the model, nested like a recipe. A model of text is trained with its own tokenizer, at this
    path, and with no other: a new one would give its tokens other meanings."""
    model = {name: value for name, value in asdict(source.config).items() if value is not None}
    data: dict[str, object] = {"tokenizer": str(tokenizer)}
    if source.head == "tokens":
        data["corpus"] = Data.corpus
        if _is_gpt2(source) and not has_tokenizer:
            data["tokenizer"] = "gpt2"
    elif source.config.family == "vit":
        data = {"task": "images"}
    else:
        data["task"] = {"span": "qa", "score": "reward"}.get(source.head, "classification")
    return {"precision": precision, "model": model, "data": data, "train": {"learning_rate": LEARNING_RATE}}


def _is_gpt2(source: Pretrained) -> bool:
    """Whether the tokens of a model without a tokenizer are GPT-2's."""
    return source.config.family == "gpt" and source.config.vocab >= GPT2_VOCAB


def flags(recipe: dict[str, object]) -> list[str]:
    """The recipe as flags of `ranvier train`, in its order."""
    values = read.from_dict(recipe, "").values
    return [part for name, value in values.items() for part in (f"--{read.flag(name)}", read.as_text(value))]


def _report(tell: Progress, source: Pretrained, slots: dict[tuple[str, str], Slot], precision: str, tokenizer: Path,
            comparison: logits.Comparison) -> None:
    count = sum(slot.size_bytes // slot.dtype.itemsize for (kind, _), slot in slots.items() if kind == "parameter")
    tell(f"{source.folder}: {count:,} parameters in {precision}"
         + (", with fp32 master copies" if is_half(DTYPES[precision]) else "")
         + (", and its tokenizer" if tokenizer.exists() else ""))
    for note in source.notes:
        tell(f"config.json: {note}")
    for note in source.notes_on_tensors():
        tell(note)
    if not tokenizer.exists() and source.config.family != "vit":
        tell("no tokenizer of the model was found: " + (
            "training takes GPT-2's" if _is_gpt2(source) else f"put its tokenizer.json at {tokenizer} before training"))
    if source.head == "tokens":
        tell(f"run.toml trains on {Data.corpus}: name other text with --data.corpus")
    logits.tell(comparison, tell)
