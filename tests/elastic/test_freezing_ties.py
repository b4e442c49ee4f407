"""Freezing ends ties: the lookup keeps its weights, and the head still trains. Every mesh matches plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ranvier.block import Initial, Model, freeze, untrained_layers
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.hf.from_pretrained import load_pretrained
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.state import pieces_held
from ranvier.config.run import Lora, Optim, TensorParallel
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.elastic.freezing import FrozenLayers
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.models.lora import with_adapters
from ranvier.pipeline.engine import Engine
from ranvier.plan.block_costs import build_on_meta
from ranvier.plan.cut import global_parameters
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, LLAMA, SEED
from tests.elastic.test_transition import SAMPLES, Layouts
from tests.errors import raises

LOOKUP, HEAD = "embedding.token.weight", "head.projection.weight"
OPTIM = Optim(bucket_size=64, chunk_buckets=2, weight_decay=0.1)
RATE = 1e-2
ABOVE = FrozenLayers(0, (1,))


def model_of(family):
    if family == "llama":
        return llama(LLAMA, dtype=torch.float64)
    return gpt(replace(CONFIG, dropout=0.0), dtype=torch.float64)


class Plain:
    """The same training in plain PyTorch: one process, one graph, torch's AdamW. factors: of learning rates and decays
    of parameters, by name."""

    def __init__(self, family, groups=None):
        self.reference, self.groups = Reference(model_of(family), seed=SEED, dtype=torch.float64), groups or {}
        self.states = {}
        self.step = 0

    def freeze(self, layers, above=()):
        """Freeze the embedding, the blocks of the first layers, and those of the layers above. Other layers train, and
        get new optimizer states if they were frozen. When the embedding freezes, the head gets a copy of it with its
        optimizer states."""
        modules, parameters = self.reference.modules, self.reference.parameters
        if layers and HEAD not in parameters:
            modules["head"].projection.weight = nn.Parameter(parameters[LOOKUP].detach().clone())
            parameters[HEAD] = modules["head"].projection.weight
            if LOOKUP in self.states:
                self.states[HEAD] = {name: state.clone() for name, state in self.states[LOOKUP].items()}
        names = {*["embedding"] * bool(layers),
                 *(f"layer{layer}.{part}" for layer in (*range(layers), *above) for part in ("attention", "mlp"))}
        for block, module in modules.items():
            module.requires_grad_(block not in names)
            for name in module.state_dict() if block in names else ():
                self.states.pop(f"{block}.{name}", None)

    def train(self):
        """Loss and gradients of one step, and AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""
        samples = Sampler(len(SAMPLES), SEED).global_batch(self.step, GLOBAL_SIZE)
        loss = self.reference.forward_backward([(SAMPLES.inputs(samples), SAMPLES.targets(samples))])
        gradients, self.step = self.reference.gradients(), self.step + 1
        with torch.no_grad():
            for name, gradient in gradients.items():
                state = self.states.setdefault(name, {"m": torch.zeros_like(gradient), "v": torch.zeros_like(gradient),
                                                      "steps": torch.zeros(())})
                state["steps"] += 1
                state["m"].mul_(0.9).add_(gradient, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                factor, decay = self.groups.get(name, (1.0, 0.1))
                parameter, rate = self.reference.parameters[name], RATE * factor
                parameter.mul_(1 - rate * decay)
                steps = int(state["steps"])
                m, v = state["m"] / (1 - 0.9 ** steps), state["v"] / (1 - 0.999 ** steps)
                parameter.sub_(rate * m / (v.sqrt() + 1e-8))
        return loss, gradients


def step_of(layouts, number):
    """The loss of a step, and this rank's parts of the gradients: name -> (shape, box, part)."""
    engine = layouts.engine
    if engine is None:
        return None
    mesh, at = engine.mesh, engine.coordinates
    loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=2,
                    replica=at.data, num_replicas=mesh.data, part=at.row, num_parts=mesh.row,
                    needs_inputs=engine.is_first_stage, needs_targets=engine.is_last_stage)
    engine.learning_rate = RATE
    result = engine.forward_backward(loader.microbatches(number))
    ends = engine.layout.ends_on(at.pipe)
    gradients = {name: (engine.layout[name].shape, engine.layout.box(ends[name], at.position), gradient.clone())
                 for name, gradient in engine.gradients().items()}
    engine.step(result)
    return result.loss, gradients


