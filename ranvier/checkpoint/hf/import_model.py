"""Import of a model in Hugging Face's format as a checkpoint to train from; tensor by tensor, in one process. The
second part of the module compares every kind of import with transformers.

    OUT/
      checkpoint/step-0/    parameters, and fp32 master copies where they are in half precision; no optimizer state
      run.toml              a recipe with the model's settings: ranvier train OUT/run.toml --resume OUT
      tokenizer.json        the model's, which run.toml names; without a readable one, training is refused until
                            the user puts it there
      generation_config.json, tokenizer_config.json, ...      of language models: unchanged, for an export

OUT gets its name when the checkpoint has been read again and gives the same logits as the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from ranvier import __version__
from ranvier.block import initialise
from ranvier.checkpoint import files
from ranvier.checkpoint.files import check_free, new_folder
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf import image_files, logits
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.peft import CONFIG as ADAPTERS
from ranvier.checkpoint.hf.peft import AdapterFolder, Module, adapters_of
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.hf.tokenizer_files import TOKENIZER, import_files_beside, import_tokenizer
from ranvier.checkpoint.manifest import File, Manifest, Saved, SavedTensor, step_folder
from ranvier.config import read
from ranvier.config.effects import warnings
from ranvier.config.resolve import resolve
from ranvier.config.run import Data, Transformer
from ranvier.data.cache import Progress, one_writer, publish_file
from ranvier.data.class_numbers import named_labels_in
from ranvier.data.tokenizer import GPT2_VOCAB
from ranvier.errors import CheckpointError, DataError, RanvierError
from ranvier.layout import whole_box
from ranvier.models.families import family_named
from ranvier.precision import DTYPES, is_half, wide
from ranvier.system.machine import available_memory_bytes
from ranvier.system.tensor_file import Slot, shards, write_tensors
from ranvier.system.untrusted_file import open_regular_file

PART_BYTES = 1_000_000_000
LEARNING_RATE = 1e-4
"""Learning rate of the recipe: the default is meant for random initial weights."""


def import_model(model: Path, out: Path, *, precision: str | None = None, part_bytes: int = PART_BYTES,
                 tell: Progress = print) -> dict[str, object]:
    """Write a checkpoint of the model in the folder `model` to `out`. Returns the settings to train it with, nested
    like a recipe. Parameters of a head that the folder does not have are initialised from the seed 0.

    Args:
        precision: number format of the parameters, by its name in a run; by default that of the files (fp32 if they
            have several). Half precision has fp32 master copies with the values of the files.
        part_bytes: size of the largest file of tensors, unless one tensor is larger.
        tell: takes one line about what was done.

    ModelError, CheckpointError or DataError if that is not possible; then nothing is left at `out`.
    """
    check_free(out)
    source = Pretrained(model)
    _check_without_adapters(model)
    if precision is None:
        found = next(iter(source.dtypes)) if len(source.dtypes) == 1 else torch.float32
        precision = next(name for name, dtype in DTYPES.items() if dtype is found)
    slots = _slots(source, DTYPES[precision])
    with new_folder(out, sum(slot.size_bytes for slot in slots.values())) as folder:
        tokenizer = import_tokenizer(model, folder / TOKENIZER, source.config, tell)
        if source.config.family == "vit":
            image_files.import_processor(model, folder)
        elif source.config.family != "bert":
            import_files_beside(model, folder, tell)
        recipe = _recipe(source, precision, out.absolute() / TOKENIZER, has_tokenizer=(folder / TOKENIZER).exists())
        (folder / "run.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
        labels = named_labels_in(model) if source.head == "classes" and not source.missing else ()
        about = {"run": recipe, "samples": 0, **({} if tokenizer is None else {"tokenizer": tokenizer}),
                 **({"labels": list(labels)} if labels else {}), "missing": list(source.missing)}
        _write_checkpoint(folder, source, slots, shards(list(slots.values()), part_bytes), about)
        saved = Saved(step_folder(folder / "checkpoint", 0))
        kind = "master" if is_half(DTYPES[precision]) else "parameter"
        comparison = logits.compare(source.config, lambda name: saved.read(kind, name), model, head=source.head,
                                    source=source)
        saved.close()
        logits.check(comparison, out)
        part = compare_source(source) if comparison.note else None  # which fits if the full model does not
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
            pieces=((place[slot.name], slot.name, whole_box(slot.shape)),))
    files.publish(temporary, step_folder(folder / "checkpoint", 0), Manifest(
        step=0, optimizer_steps=0, loss_scale=None, frozen=(), files=tuple(written), tensors=found,
        about={**about, "versions": {"ranvier": __version__, "torch": metadata.version("torch")}}))


def _recipe(source: Pretrained, precision: str, tokenizer: Path, *, has_tokenizer: bool) -> dict[str, object]:
    """The settings for the model, nested like a recipe, without defaults that have no effect. A text model is trained
    with its own tokenizer, at this path, and with no other: a new one would give its token numbers other meanings."""
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
    recipe = {"precision": precision, "model": model, "data": data, "train": {"learning_rate": LEARNING_RATE}}
    run = resolve(read.merge([read.from_dict(recipe, "run.toml")]).run)
    idle = {warning.where for warning in warnings(run, [f"model.{name}" for name in model])}
    return recipe | {"model": {name: value for name, value in model.items()
                               if read.flag(f"model.{name}") not in idle or value != getattr(Transformer, name)}}


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
    for note in (*source.notes_on_tensors(), *image_files.notes_on_images(source.folder)):
        tell(note)
    if not tokenizer.exists() and source.config.family != "vit":
        tell("no tokenizer of the model was found: " + (
            "training uses GPT-2's" if _is_gpt2(source) else f"put its tokenizer.json at {tokenizer} before training"))
    if source.head == "tokens":
        tell(f"run.toml trains on {Data.corpus}: name other text with --data.corpus")
    logits.report(comparison, tell)


# --- logits against transformers and PEFT -----------------------------------------------------------------------------

# Checks, for every kind of import, that our model of a folder computes what transformers and PEFT compute.
#
#     ranvier import, --model.pretrained, generate, evaluate    check_source      config.json and tensors
#     --lora.adapters                                           check_adapters    adapters on the model of the run
# A setting that is known there but not here may change the result unnoticed. transformers therefore gets all settings
# of config.json that could change it, and the logits of 32 tokens are compared. Effects beyond them, such as of a
# sliding window, are not detected. A folder with the same content is compared only once.
# The comparison uses at most `MOST_BYTES`, and half of the free memory. Of a model that needs more, the first layers
# and tokens are compared; if one layer needs more, or the packages are missing, it is not compared. Both are reported
# in one line.


MOST_BYTES = 8 << 30
"""Host memory of a comparison: the layers of a Llama of 70 billion parameters need 7 GB each."""
FEW_TOKENS = 4096
"""Tokens of the vocabulary of a model that is compared in part."""
_HASHED_BYTES = 1 << 26
"""Files up to this size are identified by their content, larger ones by size and time of the last change."""
_NAMES_AND_PLACES = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "megatron_core", "modules_to_save", "peft_type", "peft_version", "revision",
    "runtime_config", "target_modules", "task_type"})
"""Keys of adapter_config.json that are not passed to PEFT: the names of the tensors define which modules have
adapters."""


def check_source(source: Pretrained, cache: Path, tell: Progress, adapters: Path | None = None) -> None:
    """Compare the logits of a folder's model with those of transformers, unless that has been done; `tell` takes a line
    about it. CheckpointError if they differ, and for a folder with adapters that are not the run's."""
    if adapters is None or adapters.expanduser().resolve() != source.folder.resolve():
        _check_without_adapters(source.folder)
    _compare_once(source, None, cache, tell, lambda: compare_source(source))


