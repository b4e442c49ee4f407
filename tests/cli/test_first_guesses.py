"""What people type first: names from other programs, a model without data, a folder instead of a recipe."""

import json

import pytest
import torch

from ranvier.cli.main import run_command
from ranvier.config import presets, read
from ranvier.errors import ConfigError
from tests.errors import raises
from tests.hf_peers import peer, saved


@pytest.mark.parametrize(("flag", "setting"), [
    ("--train.lr", "--train.learning-rate"), ("--lr", "--train.learning-rate"), ("--batch-size", "--batch.global-size"),
    ("--tp", "--mesh.col")])
def test_settings_of_other_programs_are_named(flag, setting, capsys):
    assert run_command(["train", "gpt-tiny", flag, "1"]) == 2
    assert setting in capsys.readouterr().err


def test_a_file_with_another_programs_setting_names_ours():
    problem, = read.merge([read.from_dict({"train": {"lr": 1}}, "file x.toml")]).problems
    assert problem.where == "train.lr" and "train.learning_rate" in problem.remedy


def test_a_missing_or_unknown_recipe_lists_them(capsys):
    assert run_command(["train"]) == 2
    assert "gpt-tiny" in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        read.load("nanoGPT")
    assert "gpt-tiny" in caught.value.remedy


def test_a_preset_is_a_model_and_no_data(tmp_path, capsys):
    run = read.merge([read.load("llama-3.1-8b")[1]]).run
    assert (run.precision, run.train.schedule, run.optim.clip_norm, run.optim.betas) == (
        "bf16", "cosine", 1.0, (0.9, 0.95)) and run.train.warmup_steps < run.train.steps
    assert run_command(["train", "llama-3.1-8b", "--run-dir", str(tmp_path / "run"), "--json"]) == 2
    errors = [(error["where"], error["value"]) for error in json.loads(capsys.readouterr().out)["errors"]]
    assert errors[:2] == [("recipe", "llama-3.1-8b")] * 2 and not (tmp_path / "run").exists()
    run_command(["check", "smollm2-135m", "--ranks", "1", "--cluster", "h100", "--mesh.data", "1", "--json"])
    assert "recipe" not in [problem["where"] for problem in json.loads(capsys.readouterr().out)["problems"]]


def test_a_presets_bf16_is_for_devices(capsys, monkeypatch):
    def checked(*flags):
        run_command(["check", "smollm2-135m", "--json", *flags])
        return next((value["value"], value["origin"]) for value in json.loads(capsys.readouterr().out)["values"]
                    if value["name"] == "precision")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checked() == ("fp32", "preset smollm2-135m, on a CPU")
    assert checked("--precision", "bf16") == ("bf16", "flag")
    assert checked("--cluster", "h100") == ("bf16", "preset smollm2-135m"), "the cluster is not this machine"


