"""BERT's tokens: the same as transformers', trained the same everywhere, and folders that are damaged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ranvier.data import wordpiece
from ranvier.data.wordpiece import WordPiece
from tests.errors import raises

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fine", "film", "a", "##s", "joy"]


def model_folder(folder, vocab=VOCAB, config=None, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_trained_vocabulary_fits_and_is_the_same_in_every_process(tmp_path):
    texts = [f"word{number} and wörter, 中文 {'abc' * (number % 5)}" for number in range(300)]
    script = ("import sys, json; from ranvier.data.wordpiece import train;"
              "print(train(json.load(sys.stdin), 90).fingerprint)")
    outputs = {subprocess.run([sys.executable, "-c", script], input=json.dumps(texts), text=True, check=True,
                              capture_output=True, timeout=120).stdout.strip() for _ in range(2)}
    assert outputs == {wordpiece.train(texts, 90).fingerprint}
    for vocab in (7, 8, 20, 90):
        tokenizer = wordpiece.train(texts, vocab)
        assert tokenizer.vocab <= vocab
        assert all(token < tokenizer.vocab for ids in tokenizer.encode(texts) for token in ids)
    tokenizer = wordpiece.train(["abc"], 50)
    assert tokenizer.decode(tokenizer.encode(["ABC [SEP]"])[0]) == "abc [UNK] [UNK] [UNK]"
    with raises("vocab-below-characters"):
        wordpiece.train(texts, 6)


def test_a_tokenizer_is_read_back_as_it_was_written(tmp_path):
    tokenizer = WordPiece(VOCAB, lowercase=False, strip_accents=True, chinese=False)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = wordpiece.from_folder(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint and again.text() == tokenizer.text()
    assert again.encode(["Film film [SEP]"]) == [[1, 6, 1, 1, 1]]
    folder = model_folder(tmp_path / "model", do_lower_case=False, strip_accents=True, tokenize_chinese_chars=False)
    assert wordpiece.from_folder(folder).fingerprint == tokenizer.fingerprint
    assert wordpiece.from_folder(model_folder(tmp_path / "other")).fingerprint == WordPiece(VOCAB).fingerprint
    assert WordPiece(VOCAB).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(("change", "beside", "value"), [
    ({}, dict(do_lower_case=False), "lowercase is True, and False in tokenizer_config.json"),
    ({}, dict(strip_accents=False), "strip_accents is True, and False in tokenizer_config.json"),
    ({}, dict(tokenize_chinese_chars=False), "chinese is True, and False in tokenizer_config.json"),
    ({}, dict(truncation_side="left"), "it cuts long texts at their beginning (truncation_side)"),
    ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, {}, "its pre_tokenizer is WhitespaceSplit"),
    ({"added_tokens": [{"id": 10, "content": "movie", "special": False}]}, {}, "its token movie is added outside "
     "WordPiece")])
def test_what_would_give_other_tokens_is_refused(tmp_path, change, beside, value):
    WordPiece(VOCAB).save(tmp_path / "tokenizer.json")
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(do_lower_case=True, strip_accents=None)))
    wordpiece.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | change))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    with raises("not-wordpiece", value):
        wordpiece.from_folder(tmp_path)


def tokenizer_json(**changes):
    document = json.loads(WordPiece(VOCAB).text())
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            document[section][key] = value
        else:
            document[section] = value
    return json.dumps(document)


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "Expecting"), ("[" * 9000, ""), ("[]", "not a JSON object"), ("{}", "its model is not WordPiece"),
    (tokenizer_json(model__type="BPE"), "its model is not WordPiece"),
    (tokenizer_json(model__vocab=[1]), "its model is not WordPiece"),
    (tokenizer_json(model__continuing_subword_prefix="@@"), "its model is not WordPiece"),
    (tokenizer_json(normalizer=None), "its normalizer is not BertNormalizer"),
    (tokenizer_json(normalizer__lowercase=1), "lowercase is 1"),
    (tokenizer_json(model__vocab={"[PAD]": 0, "[CLS]": 2}), "not numbered from 0 without a gap"),
    (tokenizer_json(model__vocab={"[PAD]": 0, "[CLS]": 10**20}), "not numbered from 0 without a gap"),
    (tokenizer_json(model__vocab={"[PAD]": 0, "[CLS]": 1}), "it has no [UNK], [SEP]")])
def test_damaged_tokenizers(tmp_path, text, reason):
    (tmp_path / "tokenizer.json").write_text(text)
    with raises("not-wordpiece", reason):
        wordpiece.from_folder(tmp_path)


def test_folders_without_their_tokenizer(tmp_path):
    with raises("wordpiece-missing"):
        wordpiece.from_folder(tmp_path)
    for vocab, reason in (([*VOCAB, "fine"], "a token twice"), (VOCAB[1:], "it has no [PAD]")):
        with raises("not-wordpiece", reason):
            wordpiece.from_folder(model_folder(tmp_path / "model", vocab))
    (tmp_path / "model" / "vocab.txt").write_bytes(b"\xff")
    with raises("not-wordpiece"):
        wordpiece.from_folder(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").unlink()
    (tmp_path / "model" / "vocab.txt").mkdir()
    with raises("not-wordpiece"):
        wordpiece.from_folder(tmp_path / "model")


def test_the_same_tokens_as_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["naive", "fine", "film", "##s", "##ing", "中", "!", ",", "'", "x", "##y", "un", "##able"]
    folder = model_folder(tmp_path / "model", [*wordpiece.SPECIAL, *words])
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    texts = ["Films, fine FILMING!", "naïve 中中 unable", "x\ty\u2028xy \ufeff \x07", "  ", "x'y" * 40, "🙂 fine"]
    ours = wordpiece.from_folder(folder)
    assert ours.encode(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    pairs = [("film " * first, "fine " * second) for first in range(1, 9) for second in range(1, 9)]
    for longest in range(5, 13):
        assert [sample.ids for sample in ours.encode_samples(pairs, longest)] == [
            theirs(*pair, truncation=True, max_length=longest)["input_ids"] for pair in pairs]
