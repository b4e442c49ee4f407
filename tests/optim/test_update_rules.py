"""Muon, Adafactor and Lion: equal to torch's on every mesh, wherever states are."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.arguments import literal_values
from ranvier.config.read import settings
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.optim.adafactor import Adafactor
from ranvier.optim.rules import rules_of
from ranvier.optim.tensor_update import TensorUpdate
from ranvier.testing.reference import Reference, relative_error
from tests.covering import first
from tests.pipeline.parity import frozen
from tests.tensor.split_parity import SEED, every, on_mesh, share, tiny_gpt, token_batches

RATE, DECAY = 1e-2, 0.1
ALGORITHMS = ("muon", "adafactor", "lion", "adamw")


def model(**changed):
    """Without biases of keys, whose gradients are zero but for rounding, which signs and norms would magnify."""
    return frozen(tiny_gpt(num_layers=2, tied=True, hidden=24, heads=4, **changed),
                  lambda name: name.endswith("qkv.bias"))



class PlainLion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            update = torch.sign(0.9 * momentum + 0.1 * parameter.grad)
            parameter -= RATE * (update + DECAY * parameter)
            momentum.copy_(0.99 * momentum + 0.01 * parameter.grad)


class TorchsMuon:
    """torch.optim.Muon for the matrices of layers and AdamW for the rest."""

    def __init__(self, parameters, names, adjust="match_rms_adamw"):
        hidden = {name for name, one in names.items() if one.dim() == 2 and ("attention" in name or "mlp" in name)}
        assert hidden and len(hidden) < len(names)
        self.parts = [torch.optim.Muon([names[name] for name in names if name in hidden], lr=RATE, weight_decay=DECAY,
                                       momentum=0.9, adjust_lr_fn=adjust),
                      torch.optim.AdamW([names[name] for name in names if name not in hidden], lr=RATE,
                                        weight_decay=DECAY)]

    def step(self):
        for part in self.parts:
            part.step()


def torchs(algorithm, names, **options):
    names = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
    parameters = list(names.values())
    return {"muon": lambda: TorchsMuon(parameters, names, **options), "lion": lambda: PlainLion(parameters),
            "adafactor": lambda: torch.optim.Adafactor(parameters, lr=RATE, weight_decay=DECAY, foreach=False),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)}[algorithm]()


def optim_of(algorithm, **options):
    betas = (0.9, 0.99) if algorithm == "lion" else (0.9, 0.999)
    return Optim(**{"algorithm": algorithm, "betas": betas, "weight_decay": DECAY, "bucket_size": 150,
                    "chunk_buckets": 3, **options})


@pytest.fixture
def in_fp64(monkeypatch):
    """torch's Newton-Schulz steps in the gradients' format instead of bf16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


STEPS = 3


def expected_of(algorithm, batches, **options):
    reference = Reference(model(), seed=SEED, dtype=torch.float64)
    optimizer = torchs(algorithm, reference.parameters, **options)
    for batch in batches:
        reference.forward_backward(every(batch))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in reference.parameters.items()}


def assert_equal_weights(found, expected, layout):
    for rank, weights in enumerate(found):
        at = layout.mesh.coordinates(rank)
        for name, value in weights.items():
            one = layout.ends_on(at.pipe)[name]
            place = tuple(slice(*edges) for edges in layout.box(one, at.position))
            assert relative_error(value, expected[layout[name].owner][place]) <= 1e-12, (rank, name)


def trained(algorithm, mesh, batches, **options):
    def work(engine):
        for batch in batches:
            engine.train_batch(share(engine, batch))
        return {name: value.detach().clone() for name, value in engine.named_parameters().items()}, engine.layout

    found = on_mesh(model, mesh, work, optim=optim_of(algorithm, **options), learning_rate=RATE)
    return [weights for weights, _ in found], found[0][1]


WAYS = [{}, {"shard": True}, {"offload": "stream"}, {"offload": "host", "shard": True}, {"clip_norm": 1e6}]
CASES = [(algorithm, mesh, WAYS[(first + number) % len(WAYS)]) for first, algorithm in enumerate(ALGORITHMS)
         for number, mesh in enumerate([Mesh(data=2, pipe=2), Mesh(data=2, row=2), Mesh(data=2, col=2),
                                        Mesh(data=2, row=2, col=2), Mesh(pipe=2, row=2)])
         if algorithm != "adamw" or number == 0]
QUICK = {"muon": Mesh(pipe=2, row=2), "adafactor": Mesh(data=2, col=2)}
"""Meshes on which `make test` tries an algorithm, if not two replicas of two stages."""


def test_all_algorithms_are_compared():
    """SGD is compared with torch's in `test_optimizer`."""
    assert set(literal_values(settings()["optim.algorithm"].annotation)) == {*ALGORITHMS, "sgd"}, (
        "add the new algorithm to ALGORITHMS, and a reference in plain torch to `torchs`")


