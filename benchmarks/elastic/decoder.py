"""The small decoder: a Llama of 2.6 million parameters (6 layers of 192), pretrained here on the source text of
Python's standard library, and fine-tuned on the film reviews of the sentiment set as plain text.

The smallest pretrained decoder in a package has 135 million parameters (SmolLM2), and two cores train it on about a
hundred tokens a second: too few for curves over seeds. Pretraining takes some minutes, once: the weights stay in the
user's cache folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import tomli_w

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.config.run import Batch, Data, Optim, Run, Train, Transformer
from ranvier.data.cache import user_cache_folder
from ranvier.data.sentences import open_part, read_sentences
from ranvier.mesh import Mesh

BYTES_PER_TOKEN = 2.4
"""About that of film reviews with a vocabulary of 1,024 entries that was made for Python."""
_SIZES = {"family": "llama", "num_layers": 6, "hidden": 192, "heads": 6, "kv_heads": 3, "intermediate": 512,
          "vocab": 1024, "tied": True}
_PRETRAINING = {
    "mesh": {"data": 2},
    "model": {**_SIZES, "sequence": 128},
    "data": {"corpus": "python-stdlib", "tokenizer": "bpe", "max_bytes": 8_000_000},
    "batch": {"global_size": 32, "microbatch_size": 16},
    "train": {"steps": 300, "learning_rate": 2e-3, "warmup_steps": 30, "schedule": "cosine", "sample_tokens": 0},
    "optim": {"betas": [0.9, 0.95], "clip_norm": 1.0}}


def decoder_run() -> Run:
    """The fine-tuning run on a pipeline of four ranks."""
    folder = user_cache_folder() / "benchmark-decoder"
    train, held = _reviews(folder)
    return resolve_pretrained(Run(
        mesh=Mesh(pipe=4), batch=Batch(global_size=16, microbatch_size=4),
        model=Transformer(**_SIZES, sequence=64, pretrained=str(_pretrained(folder))),
        data=Data(task="lm", corpus=str(train), eval=str(held)),
        train=Train(learning_rate=5e-4, schedule="linear"), optim=Optim(decay="matrices", clip_norm=1.0)))


def _pretrained(folder: Path) -> Path:
    """Folder of the weights with their tokenizer, in transformers' format; made if it does not exist."""
    text = tomli_w.dumps(_PRETRAINING)
    weights = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not weights.exists():
        print("pretraining the small decoder", flush=True)
        with tempfile.TemporaryDirectory() as name:
            recipe, run = Path(name) / "decoder.toml", Path(name) / "run"
            recipe.write_text(text)
            ranvier = [sys.executable, "-m", "ranvier"]
            subprocess.run([*ranvier, "train", str(recipe), "--run-dir", str(run)], check=True)
            subprocess.run([*ranvier, "export", str(run), str(weights)], check=True)
    return weights


def _reviews(folder: Path) -> tuple[Path, Path]:
    """Training and held-out sentences as two text files with one sentence per line, in the order of their hashes."""
    files = folder / "reviews-train.txt", folder / "reviews-eval.txt"
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        found = read_sentences(open_part("sentiment", "train", user_cache_folder(), print), None)
        for file, part in zip(files, (found.train, found.eval), strict=True):
            lines = sorted((one.text for one in part), key=lambda line: hashlib.sha256(line.encode()).digest())
            file.write_text("\n".join(lines) + "\n")
    return files
