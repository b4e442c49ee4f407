"""Classifiers on decoders: from rows of text and label to a folder that transformers loads, and training from that
folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.hf.pretrained import PretrainedConfig
from ranvier.checkpoint.manifest import Saved, step_folder
from ranvier.cli.main import run_command
from ranvier.config.run import Data, Lora, Train, Transformer
from ranvier.data.classification import CLASSIFICATION
from ranvier.data.prepare import prepare, problems
from ranvier.data.sentences import Columns, table_sentences
from ranvier.data.tables import open_file
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.testing.tasks import check_task
from tests.data.test_preference import written
from tests.errors import raises
from tests.train.test_preference_run import losses_of, run_of, trained
from tests.train.test_reward_run import SIZES, whole_tokenizer_in

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
NAMES = ("neutral", "good", "bad")
"""By number; not in alphabetical order."""


def rows_of(count, labels=NAMES):
    words = {"good": "fine film", "bad": "dull plot", "neutral": "a film"}
    return [{"text": f"{words[NAMES[number % 3]]} {'so ' * (number % 5)}{number}", "label": labels[number % 3]}
            for number in range(count)]


def with_bos(path):
    """The tokenizer's folder with a token before each text, as Llama has one."""
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    bos = inner.token_to_id("</s>")
    inner.post_processor = TemplateProcessing(single="</s> $A", pair="</s> $A </s> $B:1", special_tokens=[
        ("</s>", bos)])
    inner.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A language model in Hugging Face's format."""
    path = with_bos(whole_tokenizer_in(tmp_path_factory.mktemp("models") / "base"))
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("classes")
    written(path / "rows.jsonl", rows_of(40))
    return path


def classes_run(folder, run_dir, model, *, rows="rows.jsonl", **changed):
    run = run_of(folder, run_dir, **{"model": Transformer(pretrained=str(model), sequence=32)} | changed)
    data = Data(task="classification", train=str(folder / rows), eval=str(folder / rows), cache_dir=folder / "cache")
    return resolve_pretrained(replace(run, data=data))


