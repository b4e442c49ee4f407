"""Layers, origins, and a clear problem for each invalid value."""

import dataclasses
import os
import sys
import tomllib

import pytest

from ranvier.config import read
from ranvier.config.run import Batch, Run, Train, Transformer
from ranvier.errors import ConfigError
from tests.errors import raises


def resolved(tree=None, flags=None):
    return read.merge([read.from_dict(tree or {}, "file x.toml"),
                            read.Layer(origin="flag", values=flags or {}, is_text=True)])


def test_later_layers_win_and_origins_say_so():
    found = resolved({"batch": {"global_size": 64, "microbatch_size": 8}}, {"batch.global_size": "16", "seed": "7"})
    assert not found.problems
    assert (found.run.batch, found.run.seed) == (Batch(global_size=16, microbatch_size=8), 7)
    assert {name: found.origins[name] for name in ("batch.global_size", "batch.microbatch_size", "train.steps")} == {
        "batch.global_size": "flag", "batch.microbatch_size": "file x.toml", "train.steps": "default"}
    assert set(found.origins) == set(read.settings())


def test_every_setting_has_help_and_a_default_that_fits():
    for setting in read.settings().values():
        assert setting.help.endswith("."), setting.name
        found = resolved(flags={setting.name: read.as_text(setting.default)})
        assert found.problems == () and read.flatten(found.run)[setting.name] == setting.default, setting.name


def test_names_in_other_programs_lead_to_settings():
    assert {*read._elsewhere().values()} <= {*read.settings()}
    assert read.name_elsewhere("gradient_accumulation_steps") == "batch.global_size"


@pytest.mark.parametrize(("name", "text", "value"), [
    ("optim.betas", "0.8,0.95", (0.8, 0.95)), ("pipeline.boundaries", "3, 6", (3, 6)),
    ("pipeline.boundaries", "none", None), ("pipeline.in_flight", "auto", "auto"), ("pipeline.in_flight", "6", 6),
    ("train.learning_rate", "3e-4", 3e-4), ("train.prompt", "", ""), ("precision", "fp64", "fp64")])
def test_flags_are_text(name, text, value):
    found = resolved(flags={name: text})
    assert not found.problems
    assert read.flatten(found.run)[name] == value


@pytest.mark.parametrize(("tree", "where", "message"), [
    ({"batch": {"global_size": "64"}}, "batch.global-size", "must be a whole number of at least 1"),
    ({"batch": {"global_size": 0}}, "batch.global-size", "must be a whole number of at least 1"),
    ({"batch": {"global_size": 4.0}}, "batch.global-size", "must be a whole number of at least 1"),
    ({"seed": True}, "seed", "must be a whole number of at least 0"),
    ({"mesh": {"pipe": 0}}, "mesh.pipe", "must be a whole number of at least 1, or auto"),
    ({"train": {"learning_rate": float("nan")}}, "train.learning-rate", "must be a number above 0"),
    ({"comm": {"timeout_seconds": 1e9}}, "comm.timeout-seconds", "must be a number above 0 and of at most 1e+08"),
    ({"optim": {"betas": [0.9]}}, "optim.betas", "must be 2 values, each a number of at least 0 and below 1"),
    ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas", "must be 2 values, each a number of at least 0 and below 1"),
    ({"pipeline": {"in_flight": "many"}}, "pipeline.in-flight", "must be a whole number of at least 1, or auto"),
    ({"pipeline": {"boundaries": 3}}, "pipeline.boundaries",
     "must be a list, each a whole number of at least 1, or none"),
    ({"precision": "fp8"}, "precision", "must be fp32, bf16, fp16 or fp64"),
    ({"data": {"corpus": tomllib.loads("x = 2024-01-01")["x"]}}, "data.corpus", "must be text")])
def test_each_wrong_value_is_one_problem(tree, where, message):
    found = resolved(tree)
    assert [(problem.where, problem.what) for problem in found.problems] == [(where, message)]
    assert found.problems[0].remedy
    assert found.run == Run(), "the layer below is used instead"


@pytest.mark.parametrize(("tree", "code", "where"), [
    ({"batch": {"global_size": 10**30}}, "value-too-large", "batch.global-size"),
    ({"train": {"learning_rate": float("inf")}}, "value-too-large", "train.learning-rate"),
    ({"batch": 3}, "section-as-setting", "batch"),
    ({"batch": {"globl_size": 3}}, "unknown-setting", "batch.globl_size"),
    ({"mesch": {"data": 2}}, "unknown-section", "mesch")])