def _check_without_adapters(folder: Path) -> None:
    if (folder / ADAPTERS).exists():
        raise CheckpointError(f"has adapters ({ADAPTERS}) next to the weights of its model, with which transformers "
                              "loads it", code="pretrained-with-adapters", where=f"model {folder}",
                              remedy="Move them into a separate folder, or train them with `--lora.adapters`.")


def check_adapters(base: Pretrained | None, adapters: AdapterFolder, config: Transformer, head: str, cache: Path,
                   tell: Progress) -> None:
    """Compare adapters on a base model with PEFT in the same way. config, head: of the run's model."""
    if base is None:
        tell(f"adapters {adapters.folder}: not compared with PEFT, since model.pretrained names no base model")
    else:
        _compare_once(base, adapters, cache, tell, lambda: compare_adapters(base, adapters, config, head))


def check_equal(comparison: logits.Comparison, folder: Path) -> None:
    """CheckpointError if our logits of a folder's model differ. folder: for the error."""
    if not comparison.is_equal:
        raise CheckpointError(f"has other logits in Ranvier than in transformers or PEFT: {comparison}",
                              code="source-computes-otherwise", where=str(folder), value=comparison.largest,
                              remedy="Please report this, with its config.json or adapter_config.json. `pip install -U "
                                     "transformers peft` may help, if they are older than the folder.")


