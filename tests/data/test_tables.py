"""Tables by name: their columns, their rows, and the errors for those that are missing or damaged."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
import types
from dataclasses import replace

import numpy as np
import pytest

from ranvier.cli import check
from ranvier.config.run import Data, Run, Transformer
from ranvier.data import tables
from ranvier.data.corpus import open_corpus
from ranvier.data.prepare import prepare, problems
from ranvier.data.sentences import Columns, open_part, table_sentences
from ranvier.data.tables import open_file
from tests.errors import raises

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ROWS = [{"body": "first, \"quoted\"\ntext", "id": 1}, {"body": "second", "id": 2}]


def written(folder, ending, rows=ROWS):
    path = folder / f"rows{ending}"
    if ending == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif ending == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        separator = {".csv": ",", ".tsv": "\t"}[ending]
        fields = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        path.write_text("\n".join(separator.join('"' + field.replace('"', '""') + '"' for field in line)
                                  for line in fields) + "\n")
    return path


def texts(path, tmp_path, column=None):
    return [one.text for one in open_corpus(str(path), tmp_path, lambda line: None, column).documents(10**6)]


def test_conversations_are_no_texts(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text('{"messages": []}\n')
    with raises("column-missing", "--data.task chat", where=f"{path} line 1"):
        texts(path, tmp_path)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".csv", ".tsv"])
def test_rows_of_a_named_column_are_documents(tmp_path, ending):
    path = written(tmp_path, ending)
    assert texts(path, tmp_path, "body") == [row["body"] for row in ROWS]
    with raises("column-missing", "--data.text-column"):
        texts(path, tmp_path, "title")
    run = Run(data=Data(corpus=str(path), text_column="title"))
    assert "has no column `title`" in str(next(one for one in check.check(run).problems)).replace("field", "column")
    assert not problems(replace(run, data=replace(run.data, text_column="body")))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_only_column_of_text_needs_no_setting(tmp_path, ending):
    path = written(tmp_path, ending, [{"id": 1, "body": "a"}, {"id": 2, "body": "b"}])
    assert texts(path, tmp_path) == ["a", "b"] and not problems(Run(data=Data(corpus=str(path))))


def test_a_small_array_takes_little_memory(tmp_path):
    """`read(n)` of a text file allocates n bytes, whatever its size; a folder may have many such files."""
    (tmp_path / "a.json").write_text('[{"text": "a"}]')
    tracemalloc.start()
    try:
        assert texts(tmp_path / "a.json", tmp_path) == ["a"]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_column_named_text_needs_no_setting_and_the_fingerprint_names_the_column(tmp_path):
    path = written(tmp_path, ".parquet", [{"text": "a", "other": "b"}])
    assert texts(path, tmp_path) == ["a"] and texts(path, tmp_path, "other") == ["b"]
    one, other = (open_corpus(str(path), tmp_path, print, column).fingerprint for column in (None, "other"))
    assert one != other
    assert texts(written(tmp_path, ".csv", [{"text": "a", "n": 1}]), tmp_path) == ["a"]


def test_a_folder_of_tables_is_the_rows_of_all(tmp_path):
    written(tmp_path, ".jsonl"), written(tmp_path, ".parquet")
    (tmp_path / "plain.txt").write_text("plain")
    assert sorted(texts(tmp_path, tmp_path, "body")) == sorted([*(row["body"] for row in ROWS) , *(
        row["body"] for row in ROWS), "plain"])


def test_damaged_tables_are_refused_by_name(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"no parquet")
    with raises("not-parquet", "rows.parquet"):
        texts(tmp_path / "rows.parquet", tmp_path)
    (tmp_path / "rows.csv").write_text("text,id\na,1\nb\n")
    with raises("row-column-count", "rows.csv", 3, 2, 1):
        texts(tmp_path / "rows.csv", tmp_path)
    (tmp_path / "rows.csv").write_text("text,id\na,1\n\0\"b,2\n")
    assert open_file(tmp_path / "rows.csv", "rows.csv").columns == ("text", "id")


@pytest.mark.parametrize("content", [b'text\n"one\ntwo\n', b'text\n"one\n"two\n'])
def test_a_quote_that_nobody_closes_does_not_swallow_rows(tmp_path, content):
    (tmp_path / "rows.csv").write_bytes(content)
    with raises("not-separated-values", "rows.csv"):
        texts(tmp_path / "rows.csv", tmp_path)


def test_a_header_of_several_lines_is_no_row(tmp_path):
    assert texts(written(tmp_path, ".csv", [{"text": "a", "of\nthis": 1}]), tmp_path) == ["a"]


def test_a_number_beyond_the_declared_classes_is_no_class(tmp_path):
    path = written(tmp_path, ".jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": -1}])
    table = open_file(path, "rows.jsonl")
    with raises("label-not-in-classes", "rows.jsonl line 2", -1):
        table_sentences(table, Columns(), ("bad", "good"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = written(tmp_path, ".parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    problem = check.check(Run(data=Data(corpus=str(path), text_column="body"))).problems[0]
    assert "needs the package `pyarrow`, which is not installed" in str(problem) and "ranvier[hub]" in str(problem)
    monkeypatch.setattr(tables, "has_package", lambda name: False)
    for data, code in ((Data(corpus="some/set"), "corpus-needs-datasets"),
                       (Data(corpus="wikitext-2"), "corpus-needs-datasets"),
                       (Data(task="classification", train="some/set"), "table-package-missing")):
        assert code in {problem.code for problem in problems(Run(data=data))}
        report = check.check(Run(data=data))  # a run on another machine may have the package
        assert code in {warning.code for warning in report.warnings} - {problem.code for problem in report.problems}


def test_a_saved_data_set_is_read_by_its_column(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    found = datasets.load_dataset("json", data_files=str(written(tmp_path, ".jsonl")), split="train",
                                  cache_dir=str(tmp_path / "hub"))
    datasets.DatasetDict({"train": found}).save_to_disk(str(folder))
    assert texts(folder, tmp_path) == texts(folder, tmp_path, "body") == [row["body"] for row in ROWS]
    datasets.DatasetDict({"train": found.add_column("title", ["a", "b"])}).save_to_disk(str(folder))
    with raises("column-missing", "body"):
        texts(folder, tmp_path)
    assert "has no column `text`" in str(check.check(Run(data=Data(corpus=str(folder)))).problems[0])
    (folder / "train" / "state.json").write_text("{}")
    with raises("datasets-folder-unreadable"):
        texts(folder, tmp_path, "body")


# ---------------------------------------------------------------------- labelled texts and pairs

PAIRS = [{"premise": "a man sleeps", "hypothesis": "he rests", "gold": "yes"},
         {"premise": "a dog", "hypothesis": "it is a cat and nothing else", "gold": "no"}] * 2


def classified(path, tmp_path, **data):
    return Run(model=Transformer(vocab=60, sequence=12),
               data=Data(task="classification", train=str(path), eval=str(path), cache_dir=tmp_path / "cache", **data))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".csv"])
def test_pairs_of_named_columns_are_two_segments(tmp_path, ending):
    run = classified(written(tmp_path, ending, PAIRS), tmp_path, text_column="premise", pair_column="hypothesis",
                     label_column="gold")
    assert not problems(run)
    data = prepare(run)
    assert data.class_names == ("no", "yes") and data.train.targets(np.arange(2)).tolist() == [1, 0]
    inputs = data.train.inputs(np.arange(2), np.zeros(2, dtype=np.int64))
    for row in range(2):
        count = int(inputs["mask"][row].sum())
        ids, types = inputs["ids"][row, :count].tolist(), inputs["types"][row, :count].tolist()
        assert ids[0] == 2 and ids.count(3) == 2 and ids[-1] == 3
        assert types == [0] * (ids.index(3) + 1) + [1] * (count - ids.index(3) - 1)
        assert count == data.train.sample_lengths[row] <= 12


@pytest.mark.parametrize(("columns", "facts"), [
    ({"text_column": "sentence"}, ("sentence", "gold, hypothesis, premise", "data.text-column")),
    ({"text_column": "premise"}, ("label", "data.label-column")),
    ({"text_column": "premise", "label_column": "gold", "pair_column": "x"}, ("x", "data.pair-column"))])
def test_missing_columns_are_problems_of_the_settings(tmp_path, columns, facts):
    run = classified(written(tmp_path, ".jsonl", PAIRS), tmp_path, **columns)
    with raises("column-missing", *facts):
        raise problems(run)[0]
    with raises("column-missing", *facts):
        open_part(run.data.train, "train", tmp_path, print, Columns.from_settings(run.data))


def test_rows_without_text_or_label_are_refused_by_line(tmp_path):
    for row, *error in (({"sentence": " ", "label": 1}, "sentence-empty", "text"),
                        ({"sentence": "x", "label": None}, "sentence-empty", "label"),
                        ({"sentence": 3, "label": 1}, "column-not-text", "sentence"),
                        ({"label": 1}, "column-missing", "sentence")):
        run = classified(written(tmp_path, ".jsonl", [{"sentence": "a", "label": 0}, row]), tmp_path)
        with raises(*error, "line 2"):
            prepare(run)


@pytest.mark.parametrize("ending", [".json", ".jsonl.gz", ".csv.gz"])
def test_arrays_and_compressed_rows_are_classified(tmp_path, ending):
    rows = [{"sentence": "a day", "label": "up"}, {"sentence": "a night", "label": "down"}]
    path = tmp_path / f"rows{ending}"
    if ending == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(gzip.compress(written(tmp_path, ending.removesuffix(".gz"), rows).read_bytes()))
    run = classified(path, tmp_path)
    assert not problems(run) and prepare(run).train.targets(np.arange(1)).numel() == 1


def test_columns_of_tab_separated_files_have_names_too(tmp_path):
    path = tmp_path / "mrpc.tsv"
    path.write_text("Quality\t#1\t#2\n1\tone \"text\tanother\n0\tthis\tthat\n")
    run = classified(path, tmp_path, text_column="#1", pair_column="#2", label_column="Quality")
    assert not problems(run) and prepare(run).train.targets(np.arange(2)).tolist() == [1, 0]


class Split(list):
    """Stands for a split of the package `datasets`."""

    column_names = ["text", "label"]  # noqa: RUF012
    features = {"label": types.SimpleNamespace(names=["bad", "good"])}  # noqa: RUF012

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


def test_a_data_set_of_the_hub_has_its_own_splits_and_class_names(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, configuration, *, split, streaming=False):
        asked.append((path, configuration, split, streaming))
        if split == "validation":
            raise ValueError("Unknown split")
        return Split([{"text": f"{split} {number}", "label": number % 2} for number in range(4)])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(
        load_dataset=load_dataset, __spec__=object()))
    run = Run(model=Transformer(vocab=60, sequence=12), data=Data(
        task="classification", train="owner/set:small", eval="owner/set:small", cache_dir=tmp_path / "cache"))
    assert not problems(run)
    data = prepare(run)
    assert ("owner/set", "small", "train", False) in asked and ("owner/set", "small", "test", False) in asked
    assert data.class_names == ("bad", "good") and (len(data.train), len(data.eval)) == (4, 4)
    with raises("hub-table-unreadable", "data.eval", "owner/none"):
        monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *args, **options: 1 / 0)
        prepare(replace(run, data=replace(run.data, train=str(written(tmp_path, ".jsonl", [
            {"text": "a", "label": 1}, {"text": "b", "label": 0}])), eval="owner/none")))