def test_a_folder_in_hugging_face_format_is_a_recipe(tmp_path, capsys):
    folder = saved(peer("LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2), tmp_path / "model")
    name, layer = read.load(str(folder))
    run = read.merge([layer]).run
    assert name == "model" and run.model.pretrained == str(folder)
    assert run.train.learning_rate == presets.FINE_TUNING["train.learning_rate"]
    assert run_command(["train", str(folder), "--run-dir", str(tmp_path / "run"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["errors"][0]
    assert (error["where"], error["value"]) == ("recipe", str(folder)) and "--data." in error["remedy"]
    run_command(["check", str(folder), "--json"])
    found = {one["name"]: (one["value"], one["origin"]) for one in json.loads(capsys.readouterr().out)["values"]}
    assert found["model.num-layers"] == ("1", "model.pretrained") and found["model.hidden"][0] == "16"


def test_a_folder_of_config_json_is_planned_and_not_trained(tmp_path, capsys):
    """Neither its weights nor its tokenizer are needed for a prediction; `check` says that a run needs them."""
    (tmp_path / "config.json").write_text(json.dumps(peer(
        "LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2).config.to_dict()))
    out = str(tmp_path / "run.toml")
    of_h100 = [str(tmp_path), "--cluster", "h100", "--json"]
    assert run_command(["plan", *of_h100, "--ranks", "1", "--search", "microbatch", "--out", out]) == 0
    with_out = capsys.readouterr()
    assert json.loads(with_out.out)["ranks"] == 1 and "model.safetensors" in with_out.err
    assert run_command(["simulate", *of_h100]) == 0
    capsys.readouterr()
    assert run_command(["check", *of_h100]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "pretrained-without-weights" in [each["code"] for each in report["warnings"]] and report["memory"]
    train = ["train", str(tmp_path), "--data.corpus", out, "--run-dir", str(tmp_path / "run"), "--json"]
    assert run_command(train) == 2
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["errors"]] == ["pretrained-without-weights"]


def test_data_that_is_not_here_is_told_before_ranks_are_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ranvier.launch.start.start_ranks", pytest.fail)
    for given, code in ((["--data.corpus", "gone.jsonl"], "corpus-missing"),
                        (["--data.task", "chat", "--data.train", "gone.jsonl"], "unknown-data")):
        assert run_command(["train", "llama-tiny", "--run-dir", str(tmp_path / "run"), "--json", *given]) == 2
        assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == code


@pytest.mark.parametrize("name", ["someone/a-model", "model.gguf", "someone/model.gguf"])
def test_a_model_of_the_hub_in_the_place_of_a_recipe_says_how_to_get_it(name):
    with raises("unknown-recipe", value=name) as caught:
        read.load(name)
    assert f"--model.pretrained {name}" in caught.value.remedy and f"ranvier import {name}" in caught.value.remedy


def test_a_mistyped_folder_is_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/first", "nothing", str(tmp_path / "nothing")):
        with raises("unknown-recipe") as caught:
            read.load(name)
        assert "ranvier import" not in caught.value.remedy


@pytest.mark.parametrize(("positions", "sequence"), [
    ({"max_position_embeddings": 131072}, 2048), ({"max_position_embeddings": 256}, 256), ({"n_positions": 512}, 512),
    ({}, 2048)])
def test_a_folder_trains_on_sequences_as_long_as_a_presets(tmp_path, positions, sequence):
    (tmp_path / "config.json").write_text(json.dumps(positions))
    assert read.merge([read.load(str(tmp_path))[1]]).run.model.sequence == sequence


@pytest.mark.parametrize("more", [[], ["--data.task", "lm"], ["--data.train", "chat.jsonl"]])
def test_a_folder_never_trains_on_text_that_nobody_named(tmp_path, capsys, more):
    (tmp_path / "config.json").write_text("{}")
    assert run_command(["train", str(tmp_path), "--json", *more]) == 2
    error = json.loads(capsys.readouterr().out)["errors"][0]
    assert error["code"] == "preset-without-data" and "--data.task chat" in error["remedy"]


def test_what_a_preset_lacks_is_told_before_it_is_started(tmp_path, capsys):
    """`check` finds no problems in a preset, and a plan writes it as a run file: unlike the run, neither needs data."""
    tiny = ["llama-3.2-1b", "--model.num-layers", "1", "--model.sequence", "64", "--batch.global-size", "8"]
    out = str(tmp_path / "run.toml")
    for command in (["check", *tiny, "--ranks", "1", "--cluster", "h100"],
                    ["plan", *tiny, "--ranks", "1", "--cluster", "h100", "--search", "microbatch", "--out", out],
                    ["check", out, "--cluster", "h100"]):
        assert run_command(command) == 0
        said = "".join(capsys.readouterr())
        assert "recipe: has no data of its own" in said and "recipe: has no tokenizer of its own" in said


def test_a_folder_of_no_family_has_no_table_of_another_models_memory(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    assert run_command(["check", str(tmp_path), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert "model_type" in found["problems"][0]["where"] and not found["stages"] and not found["memory"]
