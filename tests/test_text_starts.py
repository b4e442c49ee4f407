"""Texts start with the same tokens as in transformers, and a single class decides which."""

from __future__ import annotations

import ast
import json
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import processors

from ranvier.data import lm
from ranvier.data.arrays import Tokens, open_arrays
from ranvier.data.corpus import Document
from ranvier.data.tokenizer import Tokenizer, load
from ranvier.errors import DataError
from ranvier.inference.evaluation import encode_pair
from ranvier.inference.prompts import TextPrompts
from ranvier.train.setup import held_out_line
from tests.checkpoint.test_hf_llama import published_tokenizer
from tests.sources import ROOT, nodes

WORDS = ("bos_token", "post_processor", "prefix_token", "add_special_tokens", "eot_token_id")
ALLOWED = {
    "data/tokenizer.py": (*WORDS, "[.end]"),
    "data/wordpiece.py": ("post_processor", "add_special_tokens"),  # BERT's [CLS] and [SEP] around pairs
    "data/text_samples.py": ("add_special_tokens",),  # switched off until a text is cut
    "data/chat_template.py": ("add_special_tokens",),  # switched off: a template writes all of them
    "data/offline/gguf_tokenizer.py": (  # writes tokenizer.json and the ends of texts
        "bos_token", "post_processor", "add_special_tokens", "eot_token_id"),
    "checkpoint/hf/tokenizer_files.py": ("bos_token",),  # writes tokenizer_config.json
    "checkpoint/hf/export_model.py": ("bos_token",),
    "inference/generation_config.py": ("bos_token",),  # reports forced_bos_token_id, which is not supported
    "inference/lm_eval_model.py": ("prefix_token", "add_special_tokens", "eot_token_id")}  # the package's names
"""File -> words of text starts that it may use."""


def words_of_starts(inside, *, appends=False):
    """The words of text starts that a module uses. appends: a list may contain only the separator."""
    texts = {node.value for node in inside if isinstance(node, ast.Constant)}
    names = {getattr(node, name, None) for node in inside for name in ("attr", "id", "arg", "name")}
    used = {word for word in WORDS for text in texts | names if isinstance(text, str) and word in text}
    for node in inside:
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:  # a context that consists of the separator
            first, is_spread = node.elts[0], isinstance(node.elts[0], ast.Starred)
            name = getattr(first.value if is_spread else first, "attr", None)
            if (is_spread and name in ("start", "nothing")) or (
                    name == "end" and not (appends and len(node.elts) == 1)):
                used.add("[.end]")
    return used


def test_no_second_place_decides_how_texts_start():
    found = {}
    for path, inside in nodes().items():
        name = str(path.relative_to(ROOT))
        used = words_of_starts(inside, appends=name == "data/lm.py")  # it appends the separator to documents
        if more := used - set(ALLOWED.get(name, ())):
            found[name] = more
    assert not found, "ranvier.data.tokenizer.Tokenizer decides with which tokens a text starts"


@pytest.mark.parametrize("code", [
    "ids = [tokenizer.bos_token_id, *ids]", "start = getattr(tokenizer, 'bos_token_id')",
    "ids = [self.tokenizer.end, *ids]", "context = [tokenizer.end]", "ids = (*tokenizer.nothing, 3)",
    "ids = [*tokenizer.start, *tokenizer.encode(text)]",
    "tokenizer(text, add_special_tokens=True)", "document['post_processor']", "from x import prefix_token_id as first"])
def test_a_second_place_is_noticed(code):
    assert words_of_starts(list(ast.walk(ast.parse(code))))


def folder_with(path, *, start="<|begin_of_text|>", **settings):
    inner = published_tokenizer()
    inner.post_processor = None if start is None else processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, inner.token_to_id(start))])
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>", **settings}))
    return load(path / "tokenizer.json")