@pytest.mark.parametrize(("algorithm", "mesh", "way"), first([case for case in CASES if case[1] == QUICK.get(
    case[0], Mesh(data=2, pipe=2))], CASES), ids=str)
def test_equals_torch_on_every_mesh(algorithm, mesh, way, in_fp64):
    """Each replica has its own data; Newton-Schulz steps and row and column means are those of full matrices."""
    batches = [token_batches(mesh, count=2, seed=number) for number in range(STEPS)]
    found, layout = trained(algorithm, mesh, batches, **way)
    assert_equal_weights(found, expected_of(algorithm, batches), layout)


@pytest.mark.parametrize("algorithm", ["muon", "adafactor"])
def test_updates_in_the_backward(algorithm, in_fp64):
    mesh = Mesh(data=2, pipe=2)
    batches = [token_batches(mesh, count=1, seed=number) for number in range(2)]
    found, layout = trained(algorithm, mesh, batches, update_in_backward=True, shard=True)
    assert_equal_weights(found, expected_of(algorithm, batches), layout)


def test_muons_original_scale_is_torchs(in_fp64):
    batches = [token_batches(Mesh(), count=1)]
    found, layout = trained("muon", Mesh(), batches, muon_scale="original")
    assert_equal_weights(found, expected_of("muon", batches, adjust="original"), layout)


def test_muon_in_bf16_is_torchs_on_fp32_copies():
    """Its Newton-Schulz steps are in bf16, as torch's."""
    rule, matrix = rules_of(Optim(algorithm="muon"), torch.bfloat16).tensors, nn.Parameter(torch.randn(12, 30))
    theirs = nn.Parameter(matrix.detach().clone())
    reference = torch.optim.Muon([theirs], lr=RATE, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    momentum = torch.zeros(12, 30)
    for step in (1, 2):
        theirs.grad = torch.randn(12, 30)
        one = TensorUpdate(shape=(12, 30), parameter=matrix.data, gradient=theirs.grad.clone(), step=step,
                           states={"momentum_buffer": momentum}, learning_rate=RATE, weight_decay=DECAY)
        rule.update_tensors({"matrix": one})
        reference.step()
        torch.testing.assert_close(matrix, theirs, rtol=1e-6, atol=1e-7)


def test_adafactor_equals_that_of_transformers():
    """That of transformers adds 1e-30 to squared gradients, where torch keeps variances above an epsilon."""
    transformers = pytest.importorskip("transformers")
    parameters = [nn.Parameter(torch.randn(5, 7, dtype=torch.float64)), nn.Parameter(torch.randn(9).double())]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    reference = transformers.Adafactor(theirs, lr=RATE, relative_step=False, scale_parameter=True, warmup_init=False)
    rule = Adafactor()
    states = [{name: torch.zeros(shape or one.shape, dtype=torch.float64)
               for name, shape in rule.state_shapes(tuple(one.shape)).items()} for one in parameters]
    for step in (1, 2, 3):
        for one in theirs:
            one.grad = torch.randn_like(one)
        rule.update_tensors({str(number): TensorUpdate(
            shape=tuple(one.shape), parameter=one.data, gradient=theirs[number].grad.clone(), states=states[number],
            step=step, learning_rate=RATE, weight_decay=0.0) for number, one in enumerate(parameters)})
        reference.step()
    for one, other in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(("algorithm", "mesh"), [("muon", Mesh(data=2, row=2)), ("adafactor", Mesh(data=2, pipe=2))])
def test_accumulated_gradients(algorithm, mesh, in_fp64):
    """Two calls of forward_backward and a step are one batch; frozen parameters stay unchanged."""
    still = partial(model, dropout=0.0)  # masks depend on the number of the batch
    halves = [token_batches(mesh, count=1, seed=number) for number in range(2)]
    together = [[*one, *other] for one, other in zip(*halves, strict=True)]
    reference = Reference(still(), seed=SEED, dtype=torch.float64)
    frozen_name = "layer0.mlp.fc1.weight"
    before = reference.parameters[frozen_name].detach().clone()
    reference.parameters[frozen_name].requires_grad_(False)
    optimizer = torchs(algorithm, reference.parameters)
    reference.forward_backward(every(together))
    optimizer.step()

    def work(engine):
        if frozen_name in engine.named_parameters():
            engine.named_parameters()[frozen_name].requires_grad_(False)
        for half in halves:
            result = engine.forward_backward(share(engine, half))
        engine.step(result)
        return {name: value.detach().clone() for name, value in engine.named_parameters().items()}, engine.layout

    found = on_mesh(still, mesh, work, optim=optim_of(algorithm, shard=True), learning_rate=RATE)
    expected = {name: parameter.detach() for name, parameter in reference.parameters.items()}
    assert torch.equal(before, expected[frozen_name])
    assert_equal_weights([weights for weights, _ in found], expected, found[0][1])
