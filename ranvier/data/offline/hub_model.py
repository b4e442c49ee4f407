"""Models on the Hugging Face hub, fetched by `huggingface_hub` into its own cache: a folder of a snapshot."""

from __future__ import annotations

import re
from pathlib import Path

from ranvier.data.cache import CacheOnly, NotInCache, Progress
from ranvier.errors import DataError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_CONFIG = "config.json"
_SMALL = [_CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "preprocessor_config.json",
          "adapter_config.json"]
_WEIGHTS = (["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"], ["pytorch_model.bin"])
"""Files of tensors; the first form that a model has is used. Files of other programs may be next to them."""


def is_name(name: str) -> bool:
    """Whether this may be the name of a model on the hub: OWNER/NAME, or OWNER/NAME@REVISION; not that of a file."""
    return _NAME.fullmatch(name) is not None and not Path(name).is_file()


def fetch(name: str, progress: Progress) -> Path:
    """The folder of the model: settings, tokenizer, and tensors in safetensors or else pytorch_model.bin. Files that
    are in the cache and up to date are not fetched again. DataError if the hub or the model cannot be reached."""
    if isinstance(progress, CacheOnly):
        raise NotInCache(name)
    progress(f"reading {name} from the Hugging Face hub")
    folder = Path()
    for weights in _WEIGHTS:
        folder = _snapshot(name, [*_SMALL, *weights])
        if any(next(folder.glob(pattern), None) for pattern in weights):
            break
    return folder


def fetch_config(name: str, *, from_cache: bool = False) -> Path:
    """A folder with config.json of the model. from_cache: only from the hub's cache. DataError as of `fetch`."""
    return _snapshot(name, [_CONFIG], from_cache=from_cache)


def _snapshot(name: str, patterns: list[str], *, from_cache: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    found = _NAME.fullmatch(name)
    assert found is not None, "is_name has been asked"
    try:
        folder = Path(snapshot_download(found[1], revision=found[2], allow_patterns=patterns,
                                        local_files_only=from_cache))
    except Exception as error:  # any error of the package, the hub or the network
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DataError("is not an existing folder, and could not be read from the Hugging Face hub",
                        code="hub-model-unreadable", where=f"model {name}", value=reason,
                        remedy="Check the name and the connection (`hf auth login` for restricted models), "
                               "or name a local folder or GGUF file.") from error
    if not (folder / _CONFIG).is_file():
        raise DataError("has no config.json", code="hub-model-without-config", where=f"model {name}",
                        remedy="Name a model in the format of transformers; fetch a GGUF file, and name its path.")
    return folder
