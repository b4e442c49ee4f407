"""What stages send: several named tensors of several dtypes, some of them for only a part of the way."""

import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn

from ranvier.config.run import Optim, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.sent_values import pack, place_of, unpack
from tests.covering import covering, label
from tests.errors import raises
from tests.pipeline.parity import assert_parity, chain, generator, gradients_on, on_mesh, points, share, squared

MESHES = [Mesh(), Mesh(pipe=2), Mesh(pipe=3), Mesh(data=2, pipe=4)]
POLICIES = ("message-driven", "1f1b", "gpipe")
LINEARS = partial(chain, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4))


class Part(nn.Module):
    """A linear layer, and what the test computes with it."""

    def __init__(self, run):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._run = run

    def forward(self, state):
        return self._run(self.linear, state)


def of(*runs):
    """A function that builds a model of one `Part` for each of `runs`."""
    return partial(chain, *[partial(Part, run) for run in runs])


def enter(linear, state):
    hidden = linear(state["hidden"])
    return {**state, "hidden": hidden, "side": torch.sin(hidden)}  # here begins a second tensor that needs gradients


def masked(linear, state):
    hidden = torch.tanh(linear(state["hidden"])) * state["mask"].unsqueeze(-1)
    return {**state, "hidden": hidden + state["positions"].unsqueeze(-1)}


def unused_output(linear, state):
    return {**state, "hidden": linear(state["hidden"]), "unused": linear(state["side"])}


def consume_side(linear, state):
    rest = {name: tensor for name, tensor in state.items() if name not in ("side", "unused")}
    return {**rest, "hidden": linear(state["hidden"] * state["side"])}


def create_late(linear, state):
    return {**state, "late": linear(state["hidden"]), "hidden": state["hidden"] + 1.0}


def leave(linear, state):
    return linear(state["hidden"]) + state["late"] * state["mask"].unsqueeze(-1)


PARTS = (enter, masked, unused_output, masked, consume_side, create_late, masked, leave)


def states(counts, seed=0):
    """Microbatches whose inputs are hidden states [b, 4], a mask (bool) and positions (int64), both [b]."""
    batches = points(counts, seed=seed)
    return [[Microbatch({"hidden": one.inputs, "mask": torch.rand(len(one.inputs), generator=generator(seed, k)) < 0.6,
                         "positions": torch.arange(len(one.inputs)) % 3}, one.targets, one.samples)
             for k, one in enumerate(replica)] for replica in batches]


@pytest.mark.parametrize(("mesh", "policy"), covering(MESHES, POLICIES), ids=str)
def test_several_tensors_for_a_part_of_the_way(mesh, policy):
    assert_parity(of(*PARTS), states([[3, 2, 3, 1]] * mesh.data), mesh, pipeline=Pipeline(policy=policy))


@pytest.mark.parametrize("boundaries", [(number, number + 1) for number in range(1, 7)], ids=str)
def test_wherever_it_is_cut(boundaries):
    assert_parity(of(*PARTS), states([[3, 2]]), Mesh(pipe=3), pipeline=Pipeline(boundaries=boundaries))


def halves(linear, x):
    """Two outputs that require gradients and are views of one tensor."""
    first, second = linear(x).chunk(2, dim=-1)
    return {"first": first, "second": second}


def join(linear, state):
    return linear(torch.cat([state["first"], torch.sin(state["second"])], dim=-1))


def same_twice(linear, x):
    y = linear(x)
    return {"first": y, "second": y}


def join_same(linear, state):
    return linear(state["first"] * state["second"])


def from_frozen_to_trained(linear, x):
    """An output that requires no gradient, and one that does."""
    return {"plain": x.detach() * 2.0, "trained": linear(x)}


def use_plain(linear, state):
    return state["trained"] + linear(state["plain"])


def partly_unused(linear, state):
    """Uses the output that requires no gradient, and not the other: no gradient returns from here on."""
    return linear(state["plain"])


