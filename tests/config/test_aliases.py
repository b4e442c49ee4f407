"""Other spellings of settings: in recipes and run files, as flags, from Python."""

import json

import pytest

from ranvier.cli.main import run_command
from ranvier.config import aliases, read
from ranvier.config.run import Memory
from tests.errors import check


def merged(**values):
    return read.merge([read.Layer(origin="file x.toml", values={
        name.replace("__", "."): value for name, value in values.items()})])


def test_every_alias_leads_to_a_setting():
    settings = read.settings()
    assert set(aliases.NAMES.values()) <= settings.keys() and not aliases.NAMES.keys() & settings.keys()


@pytest.mark.parametrize(("given", "value", "expected"), [
    ("checkpoint", "auto", "auto"), ("checkpoint", 3, 3), ("checkpoint", "paper", "axonn"),
    ("recompute", "axonn", "axonn"), ("recompute", "paper", "axonn")])
def test_other_spellings(given, value, expected):
    found = merged(**{f"memory__{given}": value})
    assert found.problems == () and found.run.memory == Memory(recompute=expected) == Memory(**{given: value})
    assert found.chosen == {"memory.recompute"} and "checkpoint" not in read.document(found.run)["memory"]


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("data.task", "sft", "chat"), ("data.task", "dpo", "preference"), ("lora.targets", ["all-linear"], ["layer*"])])
def test_words_of_trl_and_peft(name, value, expected):
    assert aliases.canonical(name, value) == (name, expected)


def test_both_names_of_one_setting():
    found = merged(memory__checkpoint="auto", memory__recompute=2)
    (problem,) = found.problems
    assert found.run.memory.recompute == 2
    check(problem, "setting-given-twice", "memory.recompute", "file x.toml", where="memory.checkpoint", value="auto")
    with pytest.raises(TypeError, match=r"Memory\(\) got checkpoint and recompute, which are two names of one field"):
        Memory(checkpoint=1, recompute="none")


def test_flags(capsys):
    assert run_command(["check", "gpt-tiny", "--ranks", "4", "--json", "--memory.checkpoint", "paper"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["value"] for row in report["values"]}["memory.recompute"] == "axonn"
    assert run_command(["check", "--help-all"]) == 0
    assert "--memory.recompute" in (text := capsys.readouterr().out) and "--memory.checkpoint" not in text
