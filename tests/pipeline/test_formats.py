"""Which tensors an engine's dtype casts, which stay in fp32, and what is reported about it."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from ranvier.block import as_model
from ranvier.config.run import Optim
from ranvier.errors import ConfigError, ModelError
from ranvier.mesh import Mesh
from ranvier.models.blocks_of import blocks_of
from ranvier.models.from_transformers import from_transformers
from ranvier.pipeline.engine import Engine
from ranvier.plan.block_costs import block_costs
from ranvier.plan.formats import BlockFormats
from ranvier.testing.ranks import run_ranks
from tests.errors import check
from tests.pipeline.parity import squared

HALF = torch.bfloat16


class Gated(nn.Module):
    """A block whose gate computes in fp32, as routers do, with a table in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self, x):
        return self.linear(x) * torch.sigmoid(self.gate(x.float())).to(x.dtype) + self.table.to(x.dtype)


def run(blocks, work, mesh=None, **options):
    mesh = mesh or Mesh()
    blocks = [copy.deepcopy(blocks) for _ in range(mesh.size)]

    def rank(world):
        engine = Engine(blocks[world.rank], world, mesh=mesh, **({"loss": squared, "dtype": HALF} | options))
        result = work(engine)
        engine.close()
        return result

    return run_ranks(rank, mesh.size)


@pytest.mark.parametrize(("others", "dtype", "told"), [
    ([], torch.bfloat16, "in torch.bfloat16, and trains in fp32"),
    ([], torch.float16, "in torch.float16, and trains in fp32"),
    ([nn.Linear(4, 4)], torch.float64, "some parameters are in fp64, and train in fp32")], ids=["bf16", "fp16", "fp64"])
def test_a_model_that_trains_in_another_format_is_told(others, dtype, told):
    def formats(**options):
        return run_ranks(lambda world: {one.dtype for one in Engine(
            [*others, nn.Linear(4, 4).to(dtype)], world, loss=squared, **options).parameters()}, 1)

    with pytest.warns(UserWarning, match=told):
        assert formats() == [{torch.float32}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert formats(dtype=dtype) == [{dtype}]


def formats(engine):
    return {name: one.dtype for name, one in (*engine.named_parameters().items(), *engine.named_buffers().items())}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)])
