"""Log-likelihoods on any mesh are those of a plain loop over the model of transformers, in fp64."""

import pytest
import torch

from ranvier.config.run import TensorParallel
from ranvier.data import tokenizer as tokenizers
from ranvier.data.tokenizer import train
from ranvier.inference.evaluation import encode_pair, loglikelihoods, windows
from ranvier.inference.trained import build_language_engine, open_model
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from tests.covering import first
from tests.errors import raises

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the brown bear é à ü "
PAIRS = [(context, f" {continuation}") for context, continuations in (
    ("the quick brown", ("fox", "bear and dog", "é à")), ("the lazy dog ", ("runs", "jumps over the fox")),
    ("", ("fox jumps", "over ü", "away from the bear", "the")), ("x" * 80, ("fox", "dog")))
    for continuation in continuations]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random GPT-2 as transformers saves it, in fp64, and a tokenizer."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    tokenizer = train([TEXT] * 5, 300)
    transformers.set_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(  # its norms and attention are fp64 throughout
        vocab_size=tokenizer.vocab, n_embd=24, n_layer=3, n_head=4, n_positions=48, initializer_range=0.3
        )).double().save_pretrained(path)
    tokenizer.save(path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    """(tokens of each request, their log-likelihoods by a loop over the model of transformers, whether greedy)."""
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = tokenizers.load(folder / "tokenizer.json")
    requests = [encode_pair(tokenizer, *pair) for pair in PAIRS]
    found = []
    for context, continuation in requests:
        ids = torch.tensor([[*context, *continuation][-49:]])
        with torch.no_grad():
            log_p = model(ids[:, :-1]).logits[0].log_softmax(-1)[-len(continuation):]
        target = torch.tensor(continuation)
        found.append((float(log_p.gather(1, target[:, None]).sum()), bool((log_p.argmax(-1) == target).all())))
    return requests, found


@pytest.mark.parametrize(("mesh", "scheme"), first([
    (Mesh(), "stationary"), (Mesh(data=2), "stationary"), (Mesh(row=2, col=2), "stationary")], [
    (Mesh(), "stationary"), (Mesh(pipe=2), "stationary"), (Mesh(data=2), "stationary"), (Mesh(col=2), "megatron"),
    (Mesh(row=2, col=2), "stationary"), (Mesh(row=2), "stationary"), (Mesh(data=2, pipe=2, col=2), "summa")]), ids=str)
def test_likelihoods_are_those_of_a_plain_loop(folder, theirs, mesh, scheme):
    requests, expected = theirs
    model = open_model(folder, print)

    def on_rank(world):
        engine = build_language_engine(model, world, mesh, tensor=TensorParallel(scheme=scheme), dtype=torch.float64)
        found = loglikelihoods(engine, world.backend.group("all", [tuple(range(world.size))]), requests, longest=48)
        engine.close()
        return found

    results = run_ranks(on_rank, mesh.size)
    for found in results:
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-9)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_blanks_belong_to_the_continuation():
    tokenizer = tokenizers.train([], 257)
    encode = tokenizer.encode
    assert encode_pair(tokenizer, "ab ", " c") == (encode("ab"), encode("  c"))
    assert encode_pair(tokenizer, "", " c") == ([tokenizer.end], encode(" c"))


def test_windows_are_disjoint_and_full():
    """As lm_eval.utils.get_rolling_token_windows gives them with a context of 1."""
    found = list(windows(list(range(10)), [99], 4))
    assert found == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])] and list(windows([], [9], 4)) == []
    utils = pytest.importorskip("lm_eval.utils")
    assert found == [utils.make_disjoint_window(pair) for pair in utils.get_rolling_token_windows(
        list(range(10)), prefix_token=99, max_seq_len=4, context_len=1)]


def test_an_empty_continuation_is_certain():
    assert loglikelihoods(None, None, [([1], [])], longest=8) == [(0.0, True)]


def test_requests_that_cannot_be_scored():
    for request, value in ((([], [1]), 1), (([1], [1] * 9), 8)):
        with raises("request-length", value):
            loglikelihoods(None, None, [request], longest=8)
