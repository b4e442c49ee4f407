"""Models that commands take by a path or a name, as folders."""

from __future__ import annotations

from pathlib import Path

from ranvier.data.cache_folder import user_cache_folder
from ranvier.data.offline.pretrained_models import folder_of, is_model_name
from ranvier.data.publish import Progress


def local_path(model: Path, progress: Progress) -> Path:
    """The folder in Hugging Face's format of what `model` names: a GGUF file, a known model, or a model on the hub, in
    the user's cache. Any other path is returned as it is. DataError where it cannot be fetched or read."""
    name = str(model)
    return folder_of(name, user_cache_folder(), progress) if is_model_name(name) else model