def whole(found):
    """The full gradients, assembled from the parts of all ranks."""
    gradients, seen = {}, {}
    for _, parts in (each for each in found if each is not None):
        for name, (shape, box, part) in parts.items():
            place = tuple(slice(start, stop) for start, stop in box)
            gradients.setdefault(name, torch.zeros(shape, dtype=torch.float64))[place] = part
            seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))[place] = True
    assert all(mask.all() for mask in seen.values())
    return gradients


def assert_as_in_plain_pytorch(family, ways, steps=2, groups=None, **options):
    """Compare every step's loss and raw gradients. ways: (mesh, frozen layers), with `steps` steps on each."""
    size = max(mesh.size for mesh, _ in ways)

    def work(world):
        layouts = Layouts(world, ways[0][0], frozen=ways[0][1], model=model_of(family), **{"optim": OPTIM, **options})
        found = [step_of(layouts, number) for number in range(steps)]
        for mesh, depth in ways[1:]:
            layouts.move(mesh, depth)
            found += [step_of(layouts, len(found) + number) for number in range(steps)]
        layouts.close()
        return found

    ranks = run_ranks(work, size, timeout_seconds=120.0)
    plain = Plain(family, groups)
    for number in range(steps * len(ways)):
        frozen = ways[number // steps][1]
        frozen = frozen if isinstance(frozen, FrozenLayers) else FrozenLayers(frozen)
        if number % steps == 0:
            plain.freeze(frozen.prefix, frozen.above)
        loss, expected = plain.train()
        found = [rank[number] for rank in ranks]
        gradients = whole(found)
        assert all(each[0] == pytest.approx(loss, rel=1e-10) for each in found if each is not None)
        assert gradients.keys() == expected.keys()
        assert (HEAD in gradients) == (LOOKUP not in gradients) == bool(frozen.prefix)
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm()) <= 1e-9 * max(float(gradient.norm()), 1e-6), name


@pytest.mark.parametrize(("family", "ways", "options"), [
    pytest.param("gpt", [(Mesh(pipe=4), 0), (Mesh(pipe=4), 1), (Mesh(data=2, pipe=2), 1), (Mesh(data=4), 2)], {},
                 id="pipe 4 to pipe 2 x data 2 to data 4", marks=pytest.mark.slow),
    pytest.param("llama", [(Mesh(row=2, col=2), 0), (Mesh(pipe=2, col=2), 1), (Mesh(row=2), 2)],
                 {"optim": replace(OPTIM, shard=True)}, id="rows and columns, sharded", marks=pytest.mark.slow),
    pytest.param("gpt", [(Mesh(pipe=2, row=2), 1), (Mesh(col=2), 1), (Mesh(data=2), 2)], {},
                 id="frozen from the start", marks=pytest.mark.slow),
    pytest.param("llama", [(Mesh(pipe=4), 0), (Mesh(data=2, pipe=2), 2)], {}, id="both layers at once",
                 marks=pytest.mark.slow),
    pytest.param("gpt", [(Mesh(pipe=4), 0), (Mesh(data=2, pipe=2), 2), (Mesh(pipe=4), 1), (Mesh(data=2), 1)], {},
                 id="the second layer trains again", marks=pytest.mark.slow),
    pytest.param("gpt", [(Mesh(pipe=4), ABOVE), (Mesh(data=2, pipe=2), 0), (Mesh(pipe=2), ABOVE), (Mesh(data=2), 2)],
                 {}, id="weights of the second layer alone"),
    pytest.param("llama", [(Mesh(row=2, col=2), 0), (Mesh(data=2, col=2), ABOVE)],
                 {"optim": replace(OPTIM, shard=True)}, id="weights alone, on rows and columns",
                 marks=pytest.mark.slow),
    pytest.param("llama", [(Mesh(pipe=2), 2), (Mesh(row=2, col=2), 1), (Mesh(row=2), 2), (Mesh(data=2), 1)],
                 {"optim": replace(OPTIM, shard=True)}, id="and again"),
    pytest.param("gpt", [(Mesh(col=2), 0), (Mesh(col=2), 1)], {"tensor": TensorParallel(scheme="summa")}, id="summa",
                 marks=pytest.mark.slow),
    pytest.param("llama", [(Mesh(data=2, pipe=2), 0), (Mesh(pipe=2), 1)], {"optim": replace(OPTIM, offload="host")},
                 id="states on the host", marks=pytest.mark.slow)])
