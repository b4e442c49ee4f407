"""Which models are counted again: every model with different computations, and all code that is not Ranvier's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import freeze
from ranvier.config.run import Lora, TensorParallel, Transformer
from ranvier.mesh import Mesh
from ranvier.models.bert import BERT, bert
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.models.lora import with_adapters
from ranvier.plan import block_costs as costs_module
from ranvier.plan import cut as cut_module
from ranvier.plan.block_costs import block_costs, build_on_meta
from ranvier.plan.cut import Parts
from tests.pipeline.parity import chain, squared

CONFIG = Transformer(num_layers=1, hidden=16, heads=2, vocab=48, sequence=8)


@pytest.fixture
def counted(monkeypatch):
    """A list with one entry for each count; no costs are known at the start."""
    found = []
    monkeypatch.setattr(costs_module, "_known", costs_module.Known(64))
    monkeypatch.setattr(cut_module, "block_costs", lambda *args: found.append(args) or block_costs(*args))
    return found


def costs(model, *, rows=2, mesh=None, dtype=torch.float64, device="cpu", tensor=None, sample=None):
    sample = sample or (torch.zeros(rows, 8, dtype=torch.int64), torch.zeros(rows, 8, dtype=torch.int64))
    mesh, tensor = mesh or Mesh(pipe=2), tensor or TensorParallel()
    found = cut_module.cut(model, mesh, boundaries=None, how="cost", sample=sample, dtype=dtype, device=device,
                           tensor=tensor)[0].costs
    fresh = tuple(block_costs(Parts(model, mesh, tensor, device).model, *sample, dtype))
    assert [replace(cost, kernels=()) for cost in found] == [replace(cost, kernels=()) for cost in fresh]
    assert [len(cost.kernels) for cost in found] == [len(cost.kernels) for cost in fresh]


def test_ranviers_blocks_are_built_once_on_the_meta_device():
    """Blocks of any other code are built each time."""
    found, own = build_on_meta(gpt(CONFIG)), chain(lambda: nn.Linear(2, 2))
    assert build_on_meta(gpt(CONFIG)) is found and build_on_meta(own) is not build_on_meta(own)
    assert not any(one.requires_grad for one in build_on_meta(freeze(gpt(CONFIG), 1))["embedding"].parameters())
    assert all(one.requires_grad and one.is_meta for block in found.values() for one in block.parameters())


def test_ranviers_models_are_counted_once_and_again_where_anything_differs(counted):
    """Each case is counted when it is new, and not again."""
    adapted = partial(with_adapters, lora=Lora(rank=2, targets=("layer0.*",)))
    cases = [dict(model=lambda: llama(CONFIG)), dict(model=lambda: llama(replace(CONFIG, kv_heads=1))),
             dict(model=lambda: llama(replace(CONFIG, tied=True))), dict(model=lambda: adapted(llama(CONFIG))),
             dict(model=lambda: with_adapters(llama(CONFIG), Lora(rank=3, targets=("layer0.*",)))),
             dict(model=lambda: freeze(llama(CONFIG), 1)), dict(model=lambda: freeze(adapted(llama(CONFIG)), 1)),
             dict(model=lambda: llama(CONFIG), rows=4), dict(model=lambda: llama(CONFIG), dtype=torch.float32),
             dict(model=lambda: llama(CONFIG), device="cuda"), dict(model=lambda: llama(CONFIG), mesh=Mesh(col=2)),
             dict(model=lambda: llama(CONFIG), mesh=Mesh(row=2)),
             dict(model=lambda: llama(CONFIG), mesh=Mesh(col=2), tensor=TensorParallel(scheme="megatron")),
             dict(model=lambda: gpt(CONFIG)), dict(model=lambda: gpt(replace(CONFIG, dropout=0.5)))]
    for number, case in enumerate(cases + cases):
        costs(case["model"](), **{name: value for name, value in case.items() if name != "model"})
        assert len(counted) == min(number + 1, len(cases))
    costs(llama(CONFIG), mesh=Mesh(data=3, pipe=4))  # neither replicas nor stages change what a block costs
    assert len(counted) == len(cases)


def test_the_loss_and_the_form_of_a_sample_count(counted):
    classes, span = bert(CONFIG, "classes"), bert(CONFIG, "span")
    labels, ends = BERT.sample(CONFIG, "classes", 2), BERT.sample(CONFIG, "span", 2)
    for _ in range(2):
        costs(classes, sample=labels)
        costs(span, sample=ends)
        costs(replace(span, blocks=classes.blocks, loss=classes.loss), sample=labels)
    assert len(counted) == 2


class Own(nn.Linear):
    """A user's block."""


@pytest.mark.parametrize("block", [lambda: nn.Linear(3, 3), partial(nn.Linear, 3, 3), Own(3, 3), partial(Own, 3, 3)],
                         ids=["function", "torch", "module", "class"])
def test_other_code_is_counted_each_time(counted, block):
    model = chain(partial(lambda one: one, block) if isinstance(block, nn.Module) else block, loss=squared)
    for _ in range(2):
        costs(model, mesh=Mesh(), sample=(torch.zeros(4, 3), torch.zeros(4, 3)))
    assert len(counted) == 2


def test_old_models_are_forgotten(counted, monkeypatch):
    monkeypatch.setattr(costs_module, "_known", costs_module.Known(2))
    for rows in (1, 2, 2, 3, 1):
        costs(gpt(CONFIG), rows=rows)
    assert len(counted) == 4


def test_what_has_no_hash_is_found_each_time():
    known, found = costs_module.Known(2), iter(range(9))
    assert [known.get(key, lambda: next(found)) for key in (1, 1, [], [])] == [0, 0, 1, 2]
