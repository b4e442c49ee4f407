"""Old spellings of settings: in recipes and run files, as flags, from Python, in checkpoints."""

import json
import warnings

import pytest

from ranvier.cli.main import run_command
from ranvier.config import aliases, read
from ranvier.config.run import Guard, Memory
from ranvier.train.saving import differences


def merged(**values):
    return read.merge([read.Layer(origin="file x.toml", values={
        name.replace("__", "."): value for name, value in values.items()})])


def test_every_alias_leads_to_a_setting():
    settings = read.settings()
    assert all(alias.new in settings if alias.value_of is None else alias.value_of in settings
               for alias in aliases.ALIASES)
    assert not aliases.old_names().keys() & settings.keys()


@pytest.mark.parametrize(("old", "value"), [("memory.checkpoint", "auto"), ("memory.checkpoint", 3),
                                            ("memory.recompute", "axonn")])
def test_spellings_that_stay(old, value):
    found = merged(**{old.replace(".", "__"): value})
    assert found.problems == found.warnings == () and found.run.memory.recompute == value


def test_the_paper_is_axonn():
    assert merged(memory__checkpoint="paper").run.memory == merged(memory__recompute="paper").run.memory == Memory(
        recompute="axonn")


def test_spellings_that_end():
    found = merged(guard__explode=3.0, guard__bad_step="back")
    assert found.problems == () and found.run.guard == Guard(loss_spike_factor=3.0, bad_step="rollback")
    assert [str(warning) for warning in found.warnings] == [
        "guard.explode: is an old spelling, in file x.toml, and will be refused by the next release. Write "
        "guard.loss-spike-factor instead.",
        "guard.bad-step: is an old spelling, in file x.toml, and will be refused by the next release (got 'back'). "
        "Write rollback instead."]
    assert found.chosen == {"guard.loss_spike_factor", "guard.bad_step"}
    assert "explode" not in str(read.document(found.run))


def test_both_names_of_one_setting():
    found = merged(memory__checkpoint="auto", memory__recompute=2)
    assert found.run.memory.recompute == 2
    assert [str(problem) for problem in found.problems] == [
        "memory.checkpoint: is another name of memory.recompute, which is given as well, in file x.toml (got 'auto'). "
        "Leave out memory.checkpoint."]


def test_old_flags(capsys):
    words = ["check", "gpt-tiny", "--ranks", "4", "--json", "--guard.explode", "3", "--memory.checkpoint", "paper"]
    assert run_command(words) == 0
    report = json.loads(capsys.readouterr().out)
    values = {row["name"]: row["value"] for row in report["values"]}
    assert (values["guard.loss-spike-factor"], values["memory.recompute"]) == ("3.0", "axonn")
    assert [warning["where"] for warning in report["warnings"]] == ["guard.explode"]
    assert run_command(["check", "--help-all"]) == 0
    assert "--memory.recompute" in (text := capsys.readouterr().out) and "--guard.explode" not in text


def test_from_python():
    with pytest.warns(DeprecationWarning, match=r"guard.explode: is an old spelling, in Guard\(...\)"):
        assert Guard(explode=2.0) == Guard(loss_spike_factor=2.0)
    with pytest.warns(DeprecationWarning, match="Write rollback instead"):
        assert Guard(bad_step="back").bad_step == "rollback"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Memory(checkpoint="paper") == Memory(recompute="axonn")
    with pytest.raises(TypeError, match=r"Memory\(\) got checkpoint and recompute, which are two names of one field"):
        Memory(checkpoint=1, recompute="none")


def test_checkpoints_of_before():
    before = {"seed": 0, "guard.bad_step": "back", "guard.explode": 3.0, "memory.checkpoint": "paper"}
    now = {"seed": 0, "guard.bad_step": "rollback", "guard.loss_spike_factor": 3.0, "memory.recompute": "axonn"}
    assert list(differences(before, now)) == []
    assert list(differences(before, now | {"guard.loss_spike_factor": 4.0})) == [("guard.loss_spike_factor", 3.0)]