def test_what_is_named_stays_in_fp32_and_what_is_cast_is_told(mesh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run([Gated(), Gated()], lambda engine: (formats(engine), engine.cast_buffers), mesh,
                      keep_fp32=["*.gate", "1.table"])
    found = {name: one for formats_here, _ in results for name, one in formats_here.items()}
    assert found == {f"{block}.{name}": torch.float32 if name.startswith("gate") or (block, name) == (1, "table")
                     else HALF for block in range(2) for name in (
                         "linear.weight", "linear.bias", "gate.weight", "gate.bias", "table")}
    assert [cast for _, cast in results] == [{"0.table": torch.float32}, {}][:mesh.size]
    assert ["0.table" in str(one.message) and "keep_fp32" in str(one.message) for one in caught] == [True]


def test_parameters_in_fp32_train_beside_others():
    torch.manual_seed(0)
    block, x, y = Gated(), torch.randn(6, 4), torch.randn(6, 4)
    plain = copy.deepcopy(block).to(HALF)
    plain.gate.float()
    plain.gate.load_state_dict(block.gate.state_dict())
    optimizer = torch.optim.SGD(plain.gate.parameters(), lr=0.1)
    total, weight = squared(plain(x.to(HALF)), y.to(HALF))
    (total.float() / weight).backward()
    optimizer.step()

    def work(engine):
        engine.train_batch([(x.to(HALF), y.to(HALF))])
        return {name: one.clone() for name, one in engine.named_parameters().items()}

    found, = run([block], work, keep_fp32="*.gate", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    for name, expected in plain.gate.named_parameters():
        assert found[f"0.gate.{name}"].dtype is torch.float32
        torch.testing.assert_close(found[f"0.gate.{name}"], expected, rtol=0, atol=2e-3)


def test_costs_are_counted_in_these_formats():
    seen = []

    class Seen(Gated):
        def forward(self, x):
            seen.append((self.linear.weight.dtype, self.gate.weight.dtype))
            return super().forward(x)

    model = replace(as_model([Seen()], squared), keep_fp32=("0.gate",))
    block_costs(model, torch.zeros(3, 4, dtype=HALF), dtype=HALF)
    assert seen == [(HALF, torch.float32)]


def refusal(blocks, kind, **options):
    with pytest.raises(kind) as refused:
        run(blocks, lambda engine: None, **options)
    return refused.value


def test_what_is_refused():
    error = refusal([Gated()], ConfigError, keep_fp32=["0.gates"])
    check(error, "keep-fp32-without-match", where="keep_fp32", value="0.gates")
    error = refusal([Gated()], ConfigError, keep_fp32=["*.gate"], optim=Optim())
    assert error.where == "parameter 0.gate.weight" and "optimizer=" in error.remedy
    error = refusal([Gated()], ConfigError, keep_fp32=["*.gate"], optim=Optim(accumulate="half"),
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    check(error, "trains-in-two-formats", where="parameter 0.gate.weight")
    assert "accumulate" in error.remedy
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    error = refusal([first, second], ModelError, keep_fp32=["1"])
    check(error, "keep-fp32-partly", "1.weight", where="parameter 0.weight")
    same = Gated()
    error = refusal([same, nn.Linear(4, 4), nn.Sequential(same)], ModelError, keep_fp32=["0.table"])
    assert error.where == "buffer 2.0.table" and "0.table" in error.what and "2.0.table" in error.remedy
    frozen = Gated()
    frozen.gate.requires_grad_(False)
    run([frozen], lambda engine: None, keep_fp32=["*.gate", "*.table"], optim=Optim())


def test_a_shared_buffer_that_is_named_in_all_blocks_stays_in_fp32():
    same = Gated()
    for mesh in (Mesh(), Mesh(pipe=2)):
        for found in run([same, nn.Linear(4, 4), nn.Sequential(same)], formats, mesh, keep_fp32=["*.table"]):
            assert {one for name, one in found.items() if name.endswith("table")} == {torch.float32}


def test_it_has_no_effect_beside_full_precision():
    with pytest.warns(UserWarning, match="no effect"):
        found, = run([Gated()], formats, keep_fp32=["*.gate"], dtype=torch.float64)
    assert set(found.values()) == {torch.float64}


@pytest.mark.parametrize(("keep", "expected"), [((), HALF), (("a.*",), torch.float32)])
def test_a_buffer_under_several_names_stays_one(keep, expected):
    """Two modules that share a buffer, and one module in two places."""
    class Table(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.register_buffer("table", table)

    table = torch.linspace(0, 1, 4, dtype=torch.float64)
    inner = Table(table)
    block = nn.ModuleDict({"one": nn.Sequential(inner), "two": nn.Sequential(inner), "other": Table(table)})
    model = replace(as_model({"a": block}, squared), keep_fp32=keep)
    cast = BlockFormats.from_block(model, "a", block, HALF).cast(block, torch.device("cpu"))
    assert block["one"][0].table is block["two"][0].table is block["other"].table
    assert block["other"].table.dtype is expected and cast == {"one.0.table": torch.float64}


class Counted(nn.Module):
    """Code around the cut counts the forwards in a buffer, which is used before and after the cut."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.b(self.a(x * self.count.clone()) * self.count.clone())


def test_a_buffer_of_several_blocks_stays_one():
    module = Counted()
    plain = copy.deepcopy(module).double()
    batch = [(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)) for _ in range(2)]
    expected = [sum(float((plain(x) - y).square().sum().detach()) for x, y in batch) / 24 for _ in range(3)]

    def work(world):
        engine = Engine(blocks_of(module), world, loss=squared, dtype=torch.float64)
        losses = []
        for _ in range(3):
            losses.append(engine.forward_backward(batch).loss)
            engine.zero_grad()
        return losses

    losses, = run_ranks(work, 1)
    assert losses == pytest.approx(expected, rel=1e-12)


def test_complex_tensors_stay_complex():
    block = nn.Linear(2, 2)
    block.register_buffer("waves", torch.ones(3, dtype=torch.complex64))
    for dtype, expected in ((HALF, torch.complex64), (torch.float32, torch.complex64),
                            (torch.float64, torch.complex128)):
        one = copy.deepcopy(block)
        BlockFormats.from_block(as_model([one], squared), "0", one, dtype).cast(one, torch.device("cpu"))
        assert one.waves.dtype is expected and one.weight.dtype is dtype


# ---------------------------------------------------------------------- models of transformers


def llama(**settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=11,
        max_position_embeddings=1024, initializer_range=0.5, **settings))


def test_rotary_frequencies_of_transformers_keep_their_precision(tmp_path):
    llama().save_pretrained(tmp_path)
    theirs = type(llama()).from_pretrained(tmp_path, dtype=HALF)
    ids = torch.randint(0, 11, (1, 1024), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
    cut = from_transformers(llama(), ids.expand(2, -1))

    def rank(world):
        engine = Engine(cut, world, mesh=Mesh(), dtype=HALF)
        outputs, buffers = engine.predict([(ids, ids)]), dict(engine.blocks["embedding"].named_buffers())
        engine.close()
        return outputs[0], buffers, engine.cast_buffers

    (found, buffers, cast), = run_ranks(rank, 1)
    assert {one.dtype for name, one in buffers.items() if "inv_freq" in name} == {torch.float32} and not cast
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype, kept", [(HALF, {"input_layernorm"}), (torch.float32, set()),
                                         (torch.float16, {"input_layernorm", "mlp"})])
def test_what_a_model_of_transformers_keeps_in_fp32(dtype, kept):
    model = llama()
    model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules = {"input_layernorm"}, ["mlp"]
    for cut in (from_transformers(model), as_model([model], squared)):
        found = {name for block, build in cut.blocks.items()
                 for name in BlockFormats.from_block(cut, block, build(), dtype).kept if "inv_freq" not in name}
        assert {part for name in found for part in ("input_layernorm", "mlp") if f".{part}." in name} == kept
        assert all(any(f".{part}." in name for part in kept) for name in found)


def test_blocks_of_code_around_cuts_keep_them_too():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("inv_freq", torch.ones(4), persistent=False)

        def forward(self, x):
            return self.last(self.first(x) * self.inv_freq)

    Rotary.__module__ = "transformers.models.some"
    blocks = blocks_of(Rotary(), ["last"])
    cut = as_model(blocks, squared)
    assert {f"{name}.{one}" for name, module in blocks.items()
            for one in BlockFormats.from_block(cut, name, module, HALF).kept} == {"first.inv_freq"}


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(("given", "asked", "found"), [
    (torch.float64, {}, torch.float64), (torch.float64, {"dtype": torch.float32}, torch.float32),
    (torch.float64, {"autocast": HALF}, torch.float32), (torch.float32, {}, torch.float32),
    (torch.bfloat16, {}, torch.float32)], ids=str)
def test_a_model_in_fp64_trains_so_by_itself(given, asked, found, cuts):
    def work(world):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(given)
        engine = Engine(blocks_of(model) if cuts else model, world, mesh=Mesh(pipe=2), loss=squared, optim=Optim(),
                        **asked)
        engine.train_batch([(torch.ones(2, 4, dtype=found), torch.zeros(2, 2, dtype=found))])
        return {parameter.dtype for parameter in engine.parameters()}

    assert run_ranks(work, 2) == [{found}] * 2
