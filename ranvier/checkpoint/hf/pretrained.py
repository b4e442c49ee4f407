"""A model in Hugging Face's format on disk, read as untrusted input: config.json and the files of tensors.

    config.json
    model.safetensors | model.safetensors.index.json and the files it names | pytorch_model.bin, without unpickling

Everything is checked before it is used: the files must have exactly the tensors that config.json requires, with their
shapes.
"""

from __future__ import annotations

import copy
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf.forms import form_of, form_of_type
from ranvier.data.offline.pretrained_models import WEIGHTS
from ranvier.errors import CheckpointError
from ranvier.system.tensor_file import STORED
from ranvier.system.untrusted_file import member, read_json

_CONFIG_BYTES = 1 << 20
_INDEX_BYTES = 1 << 27
_FORMATS = {name: dtype for dtype, name in STORED.items()}
_ROWS_BYTES = 1 << 24
_OTHER_CLASSIFIERS = ("ForTokenClassification", "ForMultipleChoice")
"""Suffixes of classes whose classifier has the same name as a classifier of full texts."""
_SHARED = ("lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
"""Tied tensors, which old files list a second time, sharing their values."""


class Tensors(Protocol):
    """Named tensors on disk."""

    def heads(self) -> Mapping[str, tuple[torch.dtype | str, tuple[int, ...]]]:
        """Name -> (dtype, or its name in the file if parameters cannot have it; shape)."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows."""


class PretrainedConfig:
    """The config.json in `folder`. ModelError or CheckpointError if it is damaged, or of a model that we do not
    support.

    Attributes:
        form: its names and layout.
        config: its settings, with the family.
        head: the one that config.json names, or the form's first.
        notes: on training options that the settings leave out.
        document: the content of config.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document = document = own_json(folder, "config.json", _CONFIG_BYTES)
        self.form = form_of_type(document.get("model_type"))
        self.config, self.notes = self.form.read(document)
        self.head = _head(self.form, document)


class Pretrained(PretrainedConfig):
    """The model in `folder`. ModelError or CheckpointError if it is damaged, or not supported.

    Attributes:
        missing: our parameters that it does not have, all of the head.
        left_out: its tensors of other heads.
        dtypes: of its tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._tensors = _open(folder)
        heads = self._tensors.heads()
        if self.form.per_layer * self.config.num_layers > len(heads):
            raise self._error("pretrained-too-few-tensors",
                              f"has too few tensors for {self.form.layers_key} {self.config.num_layers}", len(heads))
        is_other = any(name.endswith(_OTHER_CLASSIFIERS) for name in _class_names(self.document))
        others = ("head.classifier.",) if is_other else ()
        self.places = {ours: place for ours, place in self.form.places(self.config, self.head).items()
                       if not ours.startswith(others)
                       and (not self.form.any_head or _is_needed(ours, place, heads, self.form.prefix))}
        self._called = self._names_of_files(heads)
        self._rows: dict[str, int] = {}
        self._check(heads)
        self.missing = tuple(ours for ours in form_of(self.config).places(self.config, self.head)
                             if ours not in self.places)
        if not self.places.keys() & hf.CLASSIFIERS:
            self.config = replace(self.config, num_classes="auto")
        self.dtypes = {dtype for name in self._called.values() if isinstance(dtype := heads[name][0], torch.dtype)}

    def read(self, ours: str) -> Tensor:
        """The parameter `ours`, in our layout and the number format of the file."""
        place = self.places[self.form.tied(self.config).get(ours, ours)]
        return hf.tensor_here(place, [self._tensor(name) for name in place.names])

    def part(self, layers: int, vocab: int) -> Pretrained:
        """The model cut to its first `layers` layers and its first `vocab` tokens."""
        found = copy.copy(self)
        found.config = replace(self.config, num_layers=layers, vocab=vocab)
        found.document = {**self.document, self.form.layers_key: layers} | (
            {"vocab_size": vocab} if "vocab_size" in self.document else {}) | {
            key: kinds[:layers] for key in ("layer_types", "no_rope_layers")
            if isinstance(kinds := self.document.get(key), list)}
        found.places = {ours: place for ours, place in self.form.places(found.config, self.head).items()
                        if ours in self.places}
        found._rows = {name: shape[0] for ours, place in found.places.items()
                       for name, shape, whole in zip(place.names, place.shapes, self.places[ours].shapes, strict=True)
                       if shape != whole}
        return found

    def _tensor(self, name: str) -> Tensor:
        """A tensor under Hugging Face's full name; for a cut model, only its rows."""
        rows = self._rows.get(name)
        return self._tensors.read(self._called[name], None if rows is None else slice(0, rows))

    def notes_on_tensors(self) -> list[str]:
        """Notes for the user on the head and the weights."""
        found = []
        if self.left_out:
            found.append(f"left out: {len(self.left_out)} tensors of other heads ({', '.join(self.left_out[:3])}"
                         f"{', ...' if len(self.left_out) > 3 else ''})")
        if self.missing:
            found.append(f"not in the files, so initialised from the seed: {', '.join(self.missing)}")
        return found + self.notes_on_quantization()

    def notes_on_quantization(self) -> list[str]:
        """A note for the user on weights that only config.json describes as quantized: others are refused."""
        return ["config.json has a quantization_config, with which transformers would read the weights as quantized: "
                "they are not, and are used as they are"] if self.document.get("quantization_config") else []

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors for transformers: with its names and layout, in fp32."""
        return {name: self._tensor(name).float() for place in self.places.values() for name in place.names}

    def _names_of_files(self, heads: Mapping[str, object]) -> dict[str, str]:
        """Hugging Face's full names -> names in the files, which may lack the prefix, or be old names."""
        prefix = self.form.prefix
        if any(name.startswith(prefix) for name in heads):
            prefix = ""
        found = {}
        for place in self.places.values():
            for name in place.names:
                found[name] = called = name.removeprefix(prefix)
                if called not in heads and _old(called) in heads:
                    found[name] = _old(called)
        return found

    def _check(self, heads: Mapping[str, tuple[torch.dtype | str, tuple[int, ...]]]) -> None:
        for place in self.places.values():
            for theirs, wanted in zip(place.names, place.shapes, strict=True):
                name = self._called[theirs]
                if name not in heads:
                    raise self._error("pretrained-tensor-missing", f"has no tensor {name}")
                dtype, shape = heads[name]
                if shape != wanted:
                    raise self._error("pretrained-tensor-shape",
                                      f"has a tensor {name} of another shape than config.json's {wanted}", shape)
                if dtype not in STORED:
                    raise self._error("pretrained-number-format",
                                      f"has a tensor {name} in a number format that parameters do not have", str(dtype))
        tied = [("lm_head.weight", owner) for owner in self.form.tied(self.config).values()]
        known = {*self._called.values(), *(end for end, _ in tied)}
        more = [name for name in heads if name not in known and not re.fullmatch(self.form.aside, name)]
        self.left_out = tuple(name for name in more if self.form.any_head and self._is_of_a_head(name, heads))
        if len(more) > len(self.left_out):
            name = next(name for name in more if name not in self.left_out)
            raise self._error("pretrained-unknown-tensors",
                              f"has {len(more) - len(self.left_out)} tensors that {self.form.title} does not have, "
                              f"{name} among them")
        for end, owner in tied:
            if end in heads:
                self._check_tied(heads, end, self._called[self.places[owner].names[0]])

    def _is_of_a_head(self, name: str, heads: Mapping[str, object]) -> bool:
        """Whether a tensor is outside the base model, which all heads share."""
        prefix = self.form.prefix
        if name.removeprefix(prefix).startswith("pooler."):
            return True
        if any(other.startswith(prefix) for other in heads):
            return not name.startswith(prefix)
        return name.partition(".")[0] not in ("embeddings", "encoder", "layernorm")

    def _check_tied(self, heads: Mapping[str, tuple[torch.dtype | str, tuple[int, ...]]], end: str, owner: str) -> None:
        """Check that a tied head in the files equals the token embedding."""
        rows = max(1, _ROWS_BYTES // (8 * self.config.hidden))
        if heads[end] != heads[owner] or not all(
                torch.equal(self._tensors.read(end, part), self._tensors.read(owner, part))
                for start in range(0, self.config.vocab, rows) for part in [slice(start, start + rows)]):
            raise self._error("pretrained-head-untied",
                              f"has a head ({end}) that is not its token embedding ({owner}), and config.json does not "
                              "say so: tie_word_embeddings is not false")

    def _error(self, code: str, what: str, value: object = None) -> CheckpointError:
        """Of a quantized model the files have other tensors, formats and shapes."""
        quantized: Any = self.document.get("quantization_config")
        if not quantized:
            return _folder_error(code, self.folder, what, value)
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        return _folder_error(code, self.folder, f"is quantized ({method}), which is not supported: it {what}", value,
                             "Name the model that was quantized, or dequantize it with transformers and save it.")


def _class_names(document: Mapping[str, object]) -> list[str]:
    """The classes of transformers that config.json names."""
    named = document.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _head(form: hf.Form, document: Mapping[str, object]) -> str:
    """The head that config.json names, or the form's first."""
    named = _class_names(document)
    found = [head for head, kind in form.class_of.items() if kind in named] or [next(iter(form.class_of))]
    if len(found) > 1:  # a decoder's "classes" and "score" are the same class there
        return found[hf.num_labels(document) == 1]
    return found[0]


def _is_needed(ours: str, place: hf.TensorMapping, heads: Mapping[str, object], prefix: str) -> bool:
    """Whether the files must have a parameter: False for a part of a head that they lack."""
    if not ours.startswith("head.") or ours.startswith("head.norm."):
        return True
    stem = place.names[0].rpartition(".")[0]
    return any(f"{one}.{kind}" in heads for one in (stem, stem.removeprefix(prefix)) for kind in ("weight", "bias"))


def _old(name: str) -> str:
    """The name of a norm's parameter in BERT's first files."""
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        name = name.removesuffix(new) + old if name.endswith(new) else name
    return name


def _folder_error(code: str, folder: Path, what: str, value: object = None,
                  remedy: str = "Name a folder with a complete model, as save_pretrained writes it."
                  ) -> CheckpointError:
    return CheckpointError(what, code=code, where=f"model {folder}", value=value, remedy=remedy)


def own_file(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. CheckpointError when it is missing, is not a regular file, or is a link to
    elsewhere; links may point to the blobs of Hugging Face's own cache, which its snapshots consist of."""
    try:
        return member(folder, name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _folder_error("pretrained-file-missing", folder, f"has no file {name}") from error
    except OSError as error:
        raise _folder_error("pretrained-file-unreadable", folder,
                            f"has a file {name} that cannot be read: {error.strerror or error}") from error


def own_json(folder: Path, name: str, most_bytes: int) -> dict[str, object]:
    """The JSON object in a file of `own_file`. CheckpointError if it is damaged."""
    path = own_file(folder, name)
    try:
        document = read_json(path, most_bytes)
    except (OSError, ValueError) as error:
        raise _folder_error("pretrained-config-unreadable", folder,
                            f"has a {name} that cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise _folder_error("pretrained-config-not-object", folder, f"has a {name} that is not a JSON object")
    return document


def without_weights(folder: Path) -> CheckpointError:
    """The error for a folder without a file of tensors from which a run is to start."""
    kinds = {"*.gguf": "Name the GGUF file {} itself.", "*.bin.index.json": "Save it as safetensors: {} lists several "
             "pickle files, which transformers loads (from_pretrained) and saves as safetensors (save_pretrained).",
             "*.safetensors": "Rename the file model.safetensors, if {} is the complete model."}
    found = next(((remedy, file.name) for kind, remedy in kinds.items() for file in sorted(folder.glob(kind))), None)
    return _folder_error("pretrained-without-weights", folder, f"has none of {', '.join(WEIGHTS)}",
                         **({} if found is None else {"remedy": found[0].format(found[1])}))


# --- files of tensors ------------------------------------------------------------------------------------------------


def _open(folder: Path) -> Tensors:
    """The tensors of `folder`, in the first of the supported forms that exists."""
    if _is_there(folder / "model.safetensors"):
        return _Safetensors(folder, ["model.safetensors"])
    if _is_there(folder / "model.safetensors.index.json"):
        placed = own_json(folder, "model.safetensors.index.json", _INDEX_BYTES).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise _folder_error("pretrained-index-without-map", folder,
                                "has a model.safetensors.index.json without a weight_map of file names")
        files = sorted(set(placed.values()))
        for name in files:
            if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name, flags=re.ASCII):
                raise _folder_error("pretrained-index-names-other-files", folder,
                                    "has a model.safetensors.index.json that names something other than a file next to "
                                    "it", name)
        return _Safetensors(folder, files, placed)
    if _is_there(folder / "pytorch_model.bin"):
        return _TorchFile(folder)
    raise without_weights(folder)


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


class _Safetensors:
    """One or several safetensors files. placed: tensor -> file, from the index."""

    def __init__(self, folder: Path, files: Sequence[str], placed: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        for file in files:
            path = own_file(folder, file)
            try:
                self._open[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._unreadable(file, error) from error
            self._file_of |= dict.fromkeys(self._open[file].keys(), file)
        if placed is not None and placed != self._file_of:
            name = next(name for name in sorted({*placed, *self._file_of})
                        if placed.get(name) != self._file_of.get(name))
            raise _folder_error("pretrained-index-wrong", folder,
                                f"has a model.safetensors.index.json that is wrong about {name}")

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return _folder_error("pretrained-file-damaged", self._folder,
                             f"has a damaged file {file}: {str(error).partition(chr(10))[0]}")

    def heads(self) -> dict[str, tuple[torch.dtype | str, tuple[int, ...]]]:
        found = {}
        for name, file in self._file_of.items():
            view = self._open[file].get_slice(name)
            found[name] = (_FORMATS.get(view.get_dtype(), view.get_dtype()), tuple(view.get_shape()))
        return found

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        file = self._file_of[name]
        try:
            opened = self._open[file]
            tensor: Tensor = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
            return tensor
        except (SafetensorError, OSError) as error:
            raise self._unreadable(file, error) from error


class _TorchFile:
    """pytorch_model.bin. Its pickle may build only tensors; they are memory-mapped, unless the file has the format
    before torch 1.6."""

    def __init__(self, folder: Path) -> None:
        path = own_file(folder, "pytorch_model.bin")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about old forms of pickles
                found = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
        except Exception as error:  # an untrusted pickle may raise anything
            raise _folder_error("pickle-unreadable", folder,
                                "has a pytorch_model.bin that is not a plain dict of tensors: "
                                 f"{str(error).partition(chr(10))[0]}") from error
        if not isinstance(found, dict) or not all(
                isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout is torch.strided
                and tensor.device.type == "cpu" for name, tensor in found.items()):
            raise _folder_error("pickle-not-tensors", folder,
                                "has a pytorch_model.bin that is not a plain dict of tensors")
        claimed = sum(tensor.nbytes for name, tensor in found.items() if name not in _SHARED)
        if claimed > path.stat().st_size:
            raise _folder_error("pickle-claims-more", folder,
                                "has a pytorch_model.bin that claims more numbers than it has")
        self._found: dict[str, Tensor] = {name: tensor.detach() for name, tensor in found.items()}

    def heads(self) -> dict[str, tuple[torch.dtype | str, tuple[int, ...]]]:
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._found.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._found[name] if rows is None else self._found[name][rows]