def compare_source(source: Pretrained) -> logits.Comparison | str:
    """The comparison of a folder's model with transformers', in part if it is large; or why it was not compared."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    part = _part(source)
    return part if isinstance(part, str) else _compare(
        transformers, part, partial(value_of, part), f"transformers {transformers.__version__}", "it")


def _compare(transformers: Any, part: Pretrained, read: logits.Read, peer: str, what: str,
             change: Callable[[Any], Any] = lambda model: model) -> logits.Comparison | str:
    """The comparison of our parameters with transformers' model of `part`, which `change` changes; or why they were not
    compared. what: the thing that `peer` loads, in words."""
    try:
        theirs = logits.source_logits(transformers, part, part.head, partial(value_of, part), change)
    except RanvierError:  # of a folder
        raise
    except Exception as error:  # any error of the packages, for settings of another version
        return f"{peer} does not load {what} ({logits.first_line(error)})"
    ours = logits.logits(part.config, read, logits.inputs_of(part.config), part.head)
    if not any(torch.isfinite(one).all() for one in (ours, theirs)):  # the error for the parameters is more precise
        return "logits are NaN or infinite on both sides"
    return logits.comparison_of(part.config, part.head, ours, theirs, peer)


def compare_adapters(base: Pretrained, adapters: AdapterFolder, config: Transformer, head: str
                     ) -> logits.Comparison | str:
    """The comparison of adapters on a base model with PEFT's; or why they were not compared. config, head: of the run's
    model."""
    try:
        import peft
        import transformers
    except ImportError as error:
        return f"{error.name} is not installed"
    part = _part(base)
    if isinstance(part, str) or base.form.write is None:
        return part if isinstance(part, str) else f"a {base.form.title} with adapters has no form there"
    places, _ = adapters.places(config, head)
    inside = {ours: place for ours, place in places.items() if place[0].weight in part.places}
    if not inside:
        return f"the first {part.config.num_layers} layers, which fit into memory, have no adapters"
    merged = adapters_of(adapters, config, head, part.read).merged
    return _compare(transformers, part, lambda name: merged(name, value_of(part, name)), f"peft {peft.__version__}",
                    "them", lambda model: _peft_model(peft, model, adapters, inside))


def _peft_model(peft: Any, model: Any, adapters: AdapterFolder, places: dict[str, tuple[Module, str, str]]) -> Any:
    """transformers' model with PEFT's adapters at these places."""
    known = {field.name for field in fields(peft.LoraConfig)} - _NAMES_AND_PLACES
    settings = {key: value for key, value in adapters.document.items() if key in known and value is not None}
    config = peft.LoraConfig(**settings, target_modules=sorted({module.name for module, _, _ in places.values()}))
    found = peft.get_peft_model(model, config)
    result = peft.set_peft_model_state_dict(found, {theirs: adapters.read(theirs) for _, _, theirs in places.values()})
    if result.unexpected_keys:
        raise ValueError(f"no place for {result.unexpected_keys[0]}")
    return found.base_model.model


def value_of(source: Pretrained, name: str) -> Tensor:
    """One of our parameters; if the folder does not have it, it is initialised from the seed 0."""
    if name not in source.missing:
        return source.read(name)
    config, head = source.config, source.head
    values = torch.empty(form_of(config).places(config, head)[name].shape)
    initial = family_named(config.family).model(config, head, dtype=torch.float32).initial
    assert initial is not None, "families that can be imported say how each parameter is initialised"
    initialise(values, name, initial(name), seed=0)
    return values


def _part(source: Pretrained) -> Pretrained | str:
    """The model, or as many of its first layers as fit into memory with a few tokens; or why not even one layer
    does."""
    most = min(MOST_BYTES, available_memory_bytes() // 2)

    def needed(part: Pretrained) -> int:
        return logits.needed_bytes(place.shape for place in part.places.values())

    if needed(source) <= most:
        return source
    tokens = min(source.config.vocab, FEW_TOKENS)
    counts = range(source.config.num_layers, 0, -1)
    part = next((part for part in (source.part(layers, tokens) for layers in counts) if needed(part) <= most), None)
    return part or (f"the first layer needs {needed(source.part(1, tokens)) / 2**30:.1f} GiB of memory, and "
                    f"at most {most / 2**30:.1f} are used")


# --- once ------------------------------------------------------------------------------------------------------------


def _compare_once(source: Pretrained, adapters: AdapterFolder | None, cache: Path, tell: Progress,
                  compare: Callable[[], logits.Comparison | str]) -> None:
    """Compare unless the cache records that it was done; one process compares, and the others wait for it."""
    folder = source.folder if adapters is None else adapters.folder
    path = cache / "compared" / _key([source.folder, *([adapters.folder] if adapters else [])])
    if _exists(path):
        return
    with ExitStack() as lock:
        writable = True
        try:
            lock.enter_context(one_writer(path, tell))
        except DataError:  # a cache that cannot be written: compared each time
            writable = False
        if _exists(path):
            return
        comparison = compare()
        if isinstance(comparison, str):
            tell(f"{folder}: not compared with {'PEFT' if adapters else 'transformers'}: {comparison}")
            return
        check_equal(comparison, folder)
        tell(str(comparison))
        if writable:
            with publish_file(path) as file:
                file.write(f"{comparison}\n".encode())


def _exists(path: Path) -> bool:
    """Whether a file exists that no other user can have written."""
    try:
        open_regular_file(path, unshared=True).close()
    except OSError:
        return False
    return True


def _key(folders: list[Path]) -> str:
    """Key of the comparison of these folders: their files and the packages."""
    found = hashlib.blake2b(digest_size=16)
    versions = [__version__]
    for package in ("transformers", "peft", "torch"):
        try:
            versions.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            versions.append("none")
    found.update(repr(versions).encode())
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".safetensors", ".bin") and path.is_file():
                found.update(repr(_content(path)).encode())
    return found.hexdigest()


def _content(path: Path) -> tuple[object, ...]:
    with open_regular_file(path) as file:
        size, changed = (seen := path.stat()).st_size, seen.st_mtime_ns
        if size > _HASHED_BYTES:
            return path.name, size, changed
        return path.name, hashlib.blake2b(file.read(_HASHED_BYTES)).hexdigest()
