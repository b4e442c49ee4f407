"""Common forms and files of conversations: recognised by their columns; an error names any other form."""

import gzip
import json
import sys
import types

import pytest

from ranvier.config.run import Data, Run
from ranvier.data.chat import conversations, open_conversations
from ranvier.data.preference import pairs
from ranvier.data.prepare import prepare, problems
from ranvier.data.row_forms import form_of_table
from ranvier.data.tables import load_split
from ranvier.errors import DataError
from tests.data.test_chat import run_of, tokenizer_in
from tests.data.test_preference import run_of as pairs_run_of
from tests.errors import raises

USER, ANSWER = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
ROWS = {
    "messages": ({"messages": [USER, ANSWER]}, [USER, ANSWER], "OpenAI's form"),
    "messages in parts": ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?", "image_url": None}]}, ANSWER]},
        [USER, ANSWER], "OpenAI's form"),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]},
                 [USER, ANSWER], "ShareGPT form"),
    "messages with a system text": ({"system": "Be brief.", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER],
                                    "OpenAI's form"),
    "messages with two system texts": ({"system": "Be long.", "messages": [SYSTEM, USER, ANSWER]},
                                       [SYSTEM, USER, ANSWER], "OpenAI's form"),
    "sharegpt with a system text": ({"system": "Be brief.", "conversations": [
        {"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]}, [SYSTEM, USER, ANSWER],
        "ShareGPT form"),
    "alpaca": ({"instruction": "Hello?", "input": "", "output": "Hi."}, [USER, ANSWER], "Alpaca form"),
    "alpaca with all columns": (
        {"instruction": "Add.", "input": "2, 2", "output": "Hi.", "system": "Be brief.",
         "history": [["Hello?", "Hi."]]},
        [SYSTEM, USER, ANSWER, {"role": "user", "content": "Add.\n\n2, 2"}, ANSWER], "Alpaca form"),
    "prompt-completion": ({"prompt": "Hello?", "completion": "Hi."}, [USER, ANSWER],
                          "the form of prompts and completions"),
    "prompt-completion of messages": ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER],
                                      "the form of prompts and completions"),
}


