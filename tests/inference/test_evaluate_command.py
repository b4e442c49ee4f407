"""`ranvier evaluate`: the results of the run's own evaluation, on another mesh; folders; lm-evaluation-harness;
refusals."""

import json
import math
import re
import shutil
import subprocess
import sys
import types
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ranvier.cli.main import run_command
from ranvier.data import wordpiece
from ranvier.data.tokenizer import train as train_tokenizer
from ranvier.inference.lm_eval_tasks import HarnessTasks
from tests.errors import check, raises, reports

WORDS = ["good", "fine", "great", "bad", "poor", "awful", "day", "film", "book", "meal"]
HARNESS = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
SMALL = ["--model.num-layers", "2", "--model.hidden", "16", "--model.heads", "2", "--model.sequence", "16",
         "--train.steps", "2", "--batch.global-size", "4", "--batch.microbatch-size", "2", "--train.sample-tokens", "0",
         "--precision", "fp64"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the task lm and a run of classification, with their data."""
    path = tmp_path_factory.mktemp("runs")
    for part, seed in (("train", 1), ("other", 2)):
        torch.manual_seed(seed)
        lines = [" ".join(WORDS[place] for place in torch.randint(0, 10, (12,))) for _ in range(120)]
        (path / f"{part}.txt").write_text("\n".join(lines) + "\n")
        (path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(
            f"{line}\t{'up' if len(line) % 2 else 'down'}\n" for line in lines))
    (path / "recipe.toml").write_text("")
    for kind, args in (("lm", ["--data.corpus", path / "train.txt", "--model.vocab", "300"]), (
            "classification", ["--data.task", "classification", "--data.train", path / "train.tsv",
                               "--data.eval", path / "other.tsv", "--model.vocab", "120"])):
        assert run_command(["train", str(path / "recipe.toml"), "--run-dir", str(path / kind), "--data.cache-dir",
                            str(path / "cache"), *SMALL, *map(str, args)]) == 0
    return path


def results(capsys, *args):
    capsys.readouterr()
    assert run_command(["evaluate", *map(str, args), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["results"]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_is_evaluated_as_it_was_at_its_end(runs, capsys, monkeypatch):
    """The command also reports its progress."""
    monkeypatch.setattr("ranvier.inference.evaluation._TELL_SECONDS", -1.0)
    capsys.readouterr()
    assert run_command(["evaluate", str(runs / "lm"), "--json"]) == 0
    out, told = capsys.readouterr()
    found, (done, total) = json.loads(out)["results"], re.findall(r"(\d+) of (\d+) samples evaluated", told)[-1]
    assert 0 < int(done) == int(total)
    assert found["held-out"]["loss"] == pytest.approx(summary(runs / "lm")["eval_loss"], rel=1e-12)
    assert found["held-out"]["perplexity"] == pytest.approx(math.exp(found["held-out"]["loss"]), rel=1e-12)
    found = results(capsys, runs / "classification")["held-out"]
    ended = summary(runs / "classification")
    assert (found["loss"], found["accuracy"], found["sentences"]) == (
        pytest.approx(ended["eval_loss"], rel=1e-12), ended["eval_accuracy"], 120)


def test_checkpoints_elsewhere(runs, capsys, tmp_path, monkeypatch):
    """run.toml names their folder, relative to the directory where the run was started; the tokenizer is the run's."""
    monkeypatch.chdir(tmp_path)
    args = ["train", runs / "recipe.toml", "--run-dir", "runs/tr", "--checkpoint.dir", "saved/tr", "--data.cache-dir",
            runs / "cache", *SMALL, "--data.corpus", runs / "train.txt", "--model.vocab", "300"]
    assert run_command([*map(str, args)]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = results(capsys, tmp_path / "runs" / "tr")
    assert found["held-out"]["loss"] == pytest.approx(summary(tmp_path / "runs" / "tr")["eval_loss"], rel=1e-12)
    monkeypatch.chdir(tmp_path)
    Path("saved/tr/best").symlink_to("step-2")
    for run, out in (("runs/tr", "newest"), ("runs/tr/best", "best")):
        assert run_command(["export", run, out]) == 0
        assert Path(out, "tokenizer.json").read_bytes() == Path("runs/tr/tokenizer.json").read_bytes()
    assert run_command(["generate", "runs/tr", "--prompt", "good", "--max-tokens", "1"]) == 0
    monkeypatch.chdir("runs")  # where the hub might have a model of the name tr/best
    assert run_command(["generate", "tr/best", "--prompt", "good", "--max-tokens", "1"]) == 0
    assert results(capsys, "tr/best") == results(capsys, "tr")
    monkeypatch.chdir(tmp_path)
    Path("runs/tr/run.toml").rename("any.toml")
    Path("runs/tr/run.toml").symlink_to(tmp_path / "any.toml")  # may be another user's
    assert run_command(["export", "runs/tr", "again"]) == 2


def test_a_run_with_adapters(runs, capsys, tmp_path):
    args = ["train", runs / "recipe.toml", "--run-dir", tmp_path / "run", "--data.cache-dir", runs / "cache", *SMALL,
            "--data.corpus", runs / "train.txt", "--model.vocab", "300", "--lora.rank", "2", "--lora.alpha", "64",
            "--train.learning-rate", "0.1"]
    assert run_command([*map(str, args)]) == 0
    found = results(capsys, tmp_path / "run")
    assert found["held-out"]["loss"] == pytest.approx(summary(tmp_path / "run")["eval_loss"], rel=1e-12)


def test_other_data_by_name_and_a_table(runs, capsys):
    found = results(capsys, runs / "lm", "--data", f"one={runs / 'other.txt'}", "--data", runs / "train.txt")
    assert list(found) == ["one", "train"] and found["one"]["tokens"] > found["train"]["tokens"] / 2
    assert run_command(["evaluate", str(runs / "classification"), "--data", str(runs / "other.tsv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["data", "metric", "value"] and lines[1].split()[:5] == [
        "other", "loss,", "nats", "per", "sentence"]
    assert lines[-1].split() == ["other", "sentences", "120"]


@pytest.mark.slow
def test_ranks_find_what_one_rank_finds(runs, capsys):
    expected = results(capsys, runs / "lm", "--data", f"x={runs / 'other.txt'}")["x"]
    done = subprocess.run([sys.executable, "-m", "ranvier", "evaluate", str(runs / "lm"), "--mesh.pipe", "2", "--json",
                           "--data", f"x={runs / 'other.txt'}"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"]["x"] == pytest.approx(expected, rel=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random GPT-2 as transformers saves it, with a task of the harness."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([" ".join(WORDS)] * 5, 280)
    transformers.set_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=tokenizer.vocab, n_embd=24, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3
        )).double().save_pretrained(path)
    tokenizer.save(path / "tokenizer.json")
    (path / "text.txt").write_text(" ".join(WORDS) * 30 + "\n")
    questions = [{"context": "a good", "choices": ["day", "film and book"], "answer": 1},
                 {"context": "an awful", "choices": ["meal", "great book", "fine day"], "answer": 0}]
    (path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (path / "tasks").mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path / "questions.jsonl")}},
            "test_split": "test", "metadata": {"version": 1.0}}
    for name, more in (
            ("tiny_choice", {"output_type": "multiple_choice", "doc_to_text": "{{context}}",
                             "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
                             "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")]}),
            ("tiny_rolling", {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}",
                              "metric_list": [{"metric": "byte_perplexity"}]}),
            ("tiny_text", {"output_type": "generate_until", "doc_to_text": "{{context}}",
                           "doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match"}],
                           "generation_kwargs": {"until": [" b"], "max_gen_toks": 6, "do_sample": False}})):
        (path / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **more}))
    return path


