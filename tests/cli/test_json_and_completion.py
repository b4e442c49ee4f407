"""What programs and shells read: one JSON document of each command, and completions."""

from __future__ import annotations

import json
import shutil

import pytest

from ranvier.cli.main import command, run_command
from tests import tiny_runs


def document(capfd, *args):
    """What a command prints with --json, and its exit code."""
    capfd.readouterr()
    code = run_command([*map(str, args), "--json"])
    return json.loads(capfd.readouterr().out), code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def tiny(folder, **changed):
    return ["gpt-tiny", "--mesh.data", 1, "--mesh.pipe", 1,
            *tiny_runs.flags(folder, model__num_layers=1, batch__global_size=4, train__steps=2, **changed)]


def test_each_command_prints_one_document(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    one = tiny(run)
    found = {"doctor": document(capfd, "doctor"), "check": document(capfd, "check", *one),
             "plan": document(capfd, "plan", "gpt-tiny", "--cluster", "laptop", "--ranks", 2, "--search", "mesh"),
             "simulate": document(capfd, "simulate", "gpt-tiny", "--cluster", "laptop"),
             "data": document(capfd, "data", "prepare", *one),
             "train": document(capfd, "train", *one, "--comm.transport", "torch", "--run-dir", run / "run"),
             "export": document(capfd, "export", run / "run", tmp_path / "out"),
             "import": document(capfd, "import", tmp_path / "out", tmp_path / "back"),
             "evaluate": document(capfd, "evaluate", run / "run"),
             "generate": document(capfd, "generate", run / "run", "--prompt", "the", "--max-tokens", 2)}
    assert {name: code for name, (_, code) in found.items() if code} == {}
    assert found["train"][0]["run_dir"] == str(run / "run") and found["train"][0]["final_loss"] > 0
    assert found["data"][0]["epoch_samples"] > 0 and found["export"][0] == {"written": str(tmp_path / "out")}
    assert found["import"][0]["recipe"] == str(tmp_path / "back/run.toml")
    assert {"topic", "name", "value", "remedy"} == set(found["doctor"][0]["findings"][0])
    errors, code = document(capfd, "resize", run / "run", "--data", 1, "--pipe", 1, "--wait", 1)
    assert code == 2 and errors["errors"][0]["where"].startswith("run ")
    assert set(found) | {"resize", "join", "watch"} == set(command.commands)


def test_quiet_commands_print_nothing(run, tmp_path, monkeypatch, capfd):
    """Commands that write files; with --json only the document is printed, on standard output."""
    monkeypatch.chdir(tmp_path)
    one = tiny(run, data__cache_dir=tmp_path / "cache")
    for command_line in (["data", "prepare", *one],
                         ["train", *one, "--comm.transport", "torch", "--run-dir", tmp_path / "run"],
                         ["export", tmp_path / "run", tmp_path / "out"],
                         ["import", tmp_path / "out", tmp_path / "back"]):
        assert run_command([*map(str, command_line), "--quiet"]) == 0
        assert capfd.readouterr() == ("", ""), command_line
    again, code = document(capfd, "export", tmp_path / "run", tmp_path / "again", "--quiet")
    assert (again, code) == ({"written": str(tmp_path / "again")}, 0)
    with_quiet = {name for name, one in command.commands.items() if any(param.name == "quiet" for param in one.params)}
    assert with_quiet == {"train", "export", "import", "resize"}  # and data prepare: the others only print


@pytest.mark.parametrize(("args", "where", "what"), [
    (["train", "gpt-tiny", "--seed", "x"], "seed", "must be a whole number"),
    (["plan", "missing", "--cluster", "laptop"], "recipe", "neither a recipe"),
    (["check", "gpt-tiny", "--unknown", "3"], None, "No such option")])
def test_errors_are_documents_too(capfd, args, where, what):
    found, code = document(capfd, *args)
    assert code == 2 and found["errors"][0].get("where") == where and what in found["errors"][0]["what"]


@pytest.mark.parametrize(("line", "wanted"), [
    ("ranvier ev", ["plain,evaluate"]), ("ranvier train bert", ["plain,bert-sentiment", "file,bert"]),
    ("ranvier train gpt-tiny --mesh.pi", ["plain,--mesh.pipe"]),
    ("ranvier check gpt-tiny --precision b", ["plain,bf16"]),
    ("ranvier check gpt-tiny --elastic.cache t", ["plain,true"])])
def test_completions(monkeypatch, capfd, line, wanted):
    monkeypatch.setenv("_RANVIER_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        command.main(args=[], prog_name="ranvier")
    assert capfd.readouterr().out.split() == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(monkeypatch, capfd, shell):
    """click's bash script asks bash for its version."""
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("no bash")
    monkeypatch.setenv("_RANVIER_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit):
        command.main(args=[], prog_name="ranvier")
    assert "_RANVIER_COMPLETE" in capfd.readouterr().out
