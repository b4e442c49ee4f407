"""A tokenizer's numbers stand for the tokens of the model that training starts from, in the tasks of texts."""

import json
from dataclasses import replace

import pytest

from ranvier.config.run import Data, Run, Transformer
from ranvier.data import tokenizer as tokenizers
from ranvier.data import wordpiece
from ranvier.data.prepare import prepare, problems
from ranvier.errors import DataError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##c", "good", "bad", "day"]


@pytest.fixture(params=["lm", "classification"])
def run(request, tmp_path):
    """A run that starts from a folder with a tokenizer. Its data is not read here."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    (tmp_path / "text.txt").write_text("a day\n" * 200)
    (tmp_path / "rows.tsv").write_text("sentence\tlabel\n" + "a good day\tx\nbad day\ty\n" * 10)
    of_task(request.param, 0).save(folder / "tokenizer.json")
    of_task(request.param, 1).save(tmp_path / "other.json")
    of_task(request.param, 2).save(tmp_path / "more.json")
    return Run(model=Transformer(vocab=300, sequence=16, pretrained=str(folder)), data=Data(
        task=request.param, cache_dir=tmp_path / "cache", corpus=str(tmp_path / "text.txt"),
        train=str(tmp_path / "rows.tsv") if request.param == "classification" else None))


def of_task(task, variant):
    """Variant 1 has other tokens at some numbers; variant 2 has one token more."""
    if task == "classification":
        return wordpiece.WordPiece([[*WORDS], [*WORDS[:-2], "day", "bad"], [*WORDS, "night"]][variant])
    texts = ["ab " * 20 + "cd " * 10, "cd " * 20 + "ab " * 10, "ab " * 20 + "cd " * 10]
    return tokenizers.train([texts[variant]], 260 + (variant == 2))


def with_tokenizer(run, path):
    return replace(run, data=replace(run.data, tokenizer=str(path)))


def test_another_tokenizer_is_refused_before_anything_is_prepared(run, tmp_path):
    assert problems(run) == []
    found, = problems(with_tokenizer(run, tmp_path / "other.json"))
    assert (found.where, found.value) == ("data.tokenizer", str(tmp_path / "other.json"))
    with pytest.raises(DataError) as refused:
        prepare(with_tokenizer(run, tmp_path / "other.json"))
    assert str(refused.value) == str(found)
    assert problems(with_tokenizer(run, tmp_path / "more.json")) == [], "a further token at a free number"


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(run, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 9}')
    found, = problems(replace(run, model=replace(run.model, vocab=Transformer.vocab)))
    assert found.where == "data.tokenizer" and " 9" in found.what and "--model.vocab" in found.remedy
    assert problems(run) == [], "a larger vocabulary that is set adds rows"


def test_a_pretrained_model_without_a_tokenizer_gets_no_new_one(run, tmp_path):
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert problems(run) == [], "without weights, too, the folder gives only sizes"
    (tmp_path / "model" / "model.safetensors").write_text("")
    found, = problems(run)
    if run.data.task == "lm":
        assert found.where == "data.tokenizer" and str(tmp_path / "model") in found.what
