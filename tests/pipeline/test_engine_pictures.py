"""The picture and the page of the last batch in a user's own loop: their contents, and which calls are refused."""

import json
import re

import pytest
import torch
from torch import nn

from ranvier.mesh import Mesh
from ranvier.pictures.figures import COLOURS
from ranvier.pipeline.engine import Engine
from ranvier.schedule.spans import MOST_SPANS, Timeline
from ranvier.testing.ranks import run_ranks
from tests.errors import raises


def loss(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum"), target.numel()


def engine_on(world, **sizes):
    return Engine([nn.Linear(4, 4), nn.Linear(4, 4)], world, mesh=Mesh(**sizes), loss=loss,
                  optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


BATCH = [(torch.ones(2, 4), torch.zeros(2, 4)) for _ in range(3)]


def test_the_last_training_batch_of_all_ranks(tmp_path):
    image = pytest.importorskip("matplotlib.image")

    def rank(world):
        engine = engine_on(world, pipe=2)
        losses = [engine.train_batch(BATCH).loss for _ in range(3)]
        engine.evaluate(BATCH)
        picture = engine.timeline.draw(tmp_path / "step.png")
        page = engine.report(tmp_path / "page.html", loss=losses, temperature=[0.5],
                             held_out={2: torch.tensor(7.0), 4: 8})
        resumed = engine.report(tmp_path / "resumed.html", loss=losses, norm=(2, None), step=[8, 9, 10])
        assert resumed.curves == {"step": [8, 9, 10], "loss": losses, "norm": [2, None, None]}
        assert all(len(text(shown)) < 200 for shown in (picture, page) for text in (repr, str))
        for curve in (losses[0], "falls", [losses], {"first": 1.0}):
            with raises("curves-of-no-numbers", where="Engine.report(loss=...)"):
                engine.report(tmp_path / "none.html", loss=curve)
        engine.close()
        return picture, page

    (picture, page), (other, _) = run_ranks(rank, 2)
    assert picture == other == picture._repr_png_() == (tmp_path / "step.png").read_bytes()
    values = (255 * image.imread(tmp_path / "step.png")[..., :3]).round().astype(int)
    pixels = set(map(tuple, values.reshape(-1, 3)))
    assert all(tuple(bytes.fromhex(COLOURS[kind][1:])) in pixels for kind in ("forward", "backward"))
    text = (tmp_path / "page.html").read_text()
    assert page.html() == text and page._repr_html_().startswith("<iframe srcdoc=")
    found = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert "Step 3 on mesh data 1 x pipe 2" in text
    assert found["curves"]["step"] == [1, 2, 3, 4] and len(set(found["curves"]["loss"][:3])) == 3
    assert found["curves"]["temperature"] == [0.5, None, None, None]
    assert found["curves"]["held_out"] == [None, 7, None, 8]
    assert [row["name"] for row in found["timeline"]["rows"]] == ["data 0   pipe 0", "data 0   pipe 1"]
    for row in found["timeline"]["rows"]:
        labels = [label for category, label, *_ in row["spans"] if category == "forward"]
        assert labels == ["F0", "F1", "F2"], "of the training batch, without the evaluation after it"
        assert {"forward", "backward", "optimizer"} <= {category for category, *_ in row["spans"]}


def test_what_cannot_be_drawn(tmp_path):
    def rank(world):
        engine = engine_on(world, data=2)
        with raises("no-batch-to-draw", "Engine.timeline.draw"):
            engine.timeline.draw(tmp_path / "step.png")
        engine.train_batch(BATCH)
        with raises("picture-not-writable", tmp_path / "none" / "page.html"):
            engine.report(tmp_path / "none" / "page.html")
        with raises("picture-not-writable", tmp_path / "none" / "step.png"):
            engine.timeline.draw(tmp_path / "none" / "step.png")
        engine.close()

    run_ranks(rank, 2)


def test_spans_that_nobody_takes_are_bounded():
    timeline = Timeline()
    for number in range(MOST_SPANS + 5):
        timeline.add("forward", "F0", number, 0)
    assert len(timeline.spans) == MOST_SPANS and timeline.take()[0].step == 5 and not timeline.take()
