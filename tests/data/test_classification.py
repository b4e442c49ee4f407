"""Sentences and their classes: files, splits, tokens, accuracy, and the errors for data that cannot be learnt from."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
import threading
import types
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.run import Data, Run, Transformer
from ranvier.data import named_files, sentences, wordpiece
from ranvier.data.arrays import open_arrays, write_arrays
from ranvier.data.class_numbers import Accuracy
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare, problems
from ranvier.data.sampler import Sampler
from ranvier.data.sentences import Sentence, class_names, open_part, read_sentences
from ranvier.data.subset import first_of_order, held_out
from ranvier.inference.trained import Trained
from ranvier.tensor.split.loss import IGNORED
from tests.covering import examples
from tests.data.test_wordpiece import model_folder
from tests.errors import check, raises

ROWS = [("a fine film", "good"), ("dull and slow", "bad"), ("a joy", "good"), ("no joy at all", "bad")]


def tsv(rows, header="sentence\tlabel"):
    return "\n".join([header, *("\t".join(map(str, row)) for row in rows), ""])


def made(tmp_path, rows=tuple(ROWS), *, eval_rows=None, vocab=60, sequence=8, pretrained=None, **data):
    (tmp_path / "train.tsv").write_text(tsv(rows), encoding="utf-8")
    if eval_rows is not None:
        (tmp_path / "eval.tsv").write_text(tsv(eval_rows), encoding="utf-8")
        data["eval"] = str(tmp_path / "eval.tsv")
    return Run(model=Transformer(vocab=vocab, sequence=sequence, pretrained=pretrained),
               data=Data(task="classification", train=str(tmp_path / "train.tsv"), cache_dir=tmp_path / "cache",
                         **data))


def refused(run, code, *facts):
    with raises(code, *facts):
        prepare(run)


def parts(folder, text, held=None):
    def part(name, text):
        (folder / name).write_text(text)
        return open_part(str(folder / name), name, folder, lambda line: None)

    return read_sentences(part("train", text), None if held is None else part("eval", held))


def sentences_of(path, data):
    path.write_bytes(data)
    return open_part(str(path), "train", path.parent, lambda line: None).read()[0]


# ---------------------------------------------------------------------- samples

def test_samples_are_tokens_between_cls_and_sep_padded_to_the_sequence(tmp_path):
    folder = model_folder(tmp_path / "model")
    prepared = prepare(made(tmp_path, [("A FILMS, fine joy films films", "1"), ("joy", "0")], pretrained=str(folder),
                            eval_rows=[("a", 0), ("fine", 1)]))
    inputs = prepared.train.inputs(np.array([1, 0, 1]), np.zeros(3, dtype=np.int64))
    assert inputs["ids"].tolist() == [[2, 9, 3, 0, 0, 0, 0, 0], [2, 7, 6, 8, 1, 5, 9, 3], [2, 9, 3, 0, 0, 0, 0, 0]]
    assert inputs["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]
    assert not inputs["types"].any()
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int64}
    assert prepared.train.targets(np.array([1, 0, 1])).tolist() == [0, 1, 0]
    assert prepared.eval.targets(np.array([0, 1])).tolist() == [0, 1]
    assert (prepared.num_classes, prepared.class_names, prepared.weight) == (2, ("0", "1"), 1.0)
    assert prepared.repeats and prepared.about.endswith(": 2 sentences, 2 held out, 2 classes")


def test_pairs_of_long_texts_are_cut_at_once():
    """Long texts have hundreds of millions of combinations of parts, and the package would make each of them."""
    tokenizer, text = wordpiece.train(["a b"] * 9, 120), "a " * 50_000
    (one,), (short,) = (tokenizer.encode_samples([(text, text[:end])], 9) for end in (len(text), 2))
    a, cls, sep = tokenizer.encode_samples([("a", None)], 9)[0].ids[1], tokenizer.cls, tokenizer.sep
    assert one == ([cls, a, a, a, sep, a, a, a, sep], 5, True)
    assert short == ([cls, a, a, a, a, a, sep, a, sep], 7, True)


@pytest.mark.parametrize(("labels", "names", "targets"), [
    (("good", "bad"), ("good", "bad"), [0, 1]), (("bad", "good"), ("bad", "good"), [1, 0]),
    (("x", "good", "bad"), ("x", "good", "bad"), [1, 2]), (("x", "y"), ("bad", "good"), [1, 0])])
def test_classes_have_the_numbers_of_the_models_labels(tmp_path, labels, names, targets):
    """id2label of a trained classifier decides the numbers if it has the data's classes."""
    folder = model_folder(tmp_path / "model", config={
        "vocab_size": 10, "architectures": ["BertForSequenceClassification"],
        "id2label": {str(number): name for number, name in enumerate(labels)}})
    prepared = prepare(made(tmp_path, [("a", "good"), ("joy", "bad")], pretrained=str(folder),
                            eval_rows=[("a", "good")]), (lines := []).append)
    told = f"{folder} has other classes than the data: bad, good begin with the weights of {', '.join(labels)}"
    assert (told in lines) == (len(labels) == 2 and "good" not in labels)
    assert prepared.class_names == names and prepared.num_classes == len(names)
    assert prepared.train.targets(np.array([0, 1])).tolist() == targets
    assert prepared.eval.targets(np.array([0])).tolist() == targets[:1]