def logits_of(folder):
    """Logits of all rows by transformers, the same for single rows and a padded batch; and its names of classes."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [row["text"] for row in rows_of(40)]
    with torch.no_grad():
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        whole = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    assert (alone - whole).abs().max() < 1e-9
    return alone, tuple(model.config.id2label[number] for number in range(model.num_labels))


def assert_scores(summary, logits, names):
    expected = torch.tensor([names.index(row["label"]) for row in rows_of(40)])
    assert summary["eval_count"] == 40
    assert summary["eval_accuracy"] == float((logits.argmax(-1) == expected).double().mean())
    assert abs(summary["eval_loss"] - float(torch.nn.functional.cross_entropy(logits, expected))) < 1e-6


def evaluated(capsys, *words):
    capsys.readouterr()
    assert run_command(["evaluate", *words, "--json"]) == 0
    found, = json.loads(capsys.readouterr().out)["results"].values()
    return {"eval_count": found["sentences"]} | {f"eval_{name}": found[name] for name in found}


@pytest.mark.parametrize(("pair_column", "side"), [(None, "right"), ("other", "right"), ("other", "left")])
def test_samples_have_the_tokens_of_transformers(folder, base, tmp_path, pair_column, side):
    base = shutil.copytree(base, tmp_path / "base")
    document = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(document | {"truncation_side": side}))
    rows = [row | {"other": "so so, " * (number % 7 + 1) + "!"} for number, row in enumerate(rows_of(12))]
    written(tmp_path / "rows.jsonl", rows)
    run = classes_run(tmp_path, tmp_path / "run", base)
    run = replace(run, data=replace(run.data, pair_column=pair_column))
    data = check_task(CLASSIFICATION, run, lambda targets: torch.randn(
        len(targets["last"]), 32, 3, dtype=torch.float64))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    expected = [tokenizer(row["text"], row["other"] if pair_column else None, truncation=True, max_length=32)[
        "input_ids"] for row in rows]
    numbers = np.arange(12)
    inputs, targets = data.train.inputs(numbers, numbers), data.train.targets(numbers)
    found = [ids[:last + 1] for ids, last in zip(inputs.tolist(), targets["last"].tolist(), strict=True)]
    assert sorted(found) == sorted(expected) and (pair_column is None or max(map(len, found)) == 32)
    ids, counted = families.sample_of(run, 2)
    assert ids.shape == (2, 32) and counted["last"].tolist() == [31, 31] and counted["class"].shape == (2,)
    assert families.flops_per_sample(run) < families.flops_per_sample(replace(run, data=Data()))


def test_from_a_language_model_to_transformers_and_back(folder, base, tmp_path, capsys):
    run = classes_run(folder, tmp_path / "run", base, mesh=Mesh(pipe=2))
    summary, found = trained(run)
    assert found["head.score.weight"].shape == (3, 16) and "head.projection.weight" not in found
    assert losses_of(run)[-1] < losses_of(run)[0]
    out, imported = tmp_path / "exported", tmp_path / "imported"
    assert run_command(["export", str(run.run_dir), str(out)]) == 0
    logits, names = logits_of(out)
    assert names == ("bad", "good", "neutral")
    assert_scores(summary, logits, names)
    for words in ([str(run.run_dir)], [str(out), "--data", str(folder / "rows.jsonl")]):
        assert_scores(evaluated(capsys, *words), logits, names)
    again = classes_run(folder, tmp_path / "again", out, mesh=Mesh(col=2),
                        train=Train(steps=1, learning_rate=1e-30, sample_tokens=0))
    assert_scores(trained(again)[0], logits, names)
    assert run_command(["import", str(out), str(imported)]) == 0
    assert 'task = "classification"' in (imported / "run.toml").read_text()
    assert run_command(["generate", str(out)]) == 2, "it is not a language model"


@pytest.fixture(scope="module")
def theirs(base, tmp_path_factory):
    """A classifier that transformers has saved."""
    path = with_bos(whole_tokenizer_in(tmp_path_factory.mktemp("models") / "theirs"))
    config = transformers.LlamaConfig(**SIZES, id2label=dict(enumerate(NAMES)), label2id={
        name: number for number, name in enumerate(NAMES)}, pad_token_id=256)
    transformers.set_seed(1)
    transformers.LlamaForSequenceClassification(config).double().save_pretrained(path)
    return path


@pytest.mark.parametrize("labels", [NAMES, pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=["names", "numbers"])
def test_a_classifier_keeps_the_numbers_of_its_classes(theirs, tmp_path, capsys, labels):
    """The names of classes keep their numbers of the folder, also if the data has them in another order."""
    written(tmp_path / "rows.jsonl", rows_of(40, labels))
    logits, names = logits_of(theirs)
    run = classes_run(tmp_path, tmp_path / "run", theirs, train=Train(steps=1, learning_rate=1e-30, sample_tokens=0))
    summary, _ = trained(run)
    assert names == NAMES
    assert_scores(summary, logits, NAMES)
    for words in ([str(run.run_dir)], [str(theirs), "--data", str(tmp_path / "rows.jsonl")]):
        assert_scores(evaluated(capsys, *words), logits, NAMES)
    assert run_command(["export", str(run.run_dir), str(tmp_path / "out")]) == 0
    found, names = logits_of(tmp_path / "out")
    assert names == NAMES and (found - logits).abs().max() < 1e-9
    assert run_command(["import", str(theirs), str(tmp_path / "in")]) == 0
    assert_scores(evaluated(capsys, str(tmp_path / "in"), "--data", str(tmp_path / "rows.jsonl"), "--data.train",
                            str(tmp_path / "rows.jsonl")), logits, NAMES)


def test_an_imported_classifier_keeps_the_numbers_of_its_classes(theirs, tmp_path, capsys):
    """In training from its checkpoint, and when that run resumes on rows that lack a class."""
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    assert run_command(["import", str(theirs), str(tmp_path / "in")]) == 0
    for steps, labels, resume in ((1, NAMES, tmp_path / "in"), (2, ("neutral", "bad", "bad"), "auto")):
        written(rows, rows_of(40, labels))
        assert run_command(["train", str(tmp_path / "in/run.toml"), "--resume", str(resume), "--data.train", str(rows),
                            "--data.eval", str(rows), "--train.steps", str(steps), "--train.learning-rate", "1e-30",
                            "--run-dir", str(run), "--batch.global-size", "4", "--batch.microbatch-size", "4"]) == 0
        assert Saved(step_folder(run / "checkpoint", steps)).manifest.about["labels"] == list(NAMES)
    written(rows, rows_of(40))
    capsys.readouterr()
    logits, _ = logits_of(theirs)
    assert_scores(evaluated(capsys, str(run)), logits, NAMES)


def test_some_classes_of_a_classifier_and_others(theirs, tmp_path):
    def classes(labels):
        written(tmp_path / "rows.jsonl", rows_of(40, labels))
        return prepare(classes_run(tmp_path, tmp_path / "run", theirs))

    found = classes(("neutral", "bad", "bad"))
    assert found.class_names == NAMES and set(found.train.targets(np.arange(40))["class"].tolist()) == {0, 2}
    others = classes(("x", "y", "x"))
    assert (others.class_names, others.num_classes) == (("x", "y"), 2)
    assert classes((0, 1, 1)).class_names == ("0", "1")


@pytest.mark.slow
def test_adapters_of_a_classifier_are_those_of_peft(folder, base, tmp_path):
    peft = pytest.importorskip("peft")
    run = classes_run(folder, tmp_path / "run", base, lora=Lora(rank=2, alpha=64.0))
    summary, _ = trained(run)
    adapters, out = tmp_path / "adapters", tmp_path / "exported"
    assert run_command(["export", str(run.run_dir), str(adapters), "--adapters"]) == 0
    assert run_command(["export", str(run.run_dir), str(out)]) == 0
    logits, names = logits_of(out)
    assert_scores(summary, logits, names)
    document = json.loads((adapters / "adapter_config.json").read_text())
    assert document["task_type"] == "SEQ_CLS" and document["modules_to_save"] == ["score"]
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).double(), adapters)
    one = transformers.AutoTokenizer.from_pretrained(base)(rows_of(6)[5]["text"], return_tensors="pt")
    assert (model(**one).logits[0] - logits[5]).abs().max() < 1e-6
    again = classes_run(folder, tmp_path / "again", base, lora=Lora(adapters=adapters),
                        train=Train(steps=1, learning_rate=1e-30, sample_tokens=0))
    assert_scores(trained(again)[0], logits, names)


def test_a_new_tokenizer_of_the_texts(folder, tmp_path):
    run = run_of(folder, tmp_path, model=Transformer(family="llama", vocab=280, sequence=32))
    run = replace(run, data=Data(task="classification", train=str(folder / "rows.jsonl"), cache_dir=tmp_path / "cache"))
    assert problems(run) == []
    assert 257 < prepare(run).tokenizer.vocab <= 280


def test_a_text_without_tokens_is_refused(folder, tmp_path, base):
    inner = tokenizers.Tokenizer.from_file(str(whole_tokenizer_in(tmp_path / "tokenizer") / "tokenizer.json"))
    inner.normalizer = tokenizers.normalizers.Replace("#", "")
    inner.save(str(tmp_path / "tokenizer.json"))
    path = written(tmp_path / "rows.jsonl", [*rows_of(5), {"text": "##", "label": "good"}])
    run = classes_run(tmp_path, tmp_path / "run", base)
    with raises("sentence-without-tokens", where=f"{path} line 6", value="##"):
        prepare(replace(run, data=replace(run.data, tokenizer=str(tmp_path / "tokenizer.json"))))


def test_what_gives_no_text_one_class_is_refused(folder, tmp_path, base):
    config = transformers.LlamaConfig(**SIZES, num_labels=3, problem_type="multi_label_classification")
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "several")
    with raises("problem-type", where="problem_type in config.json", value="multi_label_classification"):
        PretrainedConfig(tmp_path / "several")
    for label in (0.5, ["good", "bad"]):
        path = written(tmp_path / "rows.jsonl", [{"text": "a", "label": "good"}, {"text": "b", "label": label}])
        with raises("label-not-class", where=f"{path} line 2", value=repr(label)):
            table_sentences(open_file(path, str(path)), Columns())
    run = classes_run(folder, tmp_path, base)
    with raises("no-classifier-in-hugging-face", where="data.task", value="classification"):
        resolve_pretrained(replace(run, model=Transformer(family="llama", num_layers=2, hidden=16, heads=2, vocab=300,
                                                          residual_multiplier=0.5)))