def test_what_no_setting_can_be(tree, code, where):
    found = resolved(tree)
    assert [(problem.code, problem.where) for problem in found.problems] == [(code, where)]
    assert found.problems[0].remedy and found.run == Run()


@pytest.mark.parametrize(("name", "text"), [
    ("batch.global_size", "many"), ("batch.global_size", "1e3"), ("train.learning_rate", "inf"), ("optim.betas", "0.9"),
    ("pipeline.boundaries", "1,,2"), ("pipeline.policy", "1f2b"), ("mesh.data", "-1"), ("seed", "")])
def test_each_wrong_flag_is_one_problem(name, text):
    found = resolved(flags={name: text})
    assert [problem.where for problem in found.problems] == [read.flag(name)]
    assert f"--{read.flag(name)}" in found.problems[0].remedy


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 256, "ab/" * 2000, "\ud800"])
def test_names_that_no_file_can_have(text):
    problem, = resolved(flags={"run_dir": text}).problems
    assert (problem.code, problem.where) == ("invalid-file-name", "run-dir")
    problem, = resolved(flags={"data.corpus": "\ud800"}).problems
    assert (problem.code, problem.where) == ("value-not-text", "data.corpus")


def test_home_folders_of_paths(monkeypatch):
    """`~` is also expanded in a file, where no shell replaces it. A user who does not exist has no home folder."""
    monkeypatch.setenv("HOME", "/home/someone")
    found = resolved({"run_dir": "~/runs", "data": {"cache_dir": "~nosuchuser/cache"}})
    assert str(found.run.run_dir) == "/home/someone/runs"
    assert [(problem.code, problem.where) for problem in found.problems] == [("unknown-home", "data.cache-dir")]


@pytest.mark.parametrize(("tree", "remedy"), [
    ({"batch": {"globl_size": 3}}, "Did you mean batch.global_size?"),
    ({"global_size": 3}, "Did you mean batch.global_size?"),
    ({"batch": {"global-size": 3}}, "Did you mean batch.global_size?"),
    ({"mesch": {"data": 2}}, "Did you mean [mesh]?"),
    ({"pipeline": {"policy": "gpip"}}, "Change it in file x.toml, or set --pipeline.policy gpipe, for example."),
    ({"zzzzzz": 1}, "`ranvier train --help-all` lists all settings.")])
def test_remedies_suggest_what_was_meant(tree, remedy):
    assert [problem.remedy for problem in resolved(tree).problems] == [remedy]


def test_capitals_are_understood_in_the_remedy():
    for name, text in (("precision", "BF16"), ("tensor.scheme", "SUMMA"), ("optim.algorithm", "AdamW")):
        assert f" {text.lower()}" in resolved(flags={name: text}).problems[0].remedy


@pytest.mark.parametrize(("name", "text", "meant"), [
    ("data.max_bytes", "8M", 8_000_000), ("data.max_bytes", "4MiB", 4 << 20), ("train.steps", "1k", 1000),
    ("optim.bucket_size", "4MiB", ...), ("train.steps", "8B", ...), ("lora.dropout", "8M", ...),  # not numbers of bytes
    ("train.steps", f"{'1' * 5000}k", ...), ("optim.bucket_size", "4Mi", 4 << 20),
    ("comm.timeout_seconds", "5m", 300), ("comm.timeout_seconds", "2 h", 7200), ("checkpoint.every", "10m", ...),
    ("precision", "float16", "fp16"), ("precision", "BF16-mixed", "bf16"), ("data.corpus", "8M", None)])
def test_numbers_with_units_and_formats_of_others_are_understood_in_the_remedy(name, text, meant):
    problems = resolved(flags={name: text}).problems
    if meant is None:
        assert not problems  # a name
    elif meant is ...:
        assert str(problems[0].remedy).endswith(", for example.")
    else:
        assert problems[0].remedy == f"Set --{read.flag(name)} {meant}."


def test_all_problems_at_once():
    found = resolved({"seed": -1, "mesh": {"data": 0}, "nothing": 1}, {"train.steps": "0", "precision": "x"})
    assert [problem.where for problem in found.problems] == ["seed", "mesh.data", "nothing", "train.steps", "precision"]


def test_shipped_recipes_resolve():
    assert "gpt-tiny" in read.recipe_names()
    for name in read.recipe_names():
        short, layer = read.load(name)
        assert (short, layer.origin) == (name, f"recipe {name}")
        assert read.merge([layer]).problems == ()