def test_a_folder_of_hugging_face(folder, capsys, tmp_path):
    found = results(capsys, folder, "--data", folder / "text.txt", "--precision", "fp64", "--data.cache-dir", tmp_path,
                    "--model.sequence", "32")
    assert set(found) == {"text"}
    assert found["text"]["perplexity"] > 1


def test_adapters_of_a_folder_are_evaluated_on_their_model(folder, capsys, tmp_path):
    settings = ["--data.corpus", folder / "text.txt", "--data.cache-dir", tmp_path / "cache", "--precision", "fp64",
                "--model.sequence", "16"]
    args = ["train", folder, *settings, "--train.steps", "2", "--train.warmup-steps", "0", "--train.learning-rate", "1",
            "--lora.rank", "2", "--lora.targets", "all-linear", "--train.sample-tokens", "0", "--run-dir",
            tmp_path / "run", "--batch.global-size", "2", "--batch.microbatch-size", "2"]
    assert run_command([*map(str, args)]) == 0
    assert run_command(["export", str(tmp_path / "run"), str(tmp_path / "adapters"), "--adapters"]) == 0
    data = ["--data", f"x={folder / 'text.txt'}"]
    tuned = results(capsys, tmp_path / "run", *data)["x"]
    found = results(capsys, folder, *data, *settings, "--lora.adapters", tmp_path / "adapters")["x"]
    assert found == pytest.approx(tuned, rel=1e-6)
    assert results(capsys, folder, *data, *settings)["x"]["loss"] != pytest.approx(tuned["loss"], rel=1e-2)
    assert run_command(["evaluate", str(tmp_path / "adapters")]) == 2
    assert "--lora.adapters" in capsys.readouterr().err
    with reports("other-alpha-than-trained"):
        assert run_command(["evaluate", str(tmp_path / "run"), "--lora.alpha", "64"]) == 2
    with reports("adapters-of-checkpoint"):
        assert run_command(["evaluate", str(tmp_path / "run"), "--lora.adapters", str(tmp_path / "adapters")]) == 2


