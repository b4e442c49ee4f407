"""A model in Hugging Face's form as a checkpoint that training goes on from; tensor by tensor, in one process.

    OUT/
      checkpoint/step-0/    parameters, and fp32 master copies where they are in half precision; no optimizer state
      run.toml              a recipe with the model's settings: ranvier train OUT/run.toml --resume OUT
      tokenizer.json        the model's, which run.toml names; without one that can be read, training is refused until
                            somebody puts it there

OUT gets its name when the checkpoint has been read again and gives the model's logits.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import tomli_w
import torch
from torch import Tensor

from ranvier import __version__, resolve
from ranvier.checkpoint import files, logits
from ranvier.checkpoint.hf_export import TOKENIZER, Tell, finite, wordpiece_vocab
from ranvier.checkpoint.manifest import File, Manifest, SavedTensor, step_folder
from ranvier.checkpoint.new_folder import check_free, new_folder
from ranvier.checkpoint.pretrained import Pretrained, own_file
from ranvier.checkpoint.saved import Saved
from ranvier.checkpoint.tensor_file import Slot, shards, write_tensors
from ranvier.data import tokenizer as tokenizers
from ranvier.data import wordpiece
from ranvier.errors import DataError
from ranvier.layout import whole
from ranvier.models import families, hf
from ranvier.models.block import initialise
from ranvier.precision import DTYPES, is_half, wide
from ranvier.run import Data

PART_BYTES = 1_000_000_000
LEARNING_RATE = 1e-4
"""Of the recipe: the default is meant for weights that have learnt nothing yet."""


def import_model(model: Path, out: Path, *, precision: str | None = None, part_bytes: int = PART_BYTES,
                 tell: Tell = print) -> dict[str, object]:
    """Make a checkpoint at `out` of the model in the folder `model`. Returns the settings to train it with, nested like
    a recipe. What the folder lacks of a head starts from the seed 0.

    Args:
        precision: number format of the parameters, by its name in a run; by default the files' own (fp32 where they
            have several). Half precision has fp32 master copies with the numbers as the files have them.

    ModelError, CheckpointError or DataError when that is not possible; nothing is left at `out` then.
    """
    check_free(out)
    source = Pretrained(model)
    precision = precision or _format_of(source.dtypes)
    slots = _slots(source, DTYPES[precision])
    with new_folder(out, sum(slot.size_bytes for slot in slots.values())) as folder:
        tokenizer = _take_tokenizer(model, folder / TOKENIZER, source, tell)
        recipe = _recipe(source, precision, out.absolute() / TOKENIZER, has_tokenizer=(folder / TOKENIZER).exists())
        (folder / "run.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
        about = {"run": recipe, "samples": 0, **({} if tokenizer is None else {"tokenizer": tokenizer})}
        _write_checkpoint(folder, source, slots, shards(list(slots.values()), part_bytes), about)
        saved = Saved(step_folder(folder / "checkpoint", 0))
        kind = "master" if is_half(DTYPES[precision]) else "parameter"
        comparison = logits.compare(source.config, lambda name: saved.read(kind, name), model, head=source.head,
                                    source=source)
        saved.close()
        logits.check(comparison, out)
    _tell(tell, source, slots, precision, out / TOKENIZER, comparison)
    return recipe


def _format_of(dtypes: set[torch.dtype]) -> str:
    """The precision that is the files' own format, or fp32."""
    return next(name for name, dtype in DTYPES.items() if dtype is (
        next(iter(dtypes)) if len(dtypes) == 1 else torch.float32))


def _slots(source: Pretrained, dtype: torch.dtype) -> dict[tuple[str, str], Slot]:
    """(kind, our name) -> the tensor to be written."""
    found = {}
    for name, place in hf.form_of(source.config).places(source.config, source.head).items():
        for kind, its in [("parameter", dtype), *([("master", wide(dtype))] if is_half(dtype) else [])]:
            found[kind, name] = Slot(name=f"{kind}/{name}", dtype=its, shape=place.shape)
    return found


def _value(source: Pretrained, slot: Slot, name: str) -> Tensor:
    """One of our parameters, from the folder or where it lacks it from the seed 0."""
    if name not in source.missing:
        return source.read(name)
    values = torch.empty(slot.shape)
    initialise(values, name, families.module_of(source.config.family).initial(source.config, name), seed=0)
    return values