def test_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("seed = 3\n[mesh]\ndata = 2\n")
    name, layer = read.load(str(path))
    found = read.merge([layer])
    assert (name, found.run.seed, found.run.mesh.data, found.origins["seed"]) == ("mine", 3, 2, f"file {path}")


def test_the_folder_of_a_run_goes_on(tmp_path):
    """Also if it has been moved. None of its values count as the user's."""
    (tmp_path / "run.toml").write_text('seed = 3\nrun_dir = "elsewhere"\n')
    name, layer = read.load(str(tmp_path))
    found = read.merge([layer]).run
    assert (name, found.seed, str(found.run_dir), found.resume) == (tmp_path.name, 3, str(tmp_path), "auto")
    assert not layer.is_users


def test_a_run_on_other_stages_has_limits_of_its_own(tmp_path):
    """The limits in its run.toml are those of its earlier mesh."""
    (tmp_path / "run.toml").write_text(
        'run_dir = "elsewhere"\n[mesh]\ndata = 2\npipe = 2\n[pipeline]\nboundaries = [5]\nin_flight = 2\n'
        "deferred = [1, 1]\ndefer_last = 2\n[launch]\nthreads = 3\n")
    layer = read.load(str(tmp_path))[1]

    def run(**flags):
        return read.merge([layer, read.Layer(origin="flag", values=flags, is_text=True)]).run

    def pipeline(**flags):
        return run(**flags).pipeline

    kept = read.merge([layer]).run.pipeline
    assert (kept.boundaries, kept.in_flight, kept.deferred, kept.defer_last) == ((5,), 2, (1, 1), 2)
    assert pipeline(**{"mesh.data": "1", "mesh.pipe": "2"}) == kept
    assert [run(**{"mesh.data": data}).launch.threads for data in ("2", "1")] == [3, "auto"]
    for flags in ({"mesh.pipe": "4"}, {"mesh.col": "2"}, {"mesh.pipe": "auto"}, {"pipeline.stages_per_rank": "2"}):
        found = pipeline(**flags)
        assert (found.boundaries, found.in_flight, found.deferred, found.defer_last) == (None, "auto", None, None)
    assert pipeline(**{"mesh.pipe": "3", "pipeline.boundaries": "2,4"}).boundaries == (2, 4)
    users = read.merge([dataclasses.replace(layer, is_users=True),
                        read.Layer(origin="flag", values={"mesh.pipe": "4"}, is_text=True)])
    assert users.run.pipeline == kept  # values that a user chose are kept, and checked later


def test_a_run_begins_with_an_imported_folder(tmp_path):
    """The run.toml of an imported folder names no run folder: the run gets its own, and the imported weights."""
    (tmp_path / "run.toml").write_text("seed = 3\n")
    found = read.merge([read.load(str(tmp_path))[1]]).run
    assert (found.seed, found.run_dir, found.resume) == (3, None, str(tmp_path))


@pytest.mark.parametrize(("recipe", "code"), [
    ("missing.toml", "recipe-unreadable"), ("folder.toml", "recipe-unreadable"),
    ("bad.toml", "recipe-not-toml"), ("pipe.toml", "recipe-unreadable"),
    ("latin.toml", "recipe-not-toml"), ("gpt-tyni", "unknown-recipe"),
    ("x", "unknown-recipe"), ("adapters", "recipe-is-adapters"),
    (":f", "object-name-form"), ("json:", "object-name-form"),
    ("no_such_module:f", "module-not-found"), ("json:nothing", "name-not-in-module"),
    ("json:dumps", "recipe-function-raised"), ("os:getpid", "recipe-function-result")])
def test_recipes_that_cannot_be_read(tmp_path, monkeypatch, recipe, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "bad.toml").write_text("seed = = 3")
    (tmp_path / "latin.toml").write_bytes(b"x = '\xe9'")
    with raises(code):
        read.load(recipe)


