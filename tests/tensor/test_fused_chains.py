"""`--model.compile` on rows and columns: chains between a layer's collectives are compiled, and gradients stay.

A backend that runs the graphs as they are compiles nothing.
"""

import warnings

import pytest
import torch

from ranvier.config.run import Memory
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.tensor import fused
from ranvier.tensor.fused import Fused
from tests.tensor.split_parity import assert_parity, tiny_gpt, token_batches
from tests.tensor.test_llama_gradients import assert_as_one_process


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are made, counted by a backend that runs them as they are."""
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs, **options):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(fused, "BACKEND", backend)
    return made


@pytest.mark.parametrize(("kind", "mesh", "scheme", "chains"), [
    ("gpt", Mesh(row=2, col=2), "stationary", 4),
    pytest.param("gemma2", Mesh(col=2), "stationary", 4, marks=pytest.mark.slow),
    pytest.param("gpt", Mesh(row=2, col=2), "summa", 4, marks=pytest.mark.slow),
    pytest.param("gpt", Mesh(row=2), "stationary", 4, marks=pytest.mark.slow),
    pytest.param("gpt", Mesh(col=2), "megatron", 0, marks=pytest.mark.slow)])
def test_gradients_are_plain_pytorchs(kind, mesh, scheme, chains, graphs):
    """Recomputation included. Norms of sharded features have chains, which all layers of a rank share; where features
    are whole, torch's norm is one kernel already."""
    options = dict(scheme=scheme, compile=True, memory=Memory(recompute=1))
    if kind == "gpt":
        assert_parity(tiny_gpt, token_batches(mesh, count=2), mesh, **options)
    else:
        assert_as_one_process(kind, mesh, **options)
    assert chains * mesh.size <= len(graphs) <= 3 * chains * mesh.size


def chain(x):
    """Waits for a number of its input: no single graph."""
    return x * (2.0 if float(x.sum()) > -1e9 else 1.0)


def test_a_chain_that_cannot_be_compiled(graphs):
    x = torch.ones(3)
    with pytest.raises(ModelError, match=r"chain: cannot be compiled: (.|\n)*--model.compile false"):
        Fused(True)(chain, x)
    calls = Fused("auto")
    with pytest.warns(UserWarning, match="chain runs uncompiled"):
        assert torch.equal(calls(chain, x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(chain, x)