class Pair(NamedTuple):
    one: object
    rest: object


def named_pair(linear, x):
    return Pair(linear(x), [Pair(torch.sin(x), x.shape)])


def join_named(linear, state):
    (inner,) = state.rest
    return linear(state.one * inner.one).reshape(inner.rest)


@pytest.mark.parametrize(("first", "second", "policy"), covering([
    (halves, join), (same_twice, join_same), (named_pair, join_named), (from_frozen_to_trained, use_plain),
    (from_frozen_to_trained, partly_unused)], POLICIES), ids=label)
def test_pairs_of_outputs(first, second, policy):
    def plain(linear, x):
        return torch.tanh(linear(x))

    parts = (plain, first, second, plain)
    make = of(*parts)
    assert_parity(make, points([[2, 3, 2], [2]]), Mesh(data=2, pipe=4), pipeline=Pipeline(policy=policy))
    assert_parity(make, points([[2, 3, 2]]), Mesh(pipe=2), pipeline=Pipeline(policy=policy, boundaries=(2,)))


def test_the_dimensions_may_change_from_block_to_block_and_be_empty():
    class Widen(nn.Module):
        def __init__(self, width, out):
            super().__init__()
            self.linear = nn.Linear(width, out)

        def forward(self, x):
            return self.linear(x.flatten(1)).unsqueeze(1)

    make = partial(chain, lambda: Widen(4, 9), lambda: Widen(9, 1), lambda: Widen(1, 6),
                   lambda: nn.Sequential(Widen(6, 4), nn.Flatten()))
    assert_parity(make, points([[2, 0, 3]]), Mesh(pipe=4))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_an_evaluation_runs_no_backward(mesh):
    """Even if blocks and the loss enable gradients, as those of energies do: a step may be in progress."""
    with_gradients = torch.enable_grad()
    model = partial(chain, *[partial(Part, with_gradients(lambda linear, x: linear(x)))] * 2,
                    loss=with_gradients(squared))
    batches = points([[2]])

    def work(engine):
        engine.forward_backward(share(engine, batches))
        before = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        engine.evaluate(share(engine, batches))
        assert all(torch.equal(gradient, before[name]) for name, gradient in engine.gradients().items())

    on_mesh(model, mesh, work, optim=Optim())


def test_inputs_are_left_as_they_are():
    batches = points([[2, 2]])
    before = [one.inputs.clone() for one in batches[0]]
    gradients_on(LINEARS, batches, Mesh(pipe=2))
    assert all(torch.equal(one.inputs, kept) and not one.inputs.requires_grad and one.inputs.grad is None
               for one, kept in zip(batches[0], before, strict=True))


# ---------------------------------------------------------------------- what does not fit

def run(make, batches, mesh):
    on_mesh(make, mesh, lambda engine: engine.forward_backward(share(engine, batches)))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
@pytest.mark.parametrize("returned", [None, (), {}, {"a": 1}, {(3, 4): torch.ones(1)}, (torch.ones(1), -1),
                                      [torch.ones(1), "a"], {"a": (torch.ones(1), 0.5)},
                                      pytest.param(defaultdict(lambda: 0, a=torch.ones(1)), id="lambda")], ids=repr)
def test_a_block_that_returns_something_else(mesh, returned):
    with pytest.raises(ModelError) as refused:
        run(of(lambda linear, x: returned, torch.tanh), points([[2]]), mesh)
    assert refused.value.where == "block b0" and refused.value.value == type(returned).__name__


def test_a_named_tuple_is_one_that_all_ranks_find_by_its_name(monkeypatch):
    class Local(NamedTuple):
        one: torch.Tensor

    class Derived(Pair):
        pass

    for value in (Local(torch.ones(1)), {"a": [Derived(torch.ones(1), None)]}):
        with raises("value-cannot-be-sent"):
            pack("", value, ())
    packed = pack("", Pair(torch.ones(1), None), ())
    assert unpack("", packed, "") == Pair(torch.ones(1), None)
    monkeypatch.delattr(sys.modules[__name__], "Pair")
    with raises("value-of-no-class", value=f"{__name__}:Pair"):
        unpack("", packed, "")


