"""Sentences, questions and images as a damaged disk or a faulty script may leave them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from ranvier.config.run import Data, Run, Transformer
from ranvier.data.prepare import prepare
from tests.fuzz.inputs import BYTE_CHANGES, JSON_CHANGES, change_bytes, change_json, try_all

TSV = "sentence\tlabel\n" + "".join(f"grüße, film {number} 中文\t{number % 3}\n" for number in range(9))
SQUAD = {"version": "1.1", "data": [{"title": "t", "paragraphs": [
    {"context": f"In {year} the arrow flew over a green field, naïve 🙂.", "qas": [
        {"id": f"q{year}", "question": "When did it fly?", "answers": [{"text": str(year), "answer_start": 3}]}]}
    for year in range(1990, 1993)]}]}


def _png(number: int, side: int = 12) -> bytes:
    file = io.BytesIO()
    data = np.random.default_rng(number).integers(0, 256, (side, side + 3, 3), dtype=np.uint8)
    Image.fromarray(data).save(file, ("PNG", "JPEG", "GIF", "BMP", "TIFF")[number % 5])
    return file.getvalue()


def _prepared(folder: Path, task: str, train: Path):
    """A run's data from this file or folder; every sample is read, and has one shape."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    run = Run(model=Transformer(vocab=60, sequence=24, image_size=8),
              data=Data(task=task, train=str(train), cache_dir=folder / "cache"))
    prepared = prepare(run)
    for part in (prepared.train, prepared.eval):
        samples = np.arange(len(part))
        inputs, targets = part.inputs(samples, np.zeros_like(samples)), part.targets(samples)
        if task == "images":
            assert inputs.shape == (len(part), 3, 8, 8) and bool(inputs.isfinite().all())
        else:
            assert all(tensor.shape == (len(part), 24) for tensor in inputs.values())
            assert 0 <= int(inputs["ids"].min()) <= int(inputs["ids"].max()) < prepared.tokenizer.vocab
        most = 24 if task == "qa" else prepared.num_classes
        for target in targets.values() if isinstance(targets, dict) else [targets]:
            assert 0 <= int(target.min()) <= int(target.max()) < most
    return prepared


def sentences(folder: Path, count: int) -> int:
    def work(changes):
        (folder / "a.tsv").write_bytes(change_bytes(TSV.encode(), changes))
        _prepared(folder, "classification", folder / "a.tsv")

    folder.mkdir(parents=True, exist_ok=True)
    return try_all(BYTE_CHANGES, work, count)


def questions(folder: Path, count: int) -> int:
    def work(changes):
        in_json, changes = changes
        data = json.dumps(change_json(SQUAD, changes) if in_json else SQUAD).encode()
        (folder / "a.json").write_bytes(data if in_json else change_bytes(data, changes))
        _prepared(folder, "qa", folder / "a.json")

    folder.mkdir(parents=True, exist_ok=True)
    return try_all(st.one_of(st.tuples(st.just(True), JSON_CHANGES), st.tuples(st.just(False), BYTE_CHANGES)), work,
                   count)


def image_folders(folder: Path, count: int) -> int:
    pictures = [_png(number) for number in range(5)]

    def work(value):
        which, changes = value
        shutil.rmtree(folder / "images", ignore_errors=True)
        for name in ("cat", "dog"):
            (folder / "images" / name).mkdir(parents=True)
            for number, data in enumerate(pictures):
                (folder / "images" / name / f"{number}.png").write_bytes(data)
        (folder / "images" / "dog" / f"{which}.png").write_bytes(change_bytes(pictures[which], changes))
        assert len(_prepared(folder, "images", folder / "images").train) == 9

    return try_all(st.tuples(st.integers(0, 4), BYTE_CHANGES), work, count)


FUZZERS: dict[Callable[[Path, int], int], int] = {sentences: 4, questions: 4, image_folders: 3}
"""Fuzzer -> its number of inputs in a round."""