def written(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("kind", ROWS)
def test_a_form_is_recognised_by_its_columns(tmp_path, kind):
    row, expected, words = ROWS[kind]
    name = written(tmp_path / "rows.jsonl", row)
    found, = conversations(name, "train", Data())
    assert list(found.messages) == expected and not found.unlearnt
    assert form_of_table(open_conversations(name, "train"), Data()).words == words
    assert [*conversations(name, "train", Data(form=kind.partition(" ")[0]))] == [found]


def test_messages_come_before_other_columns(tmp_path):
    name = written(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b", "messages": [USER, ANSWER]})
    found, = conversations(name, "train", Data())
    assert list(found.messages) == [USER, ANSWER]
    found, = conversations(name, "train", Data(form="prompt-completion"))
    assert found.messages[0]["content"] == "a"


def test_answers_in_a_prompt_are_not_learnt(tmp_path):
    row = {"prompt": [USER, ANSWER, USER], "completion": "Hi."}
    name = written(tmp_path / "rows.jsonl", row, row | {"system": "Be brief."})
    first, second = conversations(name, "train", Data())
    assert (first.unlearnt, second.unlearnt) == ({1}, {2})
    assert list(second.messages) == [SYSTEM, *first.messages]


def test_calls_of_functions(tmp_path):
    """OpenAI's arguments are text, and templates write objects; ShareGPT's calls are also text."""
    call = {"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    tool = {"role": "tool", "content": "Sunny."}
    openai = written(tmp_path / "openai.jsonl", {"messages": [USER, {"role": "assistant", "content": None,
                                                                    "tool_calls": [call]}, tool, ANSWER], "tools": []})
    sharegpt = written(tmp_path / "sharegpt.jsonl", {"conversations": [
        {"from": "human", "value": "Hello?"}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "Sunny."}, {"from": "gpt", "value": "Hi."}]})
    for name in (openai, sharegpt):
        found, = conversations(name, "train", Data())
        assert found.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
        assert [one["role"] for one in found.messages] == ["user", "assistant", "tool", "assistant"]


def test_keys_that_arrow_adds_are_no_part_of_calls_and_tools(tmp_path):
    """Arrow's objects have the keys of all rows, with null for missing values, which a template would write."""
    pyarrow = pytest.importorskip("pyarrow")
    calls = [CALL, {"name": "add", "arguments": {"a": 1}}]
    tools = [{"name": call["name"], "parameters": {key: {"type": "any"} for key in call["arguments"]}}
             for call in calls]
    user, answer = ({**one, "content": [{"type": "text", "text": one["content"]}]} for one in (USER, ANSWER))
    result = {"role": "tool", "content": [{"type": "data", "value": 3}]}
    rows = [{"messages": [user, {"role": "assistant", "tool_calls": [{"function": call}]}, result, answer],
             "tools": tools} for call in calls]
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in (written(tmp_path / "rows.jsonl", *rows), str(tmp_path / "rows.parquet")):
        for found, call in zip(conversations(name, "train", Data()), calls, strict=True):
            assert found.messages[1]["tool_calls"] == [{"function": call}] and found.tools == tools
            assert [found.messages[0], *found.messages[2:]] == [USER, result, ANSWER]
    kept, = conversations(written(tmp_path / "null.jsonl", {"messages": [USER, {"role": "assistant", "tool_calls": [
        {"function": {"name": "add", "arguments": {"a": None}}}]}, ANSWER]}), "train", Data())
    assert kept.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize(("row", "data", "code"), [
    ({"text": "a"}, {}, "form-unknown"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, "form-unknown"),
    ({"messages": [USER, ANSWER]}, {"form": "alpaca"}, "form-column-missing"),
    ({"messages": [USER, ANSWER]}, {"messages_column": "talk"}, "column-missing"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, {}, "not-a-sharegpt-turn"),
    ({"conversations": [{"from": "function_call", "value": "a"}]}, {}, "not-a-function-call"),
    ({"instruction": 3, "output": "b"}, {}, "form-column-not-text"),
    ({"system": 3, "messages": [USER, ANSWER]}, {}, "form-column-not-text"),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, {}, "not-an-alpaca-history"),
    ({"prompt": 3, "completion": "b"}, {}, "not-a-turn")])
def test_what_is_no_such_form_is_refused(tmp_path, row, data, code):
    name = written(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError) as caught:
        list(conversations(name, "train", Data(**data)))
    assert caught.value.code == code
    if code == "form-unknown":
        assert ("data.task" in caught.value.settings) == ("chosen" in row)
        assert ("data.corpus" in caught.value.settings) == ("text" in row)


def test_the_line_of_the_data_says_the_form_and_what_has_no_answer(tmp_path):
    run = run_of(tmp_path)
    rows = [{"instruction": f"{number}?", "output": "yes" if number else ""} for number in range(12)]
    run = Run(model=run.model, data=Data(task="chat", train=written(tmp_path / "rows.jsonl", *rows),
                                         tokenizer=run.data.tokenizer, cache_dir=tmp_path / "cache"))
    data = prepare(run)
    assert "10 conversations in Alpaca form, 1 held out" in data.about
    assert "1 of 12 left out, in which the assistant says nothing" in data.about


# --- a function of the user's ----------------------------------------------------------------------------------------


@pytest.fixture
def my_forms(monkeypatch):
    module = types.ModuleType("my_forms")
    module.talk = lambda row: None if row["q"] == "?" else [
        {"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]
    module.pair = lambda row: {"prompt": row["q"], "chosen": row["a"], "rejected": "No."}
    module.number = lambda row: 3
    monkeypatch.setitem(sys.modules, "my_forms", module)


def test_a_function_makes_conversations_and_pairs_of_rows(tmp_path, my_forms):
    name = written(tmp_path / "rows.jsonl", {"q": "Hello?", "a": "Hi."}, {"q": "?", "a": ""})
    found, nothing = conversations(name, "train", Data(form="my_forms:talk"))
    assert list(found.messages) == [USER, ANSWER] and nothing is None
    pair = next(pairs(name, "train", "my_forms:pair"))
    assert list(pair.chosen.messages) == [USER, ANSWER] and pair.rejected.messages[1]["content"] == "No."
    for read in (lambda: conversations(name, "train", Data(form="my_forms:number")),
                 lambda: pairs(name, "train", "my_forms:number")):
        with pytest.raises(DataError) as caught:
            list(read())
        assert (caught.value.code, caught.value.value) == ("form-function-result", "my_forms:number")


def test_a_form_of_conversations_is_none_of_pairs(tmp_path):
    run = pairs_run_of(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}], form="alpaca")
    found, = problems(run)
    assert (found.where, found.code) == ("data.form", "form-of-other-task")


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_folders_and_patterns_of_rows(tmp_path):
    rows = [{"prompt": f"{number}?", "completion": "yes"} for number in range(6)]
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "a.json").write_text(json.dumps(rows[:2]))
    with gzip.open(parts / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows[2:4])))
    (parts / "c.csv").write_text("prompt,completion\n4?,yes\n5?,yes\n")
    (parts / "README.md").write_text("not rows")
    (parts / ".ipynb_checkpoints").mkdir()
    (parts / ".ipynb_checkpoints/a-checkpoint.json").write_text(json.dumps(rows[:2]))
    for name, count in ((parts / "a.json", 2), (parts / "b.jsonl.gz", 2), (parts, 6), (parts / "*.json*", 4)):
        found = list(conversations(str(name), "train", Data()))
        assert [one.messages[0]["content"] for one in found] == [f"{number}?" for number in range(
            2 if name.name == "b.jsonl.gz" else 0, count + 2 * (name.name == "b.jsonl.gz"))]
    run = Run(data=Data(task="chat", train=str(parts / "*.json*"), tokenizer=str(tokenizer_in(tmp_path / "tokenizer"))))
    assert not [one for one in problems(run) if one.where == "data.train"]
    (parts / "d.jsonl").write_text('{"question": "?"}')
    with pytest.raises(DataError) as caught:
        open_conversations(str(parts), "train")
    assert (caught.value.code, caught.value.value) == ("other-columns", "question")
    (parts / "d.jsonl").rename(parts / "d.jsonl.zst")
    with raises("folder-with-unread-rows", "d.jsonl.zst", where=str(parts)):
        open_conversations(str(parts), "train")