@pytest.mark.parametrize("start", ["<|begin_of_text|>", None])
def test_every_entrance_starts_a_text_as_transformers_does(tmp_path, start):
    transformers = pytest.importorskip("transformers")
    tokenizer = folder_with(tmp_path, start=start)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    text = "The sky is blue today"
    expected = theirs(text)["input_ids"]
    plain = theirs(text, add_special_tokens=False)["input_ids"]
    assert (expected != plain) == (start is not None)
    assert tokenizer.encode_from_start(text) == expected and tokenizer.encode(text) == plain
    # generate
    assert TextPrompts(tmp_path / "tokenizer.json").encode(text) == expected
    # pairs of lm-evaluation-harness
    context, continuation = encode_pair(tokenizer, "The sky is", " blue today")
    assert [*context, *continuation] == expected
    assert context == theirs("The sky is")["input_ids"]
    # training, in one process and in several; the run's own copy of the tokenizer
    for encode in (tokenizer, load(_copy(tokenizer, tmp_path / "copy.json"))):
        assert encode.encode_from_start(text) == expected and encode.start == tokenizer.start
    for processes in (1, 2):
        documents = [(Document("a", text), False), (Document("b", "more"), True)]
        assert _written(tmp_path / str(processes), tokenizer, documents, processes) == [
            *expected, tokenizer.end, *theirs("more")["input_ids"], tokenizer.end]
    # sample text of a run
    data = SimpleNamespace(tokenizer=tokenizer, first_tokens=[*expected, tokenizer.end])
    assert held_out_line(data)[:len(expected)] == expected


def _copy(tokenizer, path):
    tokenizer.save(path)
    (path.parent / "tokenizer_config.json").rename(path.parent / "aside.json")
    return path


def _written(folder, tokenizer, documents, processes):
    """The tokens of training and held-out documents."""
    from ranvier.data.cache import PreparationProgress

    folder.mkdir()
    corpus = SimpleNamespace(name="corpus", documents=lambda *args: iter([one for one, _ in documents]))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(lm.corpora, "split", lambda read: iter(documents))
    lm._write(folder, corpus, "text", 1 << 20, tokenizer, PreparationProgress(tell=print, processes=processes))
    monkeypatch.undo()
    return [token for name in ("train", "eval") for token in Tokens(open_arrays(folder / name)).head(1 << 20)]


@pytest.mark.parametrize(("start", "settings", "context"), [
    ("<|begin_of_text|>", {}, "<|begin_of_text|>"), (None, {"bos_token": "<|begin_of_text|>"}, "<|begin_of_text|>"),
    (None, {}, "<|end_of_text|>"), (None, {"bos_token": "gone"}, "<|end_of_text|>")])
def test_the_context_of_a_text_without_one(tmp_path, start, settings, context):
    """As `prefix_token_id` of lm-evaluation-harness: the BOS, or else the EOS."""
    tokenizer = folder_with(tmp_path, start=start, **settings)
    number = tokenizer.numbers()[context]
    assert list(tokenizer.nothing) == [number]
    first, continuation = encode_pair(tokenizer, "", " x")
    assert first == [number] and continuation == tokenizer.encode(" x")
    assert TextPrompts(tmp_path / "tokenizer.json").encode("") == [number]


def test_a_post_processor_with_unknown_tokens_is_refused(tmp_path):
    document = json.loads(published_tokenizer().to_str()) | {"post_processor": {
        "type": "TemplateProcessing", "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [1 << 20], "tokens": ["x"]}},
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(DataError) as refused:
        load(tmp_path / "tokenizer.json")
    assert refused.value.where == str(tmp_path / "tokenizer.json") and "post-processor" in str(refused.value.value)


def test_a_trained_tokenizer_starts_with_nothing():
    inner = tokenizers.Tokenizer.from_str(published_tokenizer().to_str())
    inner.post_processor = None
    assert Tokenizer(inner, end="<|end_of_text|>").start == ()