def test_evaluated_data_may_lack_some_of_the_models_numbers(tmp_path):
    """The model's labels are known, so 2 is its third class; a run that trains on 0 and 2 has two classes."""
    trained = Trained(settings={}, fill=print, origin=tmp_path, labels=("bad", "so-so", "good"))
    prepared = prepare(made(tmp_path, [("a", "2"), ("joy", "0")], eval_rows=[("a", "2")]))
    assert prepared.class_names == ("0", "2")
    found = trained.with_model_classes(prepared)
    assert found.num_classes == 3 and found.eval.targets(np.array([0])).tolist() == [2]


def test_the_cache_is_used_and_any_thread_may_read(tmp_path):
    run, lines = made(tmp_path), []
    first = prepare(run, lines.append)
    assert any("tokenising" in line for line in lines)
    lines.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(prepare(run, lines.append))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines == [] and {prepared.fingerprint for prepared in found} == {first.fingerprint}
    assert found[0].train.inputs(np.array([0]))["ids"].equal(first.train.inputs(np.array([0]))["ids"])
    with pytest.raises(ValueError, match="read-only"):
        open_arrays(next((tmp_path / "cache" / "classification").glob("*/train"))).arrays["ids"][0] = 1


def test_the_fingerprint_is_of_content_and_not_of_places(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    same = prepare(made(one)).fingerprint
    assert prepare(made(two)).fingerprint == same
    assert prepare(made(two, [*ROWS, ("more", "good")])).fingerprint != same
    assert prepare(made(one, sequence=9)).fingerprint != same
    assert prepare(made(one, train_samples=2)).fingerprint != same


def test_a_changed_array_in_the_cache_is_refused(tmp_path):
    run = made(tmp_path)
    prepare(run)
    folder = next((tmp_path / "cache" / "classification").glob("*/train"))
    data = bytearray((folder / "ids.npy").read_bytes())
    data[-1] ^= 1
    (folder / "ids.npy").write_bytes(data)
    refused(run, "cached-arrays-changed", "ids.npy")
    (folder / "about.json").write_text("[]")
    refused(run, "cached-arrays-changed")
    shutil.rmtree(folder)
    assert len(prepare(run).train) == 3
    write_arrays(tmp_path / "x", {"a": np.zeros(3, np.uint8)}, {})
    np.save(tmp_path / "x" / "a.npy", np.zeros(4, np.uint8))
    with raises("cached-arrays-changed", "uint8", 4, 3):
        open_arrays(tmp_path / "x")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_fewer_samples_than_a_batch_and_not_ascii(tmp_path, count):
    prepared = prepare(made(tmp_path, [(f"größe 中文 {number} \u2028 🙂", number % 2) for number in range(count)]))
    assert len(prepared.train) + len(prepared.eval) == count and len(prepared.eval) == 1
    loader = Loader(prepared.train, Sampler(len(prepared.train), 0), global_size=8, microbatch_size=3, part=1,
                    num_parts=2)
    taken = loader.microbatches(0)
    assert sum(len(microbatch.samples) for microbatch in taken) == 2 + 2 + 1
    assert taken[0].targets.shape == (2,) and taken[0].targets[1] == IGNORED
    assert taken[0].inputs["ids"].shape == (2, 8)


# ---------------------------------------------------------------------- files

@pytest.mark.parametrize("data", [
    b"sentence\tlabel\none\t1\ntwo\t0\n", b"\xef\xbb\xbfsentence\tlabel\r\none\t1\r\n\r\ntwo\t0\r\n",
    b"label\tid\tsentence\n1\tx\t one \n0\ty\ttwo", b"sentence\tlabel\n\"one\t1\n" b"two\"\t0\n"])
def test_forms_of_files(tmp_path, data):
    found = sentences_of(tmp_path / "f", data)
    assert [sentence.text.strip('"') for sentence in found] == ["one", "two"]
    assert [sentence.label for sentence in found] == ["1", "0"]


@pytest.mark.parametrize(("data", "line", "error"), [
    (b"", "", ("table-without-rows",)),
    (b"sentence\tlabels\na\t1", "", ("column-missing", "label", "labels, sentence")),
    (b"label\tbody\n", "", ("column-missing", "sentence")),
    (b"label\tsentence\tlabel\n", "", ("column-twice", "label")),
    (b"sentence\tlabel\na\t1\nb\n", " line 3", ("row-column-count", 2, 1)),
    (b"sentence\tlabel\na\t1\tx\n", " line 2", ("row-column-count", 2, 3)),
    (b"sentence\tlabel\na\t \n", " line 2", ("sentence-empty", "label")),
    (b"sentence\tlabel\n\t1\n", " line 2", ("sentence-empty", "text"))])
def test_faults_of_files_are_told_with_their_line(tmp_path, data, line, error):
    path = tmp_path / "f"
    with raises(*error, where=f"{path}{line}"):
        sentences_of(path, data)
    if not line and data:
        with raises(*error, where=f"{path}"):
            sentences.look_at_header(path, "train")


@pytest.mark.parametrize("data", [b"sentence\tlabel\na\t1\nb\xff\t1\n", "sentence\tlabel\na\t1\n".encode("utf-16")])
def test_bytes_that_are_no_text(tmp_path, data):
    with raises("data-not-utf8", where="data.train"):
        sentences_of(tmp_path / "f", data)


def test_sets_that_nobody_can_learn_from(tmp_path):
    with raises("one-class", "data.train"):
        parts(tmp_path, "label\tsentence\n")
    with raises("one-class", "data.train", 1):
        parts(tmp_path, "label\tsentence\n1\ta\n1\tb\n")
    with raises("unknown-label", 3, 2, 0, 1):
        parts(tmp_path, "label\tsentence\n1\ta\n0\tb\n", held="label\tsentence\n1\ta\n2\tb\n")
    with raises("too-few-samples"):
        parts(tmp_path, "label\tsentence\n1\ta\n0\tb\n", held="label\tsentence\n")


def test_labels_are_numbers_in_their_order_or_words_in_theirs():
    assert class_names(["10", "9", "-1"], "f") == ("-1", "9", "10")
    assert class_names(["10", "9", "x"], "f") == ("10", "9", "x")
    assert class_names(["²", "1"], "f") == ("1", "²")
    assert class_names(["9" * 30, "1"], "f") == ("1", "9" * 30)
    assert class_names(["01", "1"], "f") == ("01", "1")
    with raises("one-class"):
        class_names(["x" * 30], "f")


@examples(12)
@given(st.lists(st.text(max_size=5), max_size=60))
def test_a_tenth_is_held_out_by_the_text_alone(names):
    chosen = held_out(names)
    assert chosen.sum() == (max(1, len(names) // 10) if len(names) > 1 else 0)
    picked = {name for name, here in zip(names, chosen, strict=True) if here}
    turned = held_out(names[::-1])
    assert {name for name, here in zip(names[::-1], turned, strict=True) if here} == picked


def test_equal_sentences_are_not_on_both_sides():
    texts = [f"text {number % 50}" for number in range(100)]
    chosen = held_out(texts)
    assert not {text for text, here in zip(texts, chosen, strict=True) if here} & {
        text for text, here in zip(texts, chosen, strict=True) if not here}


def test_subsets_are_the_first_by_the_seeds_order(tmp_path):
    rows = [(f"sentence {number}", number % 2) for number in range(40)]
    few, more = (prepare(made(tmp_path, rows, train_samples=count, eval_samples=2)) for count in (4, 8))
    assert (len(few.train), len(more.train), len(few.eval)) == (4, 8, 2)
    assert set(few.train.chosen) < set(more.train.chosen)
    assert set(first_of_order(36, 4, 1, "data.train-samples")) != set(few.train.chosen)
    ids = few.train.inputs(np.arange(4), np.zeros(4, dtype=np.int64))["ids"]
    assert ids.equal(few.train.whole.inputs(few.train.chosen)["ids"])
    assert few.train.targets(np.arange(4)).equal(few.train.whole.targets(few.train.chosen))
    refused(made(tmp_path, rows, train_samples=37), "more-samples-than-there-are", "data.train-samples", 36)
    refused(made(tmp_path, rows, eval_samples=5), "more-samples-than-there-are", "--data.eval-samples", 4)


# ---------------------------------------------------------------------- settings

def test_settings_that_cannot_be(tmp_path):
    run = made(tmp_path)
    assert problems(run) == []

    def problem(model=None, **data):
        return problems(replace(run, model=replace(run.model, **(model or {})), data=replace(run.data, **data)))[0]

    check(problem(train=None), "train-data-missing", "classification", where="data.train")
    for name in ("", "/no/such/file.tsv", "sst-2", "a\0b", "x" * 5000, "~nobody-of-this-name/x"):
        check(problem(train=name), "unknown-data" if name else "train-data-missing")
    check(problem(eval="none.tsv"), "unknown-data", where="data.eval")
    check(problem(augment="flip-crop"), "augment-without-images", "classification", where="data.augment")
    check(problem({"sequence": 2}), "sequence-too-short-for-class", where="model.sequence", value=2)
    assert problem({"vocab": 6}).where == "model.vocab"
    refused(replace(run, data=replace(run.data, train=None)), "train-data-missing")


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    run = made(tmp_path)
    refused(replace(run, data=replace(run.data, train=str(tmp_path))), "data-not-file", "data.train")
    os.mkfifo(tmp_path / "pipe")
    refused(replace(run, data=replace(run.data, eval=str(tmp_path / "pipe"))), "data-not-file", "data.eval")
    monkeypatch.setattr(named_files, "MOST_BYTES", 3)
    refused(run, "data-file-too-large", 4)
    monkeypatch.undo()
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: (_ for _ in ()).throw(PermissionError("not yours")))
    refused(run, "data-unreadable", "data.train", "not yours")


def test_a_pretrained_model_that_does_not_fit_its_tokenizer(tmp_path):
    folder = model_folder(tmp_path / "model", config={"vocab_size": 9})
    refused(made(tmp_path, pretrained=str(folder), vocab=Transformer.vocab), "tokenizer-above-pretrained", 10, 9)
    refused(made(tmp_path, pretrained=str(tmp_path / "none")), "unknown-pretrained-model", "model.pretrained")
    model_folder(tmp_path / "model", config={"vocab_size": 12})
    assert prepare(made(tmp_path, pretrained=str(folder), vocab=5)).tokenizer.vocab == 10


# ---------------------------------------------------------------------- named sets

def sentiment_package(path, lines):
    inner, data = io.BytesIO(), "\r\n".join(lines).encode()
    for target, name, content in ((inner, sentences._RATED[1], data), (path, sentences._RATED[0], None)):
        content = inner.getvalue() if content is None else content
        with tarfile.open(**({"fileobj": target} if target is inner else {"name": target}), mode="w:gz") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def small_sentiment(tmp_path, monkeypatch):
    path = tmp_path / "by-hand" / sentences.SENTIMENT.filename
    path.parent.mkdir()
    digest = sentiment_package(path, [f"{number}\t{(number % 5 - 2) / 2}\tsentence {number} " for number in range(50)])
    monkeypatch.setattr(sentences, "SENTIMENT", replace(sentences.SENTIMENT, sha256=digest, command=(
        "cp", str(path), sentences.SENTIMENT.filename)))
    monkeypatch.setattr(sentences, "SENTIMENT_HELD_OUT", 7)
    return path


def test_the_sentiment_set_is_fetched_and_its_split_is_fixed(tmp_path, small_sentiment):
    run = replace(made(tmp_path), data=Data(task="classification", train="sentiment", cache_dir=tmp_path / "cache"))
    prepared = prepare(run)
    assert (len(prepared.train), len(prepared.eval)) == (33, 7)  # every fifth has the rating 0
    assert prepared.class_names == ("negative", "positive")
    assert prepare(replace(run, seed=5)).fingerprint == prepared.fingerprint
    (tmp_path / "cache" / "packages" / small_sentiment.name).write_bytes(b"other")
    refused(replace(run, seed=6, model=replace(run.model, vocab=64)), "package-checksum")


def test_ratings_become_classes_by_their_sign(tmp_path, small_sentiment):
    found = sentences._sentiment(small_sentiment)
    assert found[0] == Sentence("sentence 0", "negative", f"{sentences._RATED[1]} line 1")
    assert [sentence.label for sentence in found[:4]] == ["negative", "negative", "positive", "positive"]


def hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_sst2_is_asked_for_by_its_name_with_its_own_split(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*args, split):
        asked.append((*args, split))
        return [{"sentence": f"{split} {number} ", "label": number % 2} for number in range(4)]

    hub(monkeypatch, load_dataset)
    run = replace(made(tmp_path), data=Data(task="classification", train="sst2", cache_dir=tmp_path / "cache"))
    prepared = prepare(run)
    assert asked[:2] == [("nyu-mll/glue", "sst2", "train"), ("nyu-mll/glue", "sst2", "validation")]
    assert (len(prepared.train), len(prepared.eval), prepared.class_names) == (4, 4, ("negative", "positive"))
    own = prepare(made(tmp_path, [("x", "positive"), ("y", "negative")], eval="sst2"))
    assert len(own.eval) == 4 and own.eval.targets(np.arange(4)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("rows", [[{"sentence": "x"}], [{"sentence": None, "label": 0}],
                                  [{"sentence": "x", "label": 7}], [["x"]]])
def test_a_hub_with_other_rows_or_none(tmp_path, monkeypatch, rows):
    run = replace(made(tmp_path), data=Data(task="classification", train="sst2", cache_dir=tmp_path / "cache"))
    hub(monkeypatch, lambda *args, split: rows)
    refused(run, "hub-rows", "nyu-mll/glue:sst2")

    def unreachable(*args, split):
        raise ConnectionError("no route\nmore")

    hub(monkeypatch, unreachable)
    refused(run, "hub-table-unreadable", "ConnectionError: no route")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(run, "table-package-missing", "datasets")


# ---------------------------------------------------------------------- scoring

def test_accuracy_counts_rows_with_a_target_over_all_ranks():
    first, second, none = Accuracy(), Accuracy(), Accuracy()
    samples = torch.arange(3)
    first.add(torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 9.0]]), torch.tensor([1, 1, IGNORED]), samples)
    first.add({"logits": torch.tensor([[0.0, 1.0]])}, torch.tensor([1]), samples[:1])
    second.add(torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([2]), samples[:1])
    told = [json.loads(json.dumps(scoring.part())) for scoring in (first, second, none)]
    assert told[0] == {"right": 2, "count": 3}
    assert first.total(told) == {"eval_accuracy": 0.5, "eval_count": 4}
    assert np.isnan(none.total([none.part()])["eval_accuracy"])
