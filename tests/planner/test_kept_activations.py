"""What a block keeps for its backward, as counted on the meta device and as torch keeps it: compiled, and with
attention by plain products."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ranvier import keyed_random
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Transformer
from ranvier.models import families
from ranvier.plan.block_costs import KeptBytes, block_costs
from ranvier.plan.kernel_count import Counting
from ranvier.testing.memory import MemoryTracker

SAMPLES = 4


def blocks_of(family, counting, **sizes):
    """(counted cost, module, its state) of each block, in bf16."""
    run = ResolvedRun(precision="bf16", model=Transformer(
        family=family, num_layers=1, hidden=256, heads=4, vocab=512, sequence=128, **sizes))
    model = families.model_of(run, dtype=torch.bfloat16)
    with torch.device("meta"):
        inputs, targets = families.sample_of(run, SAMPLES)
    costs = block_costs(model, inputs, targets, torch.bfloat16, counting)
    state = families.sample_of(run, SAMPLES)[0]
    for cost, build in zip(costs, model.blocks.values(), strict=True):
        module = build().to(torch.bfloat16)
        yield cost, module, state.detach().requires_grad_(state.is_floating_point())
        with torch.no_grad(), scope():
            state = module(state)


def scope():
    """A scope with keys of dropout, which are inputs of a compiled block's graph."""
    found = keyed_random.scope(0, 0, torch.zeros(SAMPLES, dtype=torch.int64))
    found.keys = torch.arange(2 * SAMPLES).view(2, SAMPLES)
    return found


def kept(module, state, forward):
    found = KeptBytes(module.parameters())
    with found, scope():
        forward(state)
    return found.count


@pytest.mark.parametrize(("family", "sizes"), [
    pytest.param("llama", {}, marks=pytest.mark.slow), ("llama", {"kv_heads": 2, "qk_norm": "head"}),
    pytest.param("gpt", {"dropout": 0.1}, marks=pytest.mark.slow)])
def test_a_compiled_block_keeps_what_is_counted(family, sizes):
    """torch's own partitioner of forward and backward decides, as with inductor."""
    torch._dynamo.reset()
    counted, plain = 0, 0
    for cost, module, state in blocks_of(family, Counting(compiles=True), **sizes):
        compiled = torch.compile(module, backend="aot_eager_decomp_partition", fullgraph=True)
        assert kept(module, state, compiled) == pytest.approx(cost.kept_bytes, rel=0.01)
        counted, plain = counted + cost.kept_bytes, plain + kept(module, state, module)
    assert counted < (0.75 if family == "llama" else 0.96) * plain


def test_dropout_on_a_cpu_keeps_numbers():
    """On CUDA and in compiled blocks it keeps flags. While numbers are drawn more is alive, which is counted."""
    for cost, module, state in blocks_of("gpt", Counting(is_live=True), dropout=0.1):
        assert kept(module, state, module) == pytest.approx(cost.kept_bytes, rel=0.01)
        with MemoryTracker() as tracker, scope():
            module(state)
        made = cost.kept_bytes + cost.forward_bytes - cost.input_bytes
        assert tracker.peak_bytes() == pytest.approx(made, rel=0.01)
    of_cpu, of_cuda = (sum(cost.kept_bytes for cost, *_ in blocks_of("gpt", Counting(on_cuda=on_cuda), dropout=0.1))
                       for on_cuda in (False, True))
    assert of_cpu - of_cuda == 3 * SAMPLES * 128 * 256


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt"])
def test_attention_by_products_keeps_its_scores(family):
    for cost, module, state in blocks_of(family, Counting(has_scores=True)):
        with sdpa_kernel(SDPBackend.MATH):
            assert kept(module, state, module) == pytest.approx(cost.kept_bytes, rel=0.01)
        fused = kept(module, state, module)
        assert (cost.kept_bytes > fused + 4 * SAMPLES * 4 * 128 ** 2) == ("attention" in cost.name)