class Output(OrderedDict):
    """As models of Hugging Face return: a subclass of dict."""


@pytest.mark.parametrize(("returned", "says"), [
    ({"a": torch.ones(1), "mask": "b"}, r"; \['mask'\] is a str \(got 'dict'\)\. Return it as a tensor, such as "),
    ((torch.ones(1), [0.5]), r"; \[1\]\[0\] is a float \(got 'tuple'\)\. Return it as a tensor, such as "),
    (Output(past=None, logits=torch.ones(1)), r" \(got 'Output'\)\. Wrap it in a module with the line: "
     r"def forward\(self, state\): return self\.module\(state\)\[\"logits\"\]\.")], ids=repr)
def test_a_refused_state_says_which_key_and_what_to_do(returned, says):
    with pytest.raises(ModelError, match=r"block b0: must return a tensor, or .*, with at least one tensor" + says):
        run(of(lambda linear, x: returned, torch.tanh), points([[2]]), Mesh(pipe=2))


@dataclass
class Fields:
    hidden: torch.Tensor
    mask: torch.Tensor | None = None


def test_a_dataclass_is_sent_once_it_is_registered_as_told():
    make = of(lambda linear, x: Fields(linear(x)), lambda linear, state: linear(state.hidden))
    told = 'torch.export.register_dataclass(Fields, serialized_type_name="Fields")'
    with raises("block-output-type", told):
        run(make, points([[2]]), Mesh(pipe=2))
    with raises("value-cannot-be-sent", told):
        pack("", Fields(torch.ones(1)), ())
    eval(told)
    assert_parity(make, points([[2, 1]]), Mesh(pipe=2))


def test_the_line_that_is_told_makes_a_block_of_an_lstm():
    class Around(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, state):
            return self.module(state)[0]

    with pytest.raises(TypeError) as caught:
        run(partial(chain, lambda: nn.LSTM(4, 4), lambda: nn.Linear(4, 4)), points([[2]]), Mesh(pipe=2))
    assert any("given a tuple" in note and "self.module(state)[0]" in note for note in caught.value.__notes__)
    assert_parity(partial(chain, lambda: Around(nn.LSTM(4, 4)), lambda: nn.Linear(4, 4)), points([[2, 1]]),
                  Mesh(pipe=2))
    with pytest.raises(TypeError) as caught:
        run(partial(chain, lambda: nn.Linear(4, 4), lambda: nn.LSTM(4, 4)), points([[2]]), Mesh())
    assert any("block b1 returned a tuple. Wrap it in a module" in note for note in caught.value.__notes__)


def test_a_module_that_is_given_a_dict_is_told_of_it():
    make = of(lambda linear, x: {"hidden": linear(x), "mask": torch.ones(1)}, lambda linear, state: linear(state))
    with pytest.raises(TypeError) as caught:
        run(make, points([[2]]), Mesh())
    assert any("a dict of hidden, mask: wrap a module that takes tensors in one with the line: def forward(self, "
               "state): return self.module(**state)" in note for note in caught.value.__notes__)


class Exits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        sys.exit(0)


def exits(*args):
    sys.exit(0)


@pytest.mark.parametrize(("make", "where"), [
    (of(exits, torch.tanh), "block b0, forward of microbatch 0"),
    (partial(LINEARS, loss=exits), "the loss of microbatch 0"),
    (of(lambda linear, x: Exits.apply(linear(x)), lambda linear, x: linear(x)), "the backward of microbatch 0")])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_code_that_ends_the_program_inside_a_batch_is_a_failure(mesh, make, where):
    """Even with exit code 0: the other ranks would wait for it."""
    with raises("block-exits", where, "sys.exit"):
        run(make, points([[2]]), mesh)


