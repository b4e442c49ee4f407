"""Complete runs of the tasks that the other tests here leave out: questions with BERT, images with ViT."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from ranvier.config.run import Batch, Data, Elastic, Optim, Run, Train, Transformer
from ranvier.mesh import Mesh
from tests.elastic.runs import events, losses, read_rows, run_all, transitions

THINGS = ["house", "river", "stone", "garden", "window", "bridge", "forest", "cloud"]
COLOURS = ["red", "blue", "green", "black"]
COMMON = dict(precision="fp64", batch=Batch(global_size=8, microbatch_size=2),
              optim=Optim(weight_decay=0.0, offload="none"))


def write_questions(path, numbers):
    """Write questions in SQuAD's format: each asks for the only colour among nine words."""
    paragraphs = []
    for number in numbers:
        words = [THINGS[(number + place) % len(THINGS)] for place in range(8)]
        colour = COLOURS[number % 3 + number % 2]
        words.insert(number * 5 % 8, colour)
        context = " ".join(words)
        paragraphs.append({"context": context, "qas": [{"id": str(number), "question": "what colour?", "answers": [
            {"text": colour, "answer_start": context.index(colour)}]}]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "colours", "paragraphs": paragraphs}]}))


def test_questions_are_answered_alike_on_every_mesh(tmp_path):
    """Contexts are longer than a window, so a question has several windows, which are on several replicas."""
    for name, numbers in (("train", range(24)), ("eval", range(24, 31))):
        write_questions(tmp_path / f"{name}.json", numbers)
    found = {}
    for mesh in (Mesh(), Mesh(pipe=2, data=2)):
        run = Run(mesh=mesh, model=Transformer(num_layers=3, hidden=16, heads=2, vocab=160, sequence=12),
                  data=Data(task="qa", train=str(tmp_path / "train.json"), eval=str(tmp_path / "eval.json"),
                            cache_dir=tmp_path / "cache"),
                  train=Train(epochs=2, learning_rate=2e-2, warmup_steps=2, schedule="linear", eval_every=4),
                  elastic=Elastic(freeze="manual", manual=("6:1",)), run_dir=tmp_path / str(mesh), **COMMON)
        results, _ = run_all(run)
        assert [line["frozen_layers"] for line in transitions(run)] == [1]
        assert all(result == results[0] for result in results)
        found[mesh] = losses(run), events(run, "eval")
    (alone, held_out), *others = found.values()
    for told, evaluated in others:
        assert told == pytest.approx(alone, rel=1e-9)
        for line, expected in zip(evaluated, held_out, strict=True):
            scores = [name for name in expected if name.startswith("eval_")]
            assert {name: line[name] for name in scores} == {name: expected[name] for name in scores}
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9) and line["tokens"] == expected["tokens"]
    last = held_out[-1]
    assert last["eval_count"] == 7 < last["tokens"]  # questions, and their windows
    assert 0 < last["eval_exact_match"] <= last["eval_f1"] <= 1


def write_images(folder, count):
    """Write noise images whose first channel is the class, in one folder for each class."""
    draws = np.random.default_rng(count)
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draws.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            pixels[..., 0] = 200 * label
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.mark.slow
@pytest.mark.parametrize("augment", ["none", "flip-crop"])
def test_a_vision_transformer_reads_from_its_cache_what_it_would_compute(tmp_path, augment):
    """Also with augmentation, if each epoch repeats the augmented images of the first."""
    write_images(tmp_path / "set" / "train", 12)
    write_images(tmp_path / "set" / "val", 5)
    plain = Run(mesh=Mesh(pipe=2), model=Transformer(num_layers=3, hidden=16, heads=2, image_size=8, patch_size=4),
                data=Data(task="images", train=str(tmp_path / "set"), cache_dir=tmp_path / "cache", augment=augment,
                          augment_repeats=augment != "none"),
                train=Train(epochs=5, learning_rate=3e-3, eval_every=5),
                elastic=Elastic(freeze="manual", manual=("3:1", "9:2")), run_dir=tmp_path / "plain", **COMMON)
    cached = replace(plain, run_dir=tmp_path / "cached", elastic=replace(
        plain.elastic, cache=True, cache_from=1, cache_precision="full", cache_dir=tmp_path / "outputs"))
    run_all(plain)
    results, _ = run_all(cached)
    assert losses(cached) == pytest.approx(losses(plain), rel=1e-9) and len(losses(plain)) == 15
    assert [(line["step"], line["frozen_layers"], line["cache"]) for line in transitions(cached)] == [
        (3, 1, True), (9, 2, True)]
    # epochs of 24: computed in the second, read in the third and the fifth, upgraded in the fourth
    counts = [counts for counts in results[0]["cache"] if counts]
    assert [(each["misses"], each["upgraded"], each["hits"]) for each in counts] == [(24, 24, 48)]
    assert read_rows(results) == 72
    for line, expected in zip(events(cached, "eval"), events(plain, "eval"), strict=True):
        assert line["eval_count"] == 10 and line["eval_accuracy"] == expected["eval_accuracy"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)
