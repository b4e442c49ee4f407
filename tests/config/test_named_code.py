"""Python objects that files name: refused unless the user allows them, and listed before they are imported."""

import json
import sys

import pytest

from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.named_code import CORPORA, OBJECTS
from tests.errors import check

CODE = {
    "model.family": '[model]\nfamily = "own_code:run"', "data.task": '[data]\ntask = "own_code:run"',
    "data.form": '[data]\nform = "own_code:run"',
    "optim.algorithm": '[optim]\nalgorithm = "own_code:run"', "elastic.freeze": '[elastic]\nfreeze = "own_code:run"',
    "data.corpus": '[data]\ncorpus = "own_code:run"', "data.mixture": '[data]\nmixture = ["own_code:run=2", "sotu=1"]',
    "data.eval": '[data]\neval = "own_code:run"', "data.eval_sets": '[data]\neval_sets = ["mine=own_code:run"]'}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_code.py").write_text("open('executed', 'w').close()\ndef run():\n    return None\n")
    yield tmp_path
    sys.modules.pop("own_code", None)


def problems_of(layer, **flags):
    merged = read.merge([layer, read.Layer(origin="flag", values=flags, is_text=True)])
    return merged, {problem.where for problem in merged.problems}


def test_every_setting_that_may_name_code_is_known():
    assert {*OBJECTS, *CORPORA} == set(CODE)


@pytest.mark.parametrize("name", CODE)
def test_a_file_names_no_code_unless_it_is_allowed(name, module):
    path = module / "x.toml"
    path.write_text(CODE[name])
    merged, refused = problems_of(read.load(str(path))[1])
    assert refused == {read.flag(name)}
    assert read.flatten(merged.run)[name] == read.settings()[name].default and merged.origins[name] == "default"
    problem, = merged.problems
    check(problem, "code-not-allowed", "own_code:run", "--allow-code")
    allowed, refused = problems_of(read.load(str(path), allow_code=True)[1])
    assert not refused and "own_code:run" in str(read.flatten(allowed.run)[name])
    assert not (module / "executed").exists(), "settings are read without an import"


def test_a_flag_that_names_the_object_allows_it_and_another_value_replaces_it(module):
    path = module / "x.toml"
    path.write_text(CODE["model.family"])
    layer = read.load(str(path))[1]
    assert problems_of(layer, **{"model.family": "own_code:run"})[0].run.model.family == "own_code:run"
    assert problems_of(layer, **{"model.family": "gpt"})[1] == set()


def test_a_checkpoint_names_no_code_with_any_switch():
    layer = read.from_dict({"optim": {"algorithm": "own_code:run"}}, "checkpoint x")
    problem, = read.merge([layer]).problems
    assert (problem.where, problem.value) == ("optim.algorithm", "own_code:run")
    assert "--allow-code" not in problem.remedy


def test_a_data_set_with_a_configuration_is_no_code(module):
    path = module / "x.toml"
    path.write_text('[data]\ncorpus = "imdb:plain_text"')
    (module / "imdb").mkdir()  # a folder, not a package
    merged, refused = problems_of(read.load(str(path))[1])
    assert merged.run.data.corpus == "imdb:plain_text" and not refused


@pytest.mark.parametrize("command", ["check", "train", "plan", "simulate", "data prepare"])
@pytest.mark.parametrize("name", ["model.family", "data.task", "elastic.freeze"])
def test_no_command_runs_what_a_file_names(name, command, module, capsys):
    (module / "x.toml").write_text(CODE[name])
    cluster = ["--cluster", "laptop"] if command in ("plan", "simulate") else []
    assert run_command([*command.split(), "x.toml", *cluster]) == 2
    assert f"{read.flag(name)}: names code" in "".join(capsys.readouterr())
    assert not (module / "executed").exists()


def test_check_lists_what_it_imports_before_the_import(module, capsys):
    (module / "own_code.py").write_text("print('executed')\ndef run():\n    return None\n")
    (module / "x.toml").write_text(CODE["model.family"])
    assert run_command(["check", "x.toml", "--allow-code"]) == 2
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "imports own_code:run for model.family, from file x.toml" and second == "executed"
    sys.modules.pop("own_code")
    assert run_command(["check", "x.toml", "--allow-code", "--json"]) == 2
    assert capsys.readouterr().err.startswith("imports own_code:run")


def test_a_run_that_resumes_uses_its_own_mesh_whatever_its_file_names(module):
    from ranvier.cli.train import _plan_before

    folder = module / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('[mesh]\ndata = 2\n[batch]\nglobal_size = 8\nmicrobatch_size = 4\n' +
                                     CODE["model.family"])
    asked = read.merge([read.Layer(origin="flag", is_text=True, values={
        "resume": "auto", "run_dir": "run", "mesh.data": "auto", "batch.global_size": "8"})]).run
    found = _plan_before(asked, 2)
    assert found is not None and found.mesh.data == 2


def test_the_current_folder_is_searched_last(module):
    (module / "rich.py").write_text("open('executed', 'w').close()\n")
    merged = read.merge([read.load("own_code:recipe")[1]]) if (module / "own_code.py").write_text(
        "import rich\ndef recipe():\n    return {}\n") else None
    assert merged is not None and not merged.problems and not (module / "executed").exists()


def test_the_search_for_a_corpus_imports_no_package(module):
    from ranvier.config.named_object import package_exists

    package = module / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("open('executed', 'w').close()\n")
    (package / "inner.py").write_text("")
    assert package_exists("pack.inner:x") and not package_exists("nothing:x") and not package_exists("__main__:x")
    (module / "loose_folder" / "deep").mkdir(parents=True)  # without __init__.py, as examples/ is
    (module / "loose_folder" / "deep" / "own.py").touch()
    assert package_exists("loose_folder.deep.own:x")
    for name in ("loose_folder", "loose_folder.deep", "loose_folder.own", "loose_folder.deep.other"):
        assert not package_exists(f"{name}:x")
    assert not (module / "executed").exists() and str(module) not in sys.path


def test_a_trial_is_allowed_what_its_run_was_allowed(monkeypatch, tmp_path):
    from ranvier.config.run import Run
    from ranvier.errors import LaunchError
    from ranvier.planner import trial

    commands = []

    class Done:
        returncode, stderr = 1, "no"

    monkeypatch.setattr(trial.child, "run", lambda command, **rest: commands.append(command) or Done())
    with pytest.raises(LaunchError):
        trial.step_seconds(Run(), tmp_path / "trial")
    assert "--allow-code" in commands[0]


def test_the_document_of_check_lists_the_refusal(module, capsys):
    (module / "x.toml").write_text(CODE["data.task"])
    assert run_command(["check", "x.toml", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [problem["where"] for problem in document["problems"]] == ["data.task"]
