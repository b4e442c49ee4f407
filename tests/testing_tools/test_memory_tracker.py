"""Bytes that the tracker counts, against sums made by hand: forward, backward, checkpoints, hosts, threads, errors."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranvier.testing.memory import MemoryTracker
from tests.errors import raises

FLOAT = 4


def mlp():
    """A model from 8 through 32 to 4 features."""
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))


def activations(tracker):
    return tracker.live.get(("device", "activations"), 0)


def test_new_storages_count_until_they_are_freed():
    with MemoryTracker() as tracker:
        first, second = torch.zeros(10), torch.ones(3, dtype=torch.float64)
        assert tracker.live == {("device", "activations"): 64}
        del first
        assert activations(tracker) == 24
        third = second + second
        assert activations(tracker) == 48
    del second, third
    assert tracker.live == {}
    assert tracker.peak_bytes() == 64


def test_constructors_from_values_count():
    with MemoryTracker() as tracker:
        kept = torch.tensor([1.0, 2.0])
        assert activations(tracker) == 8
    assert kept.sum() == 3.0


def test_views_and_results_in_place_add_nothing():
    with MemoryTracker() as tracker:
        whole = torch.zeros(4, 5)
        views = [whole.t(), whole[1:], whole.view(20), whole.detach(), whole.reshape(2, 10), *whole.unbind()]
        whole.add_(1).mul_(2)
        torch.add(whole, 1, out=whole)
        torch._foreach_mul_([whole], 2.0)
        assert activations(tracker) == tracker.peak_bytes() == 80
        del whole
        assert activations(tracker) == 80, "a view keeps the full storage"
        views.clear()
        assert tracker.live == {}


def test_views_of_untagged_tensors_are_not_new():
    outside = torch.zeros(100)
    with MemoryTracker() as tracker:
        inside = [outside[:50], outside.view(10, 10), outside.add_(1)]
        assert tracker.live == {}
        inside.append(outside * 2)
        assert activations(tracker) == 400


def test_a_storage_at_a_reused_address_is_another():
    with MemoryTracker() as tracker:
        for size in range(1, 200):
            kept = torch.zeros(size)
            assert activations(tracker) == FLOAT * size
            del kept
    assert tracker.live == {}
    assert tracker.peak_bytes() == FLOAT * 199


def test_tags_count_each_storage_once_and_the_last_tag_holds():
    weight = nn.Parameter(torch.zeros(6, 6))
    tracker = MemoryTracker()
    tracker.tag([weight, weight, weight.detach(), weight.t()], "parameters")
    assert tracker.live == {("device", "parameters"): 144}
    tracker.tag([weight[0]], "frozen")
    assert tracker.live == {("device", "frozen"): 144}
    del weight
    assert tracker.live == {}


def test_host_storages_never_count_as_device():
    moments = [torch.zeros(50), torch.zeros(50)]
    tracker = MemoryTracker()
    tracker.tag(moments, "moments", place="host")
    with tracker:
        with tracker.category("staging", place="host"):
            staged = torch.zeros(25)
        moments[0].add_(1)
        weight = torch.zeros(10)
    assert tracker.live == {("host", "moments"): 400, ("host", "staging"): 100, ("device", "activations"): 40}
    assert (tracker.peak_bytes(), tracker.at_peak()) == (40, {"activations": 40})
    assert (tracker.peak_bytes("host"), tracker.at_peak("host")) == (500, {"moments": 400, "staging": 100})
    tracker.tag([weight], "weight", place="host")
    tracker.reset_peak()
    assert (tracker.peak_bytes(), tracker.peak_bytes("host")) == (0, 540)
    assert staged.numel() == 25


def test_categories_nest_and_end_with_their_block():
    kept = []
    with MemoryTracker() as tracker:
        with pytest.raises(RuntimeError, match="on purpose"):
            with tracker.category("messages"):
                kept.append(torch.zeros(1))
                with tracker.category("gradients"):
                    kept.append(torch.zeros(2))
                kept.append(torch.zeros(4))
                raise RuntimeError("on purpose")
        kept.append(torch.zeros(8))
    assert tracker.live == {("device", "messages"): 20, ("device", "gradients"): 8, ("device", "activations"): 32}


def test_the_peak_is_the_first_highest_moment_and_can_be_reset():
    with MemoryTracker() as tracker:
        with tracker.category("messages"):
            message = torch.zeros(100)
        small = torch.zeros(1)
        del message
        with tracker.category("later"):
            later = torch.zeros(100)
        assert tracker.at_peak() == {"messages": 400, "activations": 4}
        tracker.reset_peak()
        assert tracker.at_peak() == {"later": 400, "activations": 4}
        del later
        tracker.reset_peak()
        assert tracker.peak_bytes() == 4
    assert small.numel() == 1


def test_what_autograd_saves_counts_after_the_tensor_is_gone():
    linear = nn.Linear(16, 4, bias=False)
    with MemoryTracker() as tracker:
        inputs = torch.ones(8, 16)
        outputs = linear(inputs)
        del inputs
        saved, result = 8 * 16 * FLOAT, 8 * 4 * FLOAT
        assert activations(tracker) == saved + result
        assert torch.equal(outputs.grad_fn._saved_self, torch.ones(8, 16))
        assert activations(tracker) == saved + result
        del outputs
        assert tracker.live == {}


def test_a_tagged_input_that_only_autograd_keeps_counts_too():
    linear, inputs, tracker = nn.Linear(16, 4), torch.ones(8, 16), MemoryTracker()
    tracker.tag([inputs], "inputs")
    outputs = linear(inputs)
    del inputs
    assert tracker.live == {("device", "inputs"): 512}
    outputs.sum().backward()
    assert tracker.live == {}


def test_the_forward_of_an_mlp_keeps_what_its_backward_needs():
    model, inputs, tracker = mlp(), torch.ones(8, 8), MemoryTracker()
    tracker.tag([inputs], "inputs")
    tracker.tag(model.parameters(), "parameters")
    fixed = {("device", "inputs"): 8 * 8 * FLOAT, ("device", "parameters"): (8 * 32 + 32 * 4) * FLOAT}
    assert tracker.live == fixed
    hidden, result = 8 * 32 * FLOAT, 8 * 4 * FLOAT
    with tracker:
        outputs = model(inputs)
        assert tracker.live == {**fixed, ("device", "activations"): hidden + result}
        assert tracker.at_peak()["activations"] == 2 * hidden, "before and after the ReLU"
        del outputs
        assert tracker.live == fixed
        tracker.reset_peak()
        with torch.no_grad():
            outputs = model(inputs)
        assert activations(tracker) == result == outputs.untyped_storage().nbytes()
        assert tracker.at_peak()["activations"] == 2 * hidden


def test_the_peak_of_forward_and_backward_is_that_of_a_hand_computation():
    """Highest in the ReLU's backward: its saved result, both gradients of hidden size, and the last weight's."""
    model, inputs, tracker = mlp(), torch.ones(8, 8), MemoryTracker()
    tracker.tag([inputs], "inputs")
    tracker.tag(model.parameters(), "parameters")
    hidden, scalar, first, last = 8 * 32 * FLOAT, FLOAT, 8 * 32 * FLOAT, 32 * 4 * FLOAT
    with tracker:
        loss = model(inputs).sum()
        assert activations(tracker) == hidden + scalar
        with tracker.category("gradients"):
            loss.backward()
        assert tracker.at_peak() == {"inputs": 8 * 8 * FLOAT, "parameters": first + last,
                                     "activations": hidden + scalar, "gradients": scalar + 2 * hidden + last}
        assert tracker.peak_bytes() == 256 + 1536 + 1028 + 2564
        assert activations(tracker) == scalar
        assert tracker.live["device", "gradients"] == first + last
        for parameter in model.parameters():
            parameter.grad = None
        assert ("device", "gradients") not in tracker.live


def test_an_optimizer_makes_its_moments_in_the_category_of_its_step():
    model, tracker = mlp(), MemoryTracker()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with tracker, tracker.category("moments"):
        optimizer.step()
    two_moments, step_counts = 2 * (8 * 32 + 32 * 4) * FLOAT, 2 * FLOAT
    assert tracker.live == {("device", "moments"): two_moments + step_counts}


@pytest.mark.parametrize("depth", [2, 5])
def test_checkpoints_lower_the_peak_by_one_activation_a_block_but_one(depth):
    """Without checkpoints a block keeps the inputs of its product and of its GELU; with checkpoints, only the former.
    Either peak is in the backward of the last block's product, when its second activation has been freed again.
    """
    width, batch = 16, 32
    blocks = [nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(depth)]
    activation, weight, scalars = batch * width * FLOAT, width * width * FLOAT, 2 * FLOAT
    kept, peaks = [], []
    for checkpointed in (False, True):
        state, tracker = torch.ones(batch, width).requires_grad_(), MemoryTracker()
        with tracker:
            for block in blocks:
                state = (checkpoint(block, state, use_reentrant=False, preserve_rng_state=False) if checkpointed
                         else block(state))
            kept.append(activations(tracker))
            state.sum().backward()
        peaks.append(tracker.peak_bytes())
        for block in blocks:
            block.zero_grad()
    assert kept == [2 * depth * activation, depth * activation]
    assert peaks == [(2 * depth + 1) * activation + weight + scalars, (depth + 2) * activation + weight + scalars]


class Square(torch.autograd.Function):
    """Saves a copy of its input that it makes itself."""

    @staticmethod
    def forward(ctx, inputs):
        copy = inputs.clone()
        ctx.save_for_backward(copy)
        return copy * copy

    @staticmethod
    def backward(ctx, gradient):
        copy, = ctx.saved_tensors
        return 2 * copy * gradient


def test_autograd_functions_count_what_they_save_and_what_their_backward_makes():
    inputs = torch.ones(100, requires_grad=True)
    with MemoryTracker() as tracker:
        outputs = Square.apply(inputs)
        assert activations(tracker) == 800, "the copy and the result"
        outputs.backward(torch.ones(100))
        assert tracker.peak_bytes() == 800 + 400 + 800, "plus a gradient, twice the copy, and their product"
        del outputs
        assert activations(tracker) == 400
    assert inputs.grad[0] == 2


def test_resized_storages_count_with_their_new_size():
    with MemoryTracker() as tracker:
        tensor = torch.zeros(10)
        tensor.resize_(100)
        assert activations(tracker) == 400
        torch.add(torch.zeros(200), 1, out=tensor.resize_(0))
        assert activations(tracker) == 800
        tensor.untyped_storage().resize_(1600)
        assert activations(tracker) == 800, "no operation has used it yet"
        tensor.sum()
        assert activations(tracker) == 1600
    tensor.untyped_storage().resize_(40)
    tracker.tag([tensor], "again")
    assert tracker.live == {("device", "again"): 40}
    del tensor
    assert tracker.live == {}


def test_meta_tensors_count_nothing():
    tracker = MemoryTracker()
    tracker.tag([torch.zeros(10, device="meta")], "parameters")
    with tracker:
        kept = torch.zeros(10, device="meta") + 1
        assert tracker.live == {}
    assert kept.is_meta and tracker.peak_bytes() == 0


def test_threads_count_apart():
    """Each with its own tracker, entered at the same time; the main thread has a third."""
    ready, results = threading.Barrier(3), {}

    def train(rank):
        tracker, model = MemoryTracker(), nn.Linear(4, rank, bias=False)
        with tracker:
            ready.wait(10)
            for _ in range(20):
                model.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
            results[rank] = dict(tracker.live)
            ready.wait(10)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in (1, 2)]
    with MemoryTracker() as tracker:
        for thread in threads:
            thread.start()
        ready.wait(10)
        ready.wait(10)
    for thread in threads:
        thread.join(10)
    assert results == {rank: {("device", "activations"): 4 * rank * FLOAT} for rank in (1, 2)}
    assert tracker.live == {} and tracker.peak_bytes() == 0


def test_storages_may_be_freed_in_another_thread():
    with MemoryTracker() as tracker:
        messages = [torch.zeros(100) for _ in range(3)]
        assert activations(tracker) == 1200
        thread = threading.Thread(target=messages.clear)
        thread.start()
        thread.join(10)
        kept = torch.zeros(1)
    assert tracker.live == {("device", "activations"): 4}
    assert tracker.peak_bytes() == 1200
    assert kept.numel() == 1


def test_a_tracker_can_be_left_and_entered_again():
    tracker = MemoryTracker()
    with tracker:
        first = torch.zeros(1)
    outside = torch.zeros(2)
    with tracker:
        second = torch.zeros(4)
    assert tracker.live == {("device", "activations"): 20}
    assert first.numel() + outside.numel() + second.numel() == 7


def enter(tracker, place):
    with tracker.category("messages", place=place):
        pass


@pytest.mark.parametrize("use, where", [
    (lambda tracker, place: tracker.tag([torch.zeros(1)], "moments", place=place), "MemoryTracker.tag(place=...)"),
    (enter, "MemoryTracker.category(place=...)"),
    (lambda tracker, place: tracker.peak_bytes(place), "MemoryTracker.at_peak(place)"),
    (lambda tracker, place: tracker.at_peak(place), "MemoryTracker.at_peak(place)"),
])
def test_an_unknown_place_is_an_error(use, where):
    tracker = MemoryTracker()
    with raises("unknown-memory-place", "disk") as caught:
        use(tracker, "disk")
    assert caught.value.where == where
    assert tracker.live == {}


def test_tagging_names_instead_of_tensors_is_an_error():
    with raises("tag-not-tensor", "weight"):
        MemoryTracker().tag(nn.Linear(2, 2).state_dict(), "parameters")


def test_tensors_without_a_storage_are_an_error():
    sparse, tracker = torch.eye(3).to_sparse(), MemoryTracker()
    with raises("tensor-without-storage", "Tensor", "torch.sparse_coo"):
        tracker.tag([sparse], "parameters")
    with raises("tensor-without-storage"), tracker:
        sparse * 2
    with MemoryTracker() as after:
        kept = torch.zeros(1)
    assert activations(after) == 4 and kept.numel() == 1


class Wrapper(torch.Tensor):
    """Holds another tensor, and nothing itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Wrapper(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_tensors_that_wrap_others_count_as_those():
    wrapper, tracker = Wrapper(torch.zeros(3)), MemoryTracker()
    tracker.tag([wrapper], "parameters")
    tracker.tag([wrapper.inner], "parameters")
    assert tracker.live == {("device", "parameters"): 12}
