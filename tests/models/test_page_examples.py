"""The examples of docs/own-model.md: nanoGPT with its original forward, and a module of two inputs. They run
unchanged, on ranks that are threads, and their blocks have the gradients of the module."""

import copy
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

import ranvier
from ranvier.block import as_model
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from tests.models import nanogpt_as_written
from tests.models.nanogpt_as_written import GPT, GPTConfig
from tests.models.test_blocks_of import assert_gradients
from tests.pipeline.parity import assert_close, gradients_on

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"
CODE = {name: found for name, mark in (("nanogpt", "from model import"), ("inputs", "class Matching"))
        for found in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if mark in found}


@pytest.mark.parametrize(("name", "size"), [("nanogpt", 2), ("inputs", 2)])
def test_examples_of_the_page_train(name, size, monkeypatch):
    """They run unchanged, and their last loss is below the first."""
    here, losses = threading.local(), {}
    monkeypatch.setitem(sys.modules, "model", nanogpt_as_written)

    def start(**axes):
        here.world.mesh = Mesh(**axes)
        return here.world

    class Engine(ranvier.Engine):
        def train_batch(self, *args, **kwargs):
            result = super().train_batch(*args, **kwargs)
            losses.setdefault(threading.current_thread().name, []).append(result.loss)
            return result

    def rank(world):
        here.world = world
        exec(compile(CODE[name], f"{PAGE}:{name}", "exec"), {"__name__": "__main__"})

    monkeypatch.setattr(ranvier, "start", start)
    monkeypatch.setattr(ranvier, "Engine", Engine)
    run_ranks(rank, size)
    first, *others = losses.values()
    assert len(first) >= 10 and first[-1] < 0.9 * first[0] and others == [first] * (size - 1)
    assert len(CODE[name].strip().splitlines()) <= 22


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=3), Mesh(data=2, pipe=2)], ids=str)
def test_nanogpt_computes_its_own_loss_on_the_last_stage(mesh):
    """Also with ignored targets: gradients are those of the mean over all others."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=3, n_head=2, n_embd=8)).double()
    blocks = ranvier.blocks_of(model, ["transformer.h.*"], inputs=["idx", "targets"], output=lambda found: found[1])
    names: dict = {}
    exec(CODE["nanogpt"][CODE["nanogpt"].index("def loss"):CODE["nanogpt"].index("world =")], names)
    text = [[torch.randint(0, 11, (count, 9)) for count in (3, 2)] for _ in range(mesh.data)]
    for one in (each for replica in text for each in replica):
        one[0, 3:5] = -1
    batches = [[Microbatch({"idx": one[:, :-1].clamp(min=0), "targets": one[:, 1:].contiguous()}, one[:, 1:])
                for one in replica] for replica in text]
    made = gradients_on(lambda: as_model(copy.deepcopy(blocks), names["loss"]), batches, mesh).gradients
    whole = torch.cat([one for replica in text for one in replica])
    model(whole[:, :-1].clamp(min=0), whole[:, 1:].contiguous())[1].backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    by_id = {id(one): name for name, one in model.named_parameters()}
    assert_close({by_id[id(one)]: made[f"{block}.{name}"] for block, part in blocks.items()
                  for name, one in part.named_parameters() if f"{block}.{name}" in made}, expected)


@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(data=2, pipe=2)], ids=str)
def test_a_module_of_two_inputs(mesh):
    names: dict = {}
    exec(CODE["inputs"][:CODE["inputs"].index("world =")], names)
    torch.manual_seed(0)
    model = names["Matching"]().double()
    batches = [[Microbatch({"words": torch.randint(0, 100, (count, 5)), "image": torch.rand(count, 12).double()},
                           torch.rand(count, 1).double()) for count in (3, 2)] for _ in range(mesh.data)]
    assert_gradients(model, ranvier.blocks_of(model), batches, mesh,
                     loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()))
