"""Ten questions as the `hf` model of lm-evaluation-harness asks and scores them, with a tokenizer that writes a BOS."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from ranvier.config.run import TensorParallel
from ranvier.data.tokenizer import load
from ranvier.inference.evaluation import encode_pair, loglikelihoods
from ranvier.inference.lm_eval_tasks import SharedEngine
from ranvier.inference.trained import build_language_engine, open_model
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.test_hf_llama import TEXT, published_tokenizer
from tests.hf_peers import peer, saved
from tests.models.test_llama import SIZES

transformers = pytest.importorskip("transformers")
LONGEST = 48
QUESTIONS = [
    ("The arrow flies", " over"), ("The arrow flies ", "over 12 green fields"), ("", "The arrow flies"), ("", " over"),
    ("The arr", "ow flies over"), ("The arrow\n\n", "flies"), (" ", "fields. The"),
    ("12 green", "\u00e9t\u00e9 \U0001f600"), (TEXT, " The arrow flies over"), ("arrow", " a")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama whose tokenizer starts each text with a BOS."""
    sizes = SIZES | dict(vocab_size=290, max_position_embeddings=LONGEST)
    found = saved(peer("LlamaForCausalLM", **sizes), tmp_path_factory.mktemp("llama"))
    published_tokenizer().save(str(found / "tokenizer.json"))
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (found / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    return found


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path))


def theirs(folder):
    return (transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(),
            transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), pad_token="<|end_of_text|>"))


class Documented:
    """`tok_encode`, `prefix_token_id`, `_encode_pair` and scores as version 0.4.13 of the package documents them."""

    def __init__(self, folder):
        self.model, self.tokenizer = theirs(folder)

    def encoded(self, context, continuation):
        if context == "":
            bos = self.tokenizer.bos_token_id
            prefix = self.tokenizer.eos_token_id if bos is None else bos
            return [prefix], self.tokenizer.encode(continuation, add_special_tokens=False)
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        whole, first = self.tokenizer.encode(context + continuation), self.tokenizer.encode(context)
        return first, whole[len(first):]

    @torch.no_grad()
    def score(self, first, rest):
        ids = torch.tensor([(first + rest)[-(LONGEST + 1):]])
        log_p = self.model(ids[:, :-1]).logits[0, -len(rest):].log_softmax(-1)
        targets = torch.tensor(rest)
        return float(log_p.gather(1, targets[:, None]).sum()), bool((log_p.argmax(-1) == targets).all())


def on_ranks(folder, work):
    """The result of `work` on rank 0 of two stages."""
    def rank(world):
        model = open_model(folder, lambda line: None)
        engine = build_language_engine(model, world, Mesh(pipe=2), tensor=TensorParallel(), dtype=torch.float64)
        ranks = world.backend.group("asked", [(0, 1)])
        found = work(engine, ranks, load(folder / "tokenizer.json"))
        engine.close()
        return found

    return run_ranks(rank, 2, timeout_seconds=120.0)[0]


def assert_equal_scores(ours, expected):
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], rel=1e-6)


def test_encodings_and_scores_are_those_that_the_package_documents(folder):
    oracle, tokenizer = Documented(folder), load(folder / "tokenizer.json")
    expected = [oracle.encoded(*question) for question in QUESTIONS]
    ours = [encode_pair(tokenizer, *question) for question in QUESTIONS]
    assert [(list(first), list(rest)) for first, rest in ours] == expected
    assert all(first[0] == oracle.tokenizer.bos_token_id for first, _ in ours)
    assert len(expected[8][0]) > LONGEST, "a context that is truncated"
    assert_equal_scores(on_ranks(folder, lambda engine, ranks, _: loglikelihoods(
        engine, ranks, ours, longest=LONGEST)), [oracle.score(*pair) for pair in expected])


def test_encodings_and_scores_are_those_of_the_packages_own_model(folder):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.models.huggingface import HFLM

    from ranvier.inference.lm_eval_model import HarnessModel

    model, tokenizer = theirs(folder)
    peers = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
    asked = [SimpleNamespace(args=question) for question in QUESTIONS]
    texts = [SimpleNamespace(args=(text,)) for text in ("The arrow flies", TEXT[:400], "\u00e9")]

    def work(engine, ranks, own):
        shared = SharedEngine(engine, ranks, own, longest=LONGEST, microbatch_size=4, vocab=290)
        if ranks.index:
            return shared.serve()
        ours = HarnessModel(shared)
        encoded = [ours.tok_encode(first + rest) for first, rest in QUESTIONS]
        found = encoded, ours.prefix_token_id, ours.loglikelihood(asked), ours.loglikelihood_rolling(texts)
        shared.end()
        return found

    encoded, prefix, scores, rolling = on_ranks(folder, work)
    assert prefix == peers.prefix_token_id
    assert encoded == [peers.tok_encode(first + rest) for first, rest in QUESTIONS]
    assert_equal_scores(scores, peers.loglikelihood(asked, disable_tqdm=True))
    assert rolling == pytest.approx(peers.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-6)