def test_a_run_is_that_of_plain_pytorch(family, ways, options):
    assert_as_in_plain_pytorch(family, ways, **options)


def test_settings_that_name_the_embedding_go_on_to_mean_the_head():
    optim = replace(OPTIM, groups=("embedding.token.*:0.5:0.3",))
    assert_as_in_plain_pytorch("gpt", [(Mesh(pipe=2), 0), (Mesh(data=2), 1)], optim=optim,
                               groups={LOOKUP: (0.5, 0.3), HEAD: (0.5, 0.3)})


def test_master_copies_and_states_go_along_to_the_bit():
    """In bf16 the head has the embedding's fp32 master copy and moments; the frozen lookup has neither."""
    def pieces(layouts):
        return {(piece.kind, piece.name): piece.tensor.clone() for piece in pieces_held(layouts.engine)}

    def work(world):
        layouts = Layouts(world, Mesh(pipe=2), dtype=torch.bfloat16, optim=OPTIM)
        layouts.step(0)
        before = pieces(layouts)
        layouts.move(Mesh(pipe=2), 1)
        after = pieces(layouts)
        layouts.close()
        return before, after

    (first, lookup), (_, head) = run_ranks(work, 2, timeout_seconds=60.0)
    for kind in ("parameter", "master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(head[kind, HEAD], first[kind, LOOKUP]) and head[kind, HEAD].any()
    assert torch.equal(lookup["parameter", LOOKUP], first["parameter", LOOKUP])
    assert not {(kind, name) for kind, name in lookup if kind != "parameter" and name.startswith("embedding.")}


def test_a_frozen_engine_reads_a_folder_with_a_tied_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=CONFIG.vocab, n_positions=CONFIG.sequence, n_embd=CONFIG.hidden, n_layer=CONFIG.num_layers,
        n_head=CONFIG.heads))
    model.save_pretrained(tmp_path)

    def work(world):
        engine = Engine(gpt(CONFIG), world, mesh=Mesh(pipe=2), frozen=1, optim=Optim())
        notes = load_pretrained(engine, Pretrained(tmp_path))
        found = engine.named_parameters()
        engine.close()
        return notes, found

    (notes, first), (_, last) = run_ranks(work, 2)
    table = model.get_input_embeddings().weight
    assert notes == [] and torch.equal(first[LOOKUP], table) and torch.equal(last[HEAD], table)


# ---------------------------------------------------------------------- which ties end


def names_of(model):
    return {parameter.name: (parameter.owner, parameter.origin, parameter.trainable)
            for parameter in global_parameters(model, build_on_meta(model))}


def test_a_tie_of_adapted_models_stays():
    """With adapters both ends are frozen anyway, so they share one table."""
    model = freeze(with_adapters(model_of("gpt"), Lora(rank=2, targets=("layer1.*",))), 1)
    assert names_of(model)[HEAD] == (LOOKUP, None, False) and not model.untied


def test_layers_in_which_nothing_trains():
    plain = model_of("gpt")
    assert untrained_layers(plain) == 0
    assert untrained_layers(with_adapters(plain, Lora(rank=2, targets=("layer1.*",)))) == 1
    assert untrained_layers(with_adapters(plain, Lora(rank=2))) == 0
    assert untrained_layers(freeze(plain, 2)) == 2


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight


def test_ends_that_freeze_at_different_depths_have_weights_of_their_own():
    """ALBERT's layers, for example, share weights. The end that froze first stays unchanged when the others freeze."""
    model = Model(blocks={f"b{number}": Scale for number in range(4)}, loss=lambda y, target: (y.sum(), y.numel()),
                  tied=(("b3.weight", "b0.weight", "b1.weight", "b2.weight"),), layers=(("b0", "b1"), ("b2",)),
                  initial=lambda name: Initial("normal", 1.0))
    assert names_of(freeze(model, 1)) == {
        "b0.weight": ("b0.weight", "b3.weight", False), "b1.weight": ("b0.weight", None, False),
        "b2.weight": ("b3.weight", None, True), "b3.weight": ("b3.weight", None, True)}
    assert names_of(freeze(model, 2)) == {
        "b0.weight": ("b0.weight", "b3.weight", False), "b1.weight": ("b0.weight", None, False),
        "b2.weight": ("b2.weight", "b3.weight", False), "b3.weight": ("b3.weight", None, True)}


def test_a_layer_that_shares_weights_freezes_with_all_before_it():
    model = Model(blocks={f"b{number}": Scale for number in range(3)}, loss=lambda y, target: (y.sum(), y.numel()),
                  tied=(("b2.weight", "b0.weight"),), layers=(("b0",), ("b1",), ("b2",)))
    freeze(model, 0, [1])
    for layer in (0, 1, 3):
        with raises("frozen-above-layer", 1, 3, layer):
            freeze(model, 1, [layer])
    with raises("frozen-shared-weight", 2, "b2.weight"):
        freeze(model, 1, [2])


def test_modules_that_share_a_parameter():
    """Of a user's existing modules, the frozen block gets its own parameter, with the values of the shared one."""
    def make():
        blocks = [Scale() for _ in range(3)]
        blocks[2].weight = blocks[0].weight
        with torch.no_grad():
            blocks[0].weight.copy_(torch.arange(3.0) + 1)
        return Model(blocks={f"b{number}": lambda block=block: block for number, block in enumerate(blocks)},
                     loss=lambda y, target: (y.square().sum(), y.numel()), tied=(("b0.weight", "b2.weight"),),
                     layers=(("b0",), ("b1",)))

    models = [make() for _ in range(2)]

    def work(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(pipe=2), frozen=1, dtype=torch.float64,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        x = torch.ones(2, 3, dtype=torch.float64)
        engine.train_batch([(x if engine.is_first_stage else None, x if engine.is_last_stage else None)])
        found = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        engine.close()
        return found

    first, second = run_ranks(work, 2)
    found, start = first | second, torch.arange(3.0, dtype=torch.float64) + 1
    assert torch.equal(found["b0.weight"], start)
    # loss: mean of (start w1 w2)^2 with w1 = 1 and w2 = start
    torch.testing.assert_close(found["b2.weight"], start - 0.1 * 2 * start ** 3 * 2 / 6)


# ---------------------------------------------------------------------- checkpoints


def test_checkpoints_have_both_ends_and_fit_any_mesh(tmp_path):
    """A frozen engine reads a checkpoint from before freezing; only frozen engines read one from after it."""
    ways = [(Mesh(pipe=4), 0), (Mesh(data=2, pipe=2), 1), (Mesh(row=2, col=2), 1), (Mesh(), 2)]

    def on(mesh, depth, number):
        def work(world):
            layouts = Layouts(world, mesh, frozen=depth, model=model_of("gpt"), optim=OPTIM)
            checkpoints = Checkpoints(layouts.engine, tmp_path)
            loaded = checkpoints.load()
            assert (0 if loaded is None else loaded.step) == number
            found = step_of(layouts, number)
            checkpoints.save()
            checkpoints.wait()
            checkpoints.close()
            layouts.close()
            return found

        return run_ranks(work, mesh.size, timeout_seconds=60.0)

    plain = Plain("gpt")
    for number, (mesh, depth) in enumerate(ways):
        found = on(mesh, depth, number)
        if depth:
            plain.freeze(depth)
        loss, expected = plain.train()
        gradients = whole(found)
        assert found[0][0] == pytest.approx(loss, rel=1e-10) and gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name
    with raises("checkpoint-untied", "head.projection.weight", "embedding.token.weight"):
        on(Mesh(), 0, 4)