@pytest.mark.parametrize(("name", "content", "code"), [
    ("a.json", b'{"prompt":\n"?"}', "not-an-array"), ("a.json", b"[3]", "row-not-object"),
    ("a.json", b"[", "row-not-json"), ("a.txt", b"a", "not-a-table")])
def test_damaged_files_are_refused(tmp_path, name, content, code):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_conversations(str(tmp_path / name), "train")
    assert caught.value.code == code


def test_a_truncated_compressed_file_is_refused(tmp_path):
    whole = gzip.compress(json.dumps({"prompt": "a" * 999, "completion": "b"}).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(DataError) as caught:
        open_conversations(str(tmp_path / "a.jsonl.gz"), "train")
    assert (caught.value.code, caught.value.where) == ("gzip-damaged", str(tmp_path / "a.jsonl.gz"))


def test_names_on_the_hub_may_have_a_split(monkeypatch):
    asked = []

    def load_dataset(name, configuration=None, *, split, **more):
        if configuration not in (None, "everyday"):
            raise ValueError(f"BuilderConfig '{configuration}' not found. Available: ['everyday']")
        asked.append((name, configuration, split))

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    for name in ("a/b", "a/b:everyday", "a/b:test_prefs", "a/b:everyday:test[:10%]"):
        load_split(name, "train", "data.train", "a file")
    assert asked == [("a/b", None, "train"), ("a/b", "everyday", "train"), ("a/b", None, "test_prefs"),
                     ("a/b", "everyday", "test[:10%]")]