class Steps(nn.Module):
    """Returns its buffer together with its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x):
        return self.linear(x), self.steps


def count(linear, state):
    state[1].add_(1.0)
    return linear(state[0]) + state[1]


def test_a_block_that_changes_a_buffer_of_an_earlier_one():
    """It does on the buffer's stage; another stage has a copy."""
    make = partial(chain, Steps, partial(Part, count), partial(nn.Linear, 4, 4))

    def work(engine):
        engine.forward_backward(share(engine, points([[2]])))
        return engine.named_buffers()["b0.steps"].tolist()

    assert on_mesh(make, Mesh(), work) == [[1.0] * 4]
    with raises("shared-state-changed", "buffer"):
        on_mesh(make, Mesh(pipe=2), work, pipeline=Pipeline(boundaries=(1,)))


def test_where_a_tensor_is_in_its_value():
    found = pack("", (torch.ones(1), {"mask": [torch.ones(2)]}, Pair(torch.ones(3), torch.ones(4))), ())
    assert [place_of(name) for name in found] == ["[0]", "[1]['mask'][0]", "[2][0]", "[2][1]"]
    assert place_of("hidden") == "hidden" and place_of("") == ""


@pytest.mark.parametrize("inputs", [{"x": torch.ones(1), "scale": 0.5}, numpy.ones(4)], ids=["float", "array"])
def test_inputs_of_another_type(inputs):
    with raises("inputs-type", "from_numpy", where="inputs of microbatch 0"):
        on_mesh(LINEARS, Mesh(), lambda engine: engine.forward_backward([(inputs, torch.ones(1))]))


def test_a_tensor_with_attributes():
    def leave_mean(linear, x):
        y = linear(x)
        y.mean_of_rows = y.mean(1)
        return y

    with raises("tensor-attributes-sent", "mean_of_rows", where="what block b0 returns"):
        run(of(leave_mean, lambda linear, x: linear(x)), points([[2]]), Mesh(pipe=2))


def test_a_dtype_that_messages_do_not_carry():
    make = of(lambda linear, x: linear(x).to(torch.float8_e4m3fn), lambda linear, x: linear(x.double()))
    with raises("message-dtype", 0):
        run(make, points([[2]]), Mesh(pipe=2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, lambda y: torch.nested.as_nested_tensor(list(y))])
def test_a_tensor_without_a_whole_memory(convert):
    make = of(lambda linear, x: convert(linear(x)), lambda linear, x: linear(x.to_dense()))
    with raises("sparse-tensor-sent", "b0"):
        run(make, points([[2]]), Mesh(pipe=2))


@pytest.mark.parametrize(("dropped", "error"), [
    ("inputs", ("microbatch-lacks-data", 1)),
    ("targets", ("microbatch-lacks-data", "give it the inputs")),
])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_missing_inputs_or_targets(mesh, dropped, error):
    batch = points([[2, 2]])[0]
    values = {"inputs": batch[1].inputs, "targets": batch[1].targets, dropped: None}
    with raises(*error):
        run(LINEARS, [[batch[0], Microbatch(**values)]], mesh)


@pytest.mark.parametrize(("loss", "got"), [
    (lambda outputs, targets: (outputs - targets).mean(), r"'a tensor of shape \(\)'"),
    (lambda outputs, targets: ((outputs - targets), 8), r"'\(a tensor of shape \(2, 4\), int\)'"),
])
def test_a_loss_that_returns_something_else(loss, got):
    says = r"loss: must return \(sum of losses, number of valid targets\) "
    with pytest.raises(ModelError, match=says + rf"\(got {got}\). Use reduction='sum'"):
        run(partial(LINEARS, loss=loss), points([[2]]), Mesh(pipe=2))


def test_pairs_instead_of_microbatches():
    batch = [(one.inputs, one.targets) for one in points([[2, 2]])[0]]
    assert on_mesh(LINEARS, Mesh(), lambda engine: engine.forward_backward(batch).weight) == [16.0]