def test_a_mistyped_name_is_told_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_typos.py").write_text(
        "from ranvier.errors import ConfigError\n"
        "def nuts():\n    return 1 / 0\n")
    (tmp_path / "my_refusal.py").write_text(
        "from ranvier.errors import ConfigError\n"
        "raise ConfigError('no', code='own-code', where='here', remedy='')\n")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    for recipe, code, hint in (("gpt-tyni", "unknown-recipe", "gpt-tiny? Recipes are: bert-sentiment"),
                               ("model/model.safetensors", "unknown-recipe", "folder of the model, model."),
                               ("own/train.py", "unknown-recipe", "python own/train.py"),
                               ("my_typos:nut", "name-not-in-module", "my_typos:nuts"),
                               ("my_typos:nuts", "recipe-function-raised", "my_typos.py, line 3"),
                               ("my_refusal:f", "own-code", "")):
        with raises(code) as caught:
            read.load(recipe)
        assert hint in caught.value.remedy, recipe
    flags = {"log.tracker": "wand", "model.full_layers": "x", "model.preset": "llama3.1-8b"}
    problems = read.merge([read.Layer(origin="flag", values=flags, is_text=True)]).problems
    assert {problem.where: problem.remedy.partition(",")[0] for problem in problems} == {
        "log.tracker": "Set --log.tracker wandb", "model.full-layers": "Correct it",
        "model.preset": "Did you mean llama-3.1-8b? Choose one of: llama-2-7b"}


def test_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_recipes.py").write_text(
        "from ranvier.config.run import Run, Train\nfrom ranvier.errors import ConfigError\n"
        "def tree(): return {'train': {'steps': 5, 'warmup_steps': 2}}\n"
        "def run(): return Run(train=Train(steps=6))\n"
        "def refuses(): raise ConfigError('is no recipe', where='refuses', remedy='Call another.')\n")
    name, layer = read.load("my_recipes:tree")
    assert (name, read.merge([layer]).run.train) == ("tree", Train(steps=5, warmup_steps=2))
    found = read.merge([read.load("my_recipes:run")[1]])
    assert (found.run, found.origins["train.steps"], found.origins["seed"]) == (
        Run(train=Train(steps=6)), "function my_recipes:run", "default")
    with pytest.raises(ConfigError, match="refuses: is no recipe"):
        read.load("my_recipes:refuses")


def test_a_written_run_is_a_recipe(tmp_path):
    flags = {"optim.betas": "0.5,0.6", "pipeline.boundaries": "2,5", "run_dir": "runs/x", "train.prompt": 'a "b"\n',
             "data.cache_dir": "~/cache", "comm.timeout_seconds": "1e-3"}
    run = resolved(flags=flags).run
    for each in (run, Run()):
        read.write(each, tmp_path / "run.toml")
        found = read.merge([read.load(str(tmp_path / "run.toml"))[1]])
        assert (found.run, found.problems) == (each, ())


def test_a_runs_own_file_repeats_it_elsewhere(tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    run = dataclasses.replace(Run(seed=9), run_dir=folder)
    read.write(run, folder / "run.toml")
    name, layer = read.load(str(folder / "run.toml"))
    found = read.merge([layer]).run
    assert (name, found.seed, found.run_dir) == ("first", 9, None)
    read.write(run, tmp_path / "run.toml")
    assert read.merge([read.load(str(tmp_path / "run.toml"))[1]]).run == run


def test_default_folder_is_named_after_the_recipe():
    folder = read.default_folder("my run/x")
    assert folder.parent.name == "runs"
    assert folder.name.startswith("my-run-x-2")


def test_settings_mirror_the_tree():
    names = {f"{section.name}.{field.name}" for section in dataclasses.fields(Run)
             if dataclasses.is_dataclass(getattr(Run(), section.name))
             for field in dataclasses.fields(getattr(Run(), section.name))}
    assert names <= set(read.settings())


def test_pretrained_weights_overrule_the_sizes_of_a_recipe():
    _, recipe = read.load("bert-sentiment")
    merged = read.merge([recipe, read.Layer(origin="flag", values={"model.pretrained": "mine"}, is_text=True)])
    assert merged.run.model.num_layers == Transformer.num_layers and merged.run.model.hidden == Transformer.hidden
    assert merged.run.model.sequence == 64 and merged.run.model.dropout == 0.1  # the run's, not the weights'
    assert merged.origins["model.hidden"] == "flag through model.pretrained"
    same = read.merge([recipe, read.Layer(origin="flag", values={"model.pretrained": "minilm"}, is_text=True)])
    assert same.run.model.hidden == 384
    both = read.merge([recipe, read.Layer(origin="flag", is_text=True,
                                          values={"model.pretrained": "mine", "model.hidden": "40"})])
    assert both.run.model.hidden == 40  # set in the same layer, so it is compared with the weights later
    without = read.merge([recipe, read.Layer(origin="flag", values={"model.pretrained": "none"}, is_text=True)])
    assert without.run.model.pretrained is None and without.run.model.hidden == 384
    preset = read.merge([read.Layer(origin="flag", is_text=True, values={
        "model.pretrained": "mine", "model.preset": "llama-3.2-1b"})])
    assert preset.run.model.hidden == 2048