def _write_checkpoint(folder: Path, source: Pretrained, slots: dict[tuple[str, str], Slot], parts: list[list[Slot]],
                      about: dict[str, object]) -> None:
    """checkpoint/step-0."""
    temporary = files.temporary_folder(folder / "checkpoint", 0, "import")
    temporary.mkdir(parents=True)
    names = {slot.name: name for (_, name), slot in slots.items()}

    def tensors(part: list[Slot]) -> Iterator[Tensor]:
        for slot in part:
            yield finite(_value(source, slot, names[slot.name]).to(slot.dtype), names[slot.name], source.folder)

    written: list[File] = [write_tensors(temporary / files.part_name(index), part, tensors(part))
                           for index, part in enumerate(parts)]
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
    """The settings that go with the model, nested like a recipe's. A model of text is trained with its own tokenizer,
    at this path, and with no other: a new one would give its tokens other meanings."""
    told = {name: value for name, value in asdict(source.config).items() if value is not None}
    data: dict[str, object] = {"tokenizer": str(tokenizer)}
    if source.head == "tokens":
        data["corpus"] = Data.corpus
        if source.config.vocab >= tokenizers.GPT2_VOCAB and not has_tokenizer:
            data["tokenizer"] = "gpt2"
    elif source.config.family == "vit":
        data = {"task": "images"}
    else:
        data["task"] = "qa" if source.head == "span" else "classification"
    return {"precision": precision, "model": told, "data": data, "train": {"learning_rate": LEARNING_RATE}}


def _take_tokenizer(model: Path, path: Path, source: Pretrained, tell: Tell) -> str | None:
    """Write the model's tokenizer to `path`, where it has one that is for it. Returns its fingerprint, where training
    can read it."""
    if source.config.family == "vit":
        return None
    try:
        vocab, fingerprint = (_take_wordpiece if source.config.family == "bert" else _take_bpe)(model, path)
        if vocab <= source.config.vocab:
            return fingerprint
        tell(f"left out: {model / TOKENIZER} has more tokens than the model")
    except DataError as error:
        tell(f"left out: {error.where} {error.what}")
    path.unlink(missing_ok=True)
    return None


def _take_bpe(model: Path, path: Path) -> tuple[int, str | None]:
    """From tokenizer.json, or else vocab.json and merges.txt: how many tokens, and the fingerprint."""
    if (model / TOKENIZER).exists():
        tokenizer = tokenizers.load(shutil.copyfile(own_file(model, TOKENIZER), path))
    elif (model / "vocab.json").exists() and (model / "merges.txt").exists():
        files = [own_file(model, name) for name in ("vocab.json", "merges.txt")]
        tokenizer = tokenizers.from_merges(*(file.read_bytes() for file in files), model)
        tokenizer.save(path)
    else:
        return 0, None
    return tokenizer.vocab, tokenizer.fingerprint


def _take_wordpiece(model: Path, path: Path) -> tuple[int, str | None]:
    """The same, from tokenizer.json or else vocab.txt. A tokenizer.json that training cannot read goes along, too."""
    if (model / TOKENIZER).exists():
        vocab = wordpiece_vocab(shutil.copyfile(own_file(model, TOKENIZER), path))
        with suppress(DataError):
            return vocab, wordpiece.load(path).fingerprint
        return vocab, None
    if not (model / "vocab.txt").exists():
        return 0, None
    own_file(model, "vocab.txt")
    tokenizer = wordpiece.from_folder(model)
    tokenizer.save(path)
    return tokenizer.vocab, tokenizer.fingerprint


def flags(recipe: dict[str, object]) -> list[str]:
    """The recipe as flags of `ranvier train`, in its order."""
    values = resolve.from_dict(recipe, "").values
    return [part for name, value in values.items() for part in (f"--{resolve.flag(name)}", resolve.as_text(value))]


def _tell(tell: Tell, source: Pretrained, slots: dict[tuple[str, str], Slot], precision: str, tokenizer: Path,
          comparison: logits.Comparison) -> None:
    count = sum(slot.size_bytes // slot.dtype.itemsize for (kind, _), slot in slots.items() if kind == "parameter")
    tell(f"{source.folder}: {count:,} parameters in {precision}"
         + (", with fp32 master copies" if is_half(DTYPES[precision]) else "")
         + (", and its tokenizer" if tokenizer.exists() else ""))
    for note in source.notes:
        tell(f"config.json: {note}")
    for note in source.notes_on_tensors():
        tell(note)
    is_gpt2 = source.head == "tokens" and source.config.vocab >= tokenizers.GPT2_VOCAB
    if not tokenizer.exists() and source.config.family != "vit":
        tell("no tokenizer of the model was found: " + (
            "training takes GPT-2's" if is_gpt2 else f"put its tokenizer.json at {tokenizer} before training"))
    if source.head == "tokens":
        tell(f"run.toml trains on {Data.corpus}: name other text with --data.corpus")
    logits.tell(comparison, tell)