def test_tasks_of_the_harness_are_those_of_its_own_model(folder, capsys, tmp_path):
    """The harness's own model of transformers gives the same numbers on one rank."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = ["tiny_choice", "tiny_rolling", "tiny_text"]
    found = results(capsys, folder, "--lm-eval", ",".join(tasks), "--lm-eval-path", folder / "tasks", "--precision",
                    "fp64")
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"),
                                                     eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    theirs = lm_eval.simple_evaluate(model=HFLM(pretrained=model, tokenizer=tokenizer, device="cpu"), tasks=tasks,
                                     task_manager=TaskManager(include_path=str(folder / "tasks")),
                                     bootstrap_iters=0)["results"]
    for task, metrics in (("tiny_choice", ("acc", "acc_norm", "acc_bytes")), ("tiny_rolling", ("byte_perplexity",)),
                          ("tiny_text", ("exact_match",))):
        for metric in metrics:
            assert found[task][metric] == pytest.approx(theirs[task][f"{metric},none"], rel=1e-6)


@pytest.mark.slow
def test_several_ranks_serve_the_harness(folder):
    pytest.importorskip("lm_eval")
    done = subprocess.run([sys.executable, "-m", "ranvier", "evaluate", str(folder), "--mesh.pipe", "2", "--json",
                           "--lm-eval", "tiny_choice,tiny_text", "--lm-eval-path", str(folder / "tasks")],
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["results"]) == {"tiny_choice", "tiny_text"}


def test_the_harness_that_is_missing(monkeypatch):
    monkeypatch.setattr("ranvier.inference.lm_eval_tasks.find_spec", lambda name: None)
    with raises("lm-eval-missing"):
        HarnessTasks(names=("x",))


@pytest.mark.parametrize(("args", "code", "says"), [
    (["FOLDER"], "evaluation-data-missing", "data: "),
    (["LM", "--data", "a=x.txt", "--data", "a=y.txt"], "malformed-evaluation-data", "a=y.txt"),
    (["CLASSIFICATION", "--lm-eval", "x"], "evaluation-of-language-models", "lm-eval: "),
    (["LM", "--data.tokenizer", "OTHER"], "other-tokenizer-than-trained", "data.tokenizer: "),
    (["CLASSIFICATION", "--data.train", "THIRD", "--data", "THIRD"], "other-classes-than-trained", "'left', 'right'"),
    (["LM", "--mesh.pipe", "99"], None, "mesh.pipe"),
    (["LM", "--ema"], "checkpoint-without-ema", "--optim.ema"),
    (["LM", "--lm-eval-shots", "0"], "lm-eval-option-alone", "--lm-eval-shots: has no effect"),
    (["FOLDER", "--ema"], "folder-without-ema", "model"),
    (["LM", "--data", "TINY"], "too-little-eval-text", "16 + 1 tokens"),
    (["BARE", "--lm-eval", "x"], "evaluation-tokenizer-missing", "data.tokenizer: "),
    (["BARE", "--data", "TINY"], "tokenizer-missing", "data.tokenizer: "),
    (["HEADLESS", "--data", "THIRD"], "untrained-head", "head."),
    (["UNNAMED", "--data.train", "THIRD", "--data", "THIRD"], "other-classes-than-trained", "numbers: ['LABEL_0',"),
    (["IMPORTED HEADLESS", "--data", "THIRD"], "untrained-head", "head."),
    (["IMPORTED UNNAMED", "--data.train", "THIRD", "--data", "THIRD"], "other-classes-than-trained", "['LABEL_0',"),
    pytest.param(["FOLDER", "--lm-eval", "gone"], "unknown-lm-eval-task", "lm-eval: ", marks=HARNESS),
    (["gone"], "folder-without-checkpoint", "gone")])
def test_refusals(runs, folder, capsys, monkeypatch, args, code, says, tmp_path):
    if args[-1] == "x":  # refused before the package is called
        monkeypatch.setattr("ranvier.inference.lm_eval_tasks.find_spec", lambda name: True)
    (tmp_path / "third.tsv").write_text("sentence\tlabel\n" + "a good day\tleft\na bad film\tright\n" * 20)
    places = {"FOLDER": folder, "LM": runs / "lm", "CLASSIFICATION": runs / "classification",
              "OTHER": folder / "tokenizer.json", "THIRD": tmp_path / "third.tsv", "TINY": tmp_path / "tiny.txt",
              "BARE": tmp_path / "bare", "HEADLESS": tmp_path / "BertModel",
              "UNNAMED": tmp_path / "BertForSequenceClassification"}
    (tmp_path / "tiny.txt").write_text("a day\n")
    if "BARE" in args:
        shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json"))
    source = places.get(args[0].removeprefix("IMPORTED "))
    if source in (places["HEADLESS"], places["UNNAMED"]):
        transformers = pytest.importorskip("transformers")
        getattr(transformers, source.name)(transformers.BertConfig(
            vocab_size=90, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=16)).save_pretrained(source)
        wordpiece.train(["a good day"], 90).save(source / "tokenizer.json")
    if args[0].startswith("IMPORTED"):
        places[args[0]] = tmp_path / "imported"
        assert run_command(["import", str(source), str(places[args[0]])]) == 0
    with reports(code) if code else nullcontext():
        assert run_command(["evaluate", *(str(places.get(arg, arg)) for arg in args)]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_prompt_without_room_for_an_answer():
    pytest.importorskip("lm_eval")
    from ranvier.inference.lm_eval_model import HarnessModel

    model = HarnessModel(types.SimpleNamespace(longest=8))
    with raises("max-gen-tokens", 8, where="max_gen_toks"):
        model.generate_until([types.SimpleNamespace(args=("x", {"max_gen_toks": 8}))])


def test_a_checkpoint_of_another_loop(runs, capsys, monkeypatch):
    from ranvier.checkpoint.manifest import Saved

    saved = Saved(next(Path(runs / "lm" / "checkpoint").glob("step-*")))
    saved.manifest.about.clear()
    monkeypatch.setattr("ranvier.inference.trained.newest_whole", lambda path, tell: saved)
    with reports("checkpoint-without-run"):
        assert run_command(["evaluate", str(runs / "lm")]) == 2
    assert str(saved.folder) in capsys.readouterr().err


def test_code_that_a_checkpoint_names_is_not_imported(runs, capsys, monkeypatch):
    from ranvier.checkpoint.manifest import Saved

    saved = Saved(next(Path(runs / "lm" / "checkpoint").glob("step-*")))
    saved.manifest.about["run"]["model"]["family"] = "evil:Family"
    monkeypatch.setattr("ranvier.inference.trained.newest_whole", lambda path, tell: saved)
    assert run_command(["evaluate", str(runs / "lm")]) == 2
    assert "model.family: names code" in capsys.readouterr().err


def test_a_checkpoint_chooses_no_folder_that_is_read(runs, monkeypatch, capsys, tmp_path):
    """Without a matching run.toml of the user's, its paths must be named again; it can never choose the cache."""
    from ranvier.checkpoint.manifest import Saved
    from ranvier.inference.trained import open_trained

    saved = Saved(next(Path(runs / "lm" / "checkpoint").glob("step-*")))
    saved.manifest.about["run"]["data"] |= {"corpus": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    monkeypatch.setattr("ranvier.inference.trained.newest_whole", lambda path, tell: saved)
    trained = open_trained(runs / "lm", print)
    assert trained.unnamed == {"data.corpus": str(tmp_path)}
    assert not {"data.corpus", "data.cache_dir"} & set(trained.settings)
    problem, = trained.check_places(())
    check(problem, "path-named-by-checkpoint", where="data.corpus", value=str(tmp_path))
    assert not trained.check_places(["data.corpus"])
    assert run_command(["evaluate", str(runs / "lm")]) == 2
    assert "data.corpus: is a path that only the checkpoint names" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
