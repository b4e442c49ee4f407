"""Reward models: from pairs to a folder that transformers loads, and training from that folder."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.cli.main import run_command
from ranvier.config.run import Data, Lora, Train, Transformer
from ranvier.data.preference import REWARD
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.testing.tasks import check_task
from tests.data.test_chat import CHATML, tokenizer_in
from tests.data.test_preference import rows_of, written
from tests.errors import raises
from tests.train.test_preference_run import losses_of, run_of, trained

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
SIZES = dict(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             intermediate_size=24, max_position_embeddings=96, initializer_range=0.2)


def whole_tokenizer_in(path, pad="<s>", template=CHATML):
    """A tokenizer that can be exported: it has an end-of-text token and a padding token."""
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_in(path, template) / "tokenizer.json"))
    inner.add_special_tokens(["</s>"])
    inner.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": pad}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward")
    whole_tokenizer_in(path / "tokenizer")
    written(path / "pairs.jsonl", rows_of(40))
    written(path / "margins.jsonl", [row | {"margin": 0.25 * number} for number, row in enumerate(rows_of(40))])
    return path


def reward_run(folder, run_dir, **changed):
    run = run_of(folder, run_dir, **{"model": Transformer(
        num_layers=2, hidden=16, heads=2, vocab=300, sequence=96, tied=True)} | changed)
    return replace(run, data=replace(run.data, task="reward", eval=run.data.train))


def conversations():
    return [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[kind]}]
            for row in rows_of(40) for kind in ("chosen", "rejected")]


def rewards_of(folder):
    """Rewards of all answers by transformers, the same for single answers and a padded batch."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True) for talk in conversations()]
    whole = tokenizer.apply_chat_template(conversations(), return_tensors="pt", return_dict=True, padding=True)
    with torch.no_grad():
        alone, padded = torch.cat([model(**row).logits for row in rows]), model(**whole).logits
    assert (alone - padded).abs().max() < 1e-5 and model.num_labels == 1
    return alone.view(-1, 2).double().numpy()


@pytest.mark.parametrize("pad", ["<s>", "<|end|>"])
def test_samples_have_the_tokens_of_the_chat_template(folder, tmp_path, pad):
    """The score is that of the last token other than padding, as in transformers, also if the padding token ends
    answers."""
    tokenizer = whole_tokenizer_in(tmp_path / "tokenizer", pad, CHATML.replace("'<|end|>\\n'", "'<|end|>'"))
    run = reward_run(folder, tmp_path)
    run = replace(run, data=replace(run.data, tokenizer=str(tokenizer), cache_dir=tmp_path / "cache"))
    data = check_task(REWARD, run, lambda targets: torch.randn(len(targets["last"]), 96, 1, dtype=torch.float64))
    numbers = np.arange(len(data.train))
    inputs, targets = data.train.inputs(numbers, numbers), data.train.targets(numbers)["last"]
    template = transformers.AutoTokenizer.from_pretrained(tokenizer).apply_chat_template
    expected = [template(talk, return_dict=True)["input_ids"] for talk in conversations()]
    end = 260  # <|end|>
    assert all(ids[-1] == end for ids in expected)
    if pad == "<|end|>":
        expected = [ids[:-1] for ids in expected]
    expected = [(first, second) for first, second in zip(expected[0::2], expected[1::2], strict=True)]
    for ids, (chosen, rejected) in zip(inputs["ids"].tolist(), targets.tolist(), strict=True):
        assert (ids[:chosen + 1], ids[chosen + 1:rejected + 1]) in expected
    sample, counted = families.sample_of(run, 2)
    assert counted["last"].tolist() == [[47, 95]] * 2 and sample["segments"].shape == (2, 96)
    assert families.flops_per_sample(run) < families.flops_per_sample(replace(run, data=Data()))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A language model in Hugging Face's format."""
    path = whole_tokenizer_in(tmp_path_factory.mktemp("models") / "base")
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double().save_pretrained(path)
    return path


def assert_scores(summary, rewards):
    margins = rewards[:, 0] - rewards[:, 1]
    assert summary["eval_count"] == 40 and summary["eval_accuracy"] == np.mean(margins > 0)
    assert abs(summary["eval_reward_margin"] - margins.mean()) < 1e-5


def evaluated(capsys, *words):
    capsys.readouterr()
    assert run_command(["evaluate", *words, "--json"]) == 0
    found, = json.loads(capsys.readouterr().out)["results"].values()
    return {"eval_count": found["pairs"]} | {f"eval_{name}": found[name] for name in found}


@pytest.mark.slow
def test_a_reward_model_from_a_language_model_to_transformers_and_back(folder, base, tmp_path, capsys):
    run = resolve_pretrained(reward_run(folder, tmp_path / "run", mesh=Mesh(pipe=2), model=Transformer(
        pretrained=str(base), sequence=96)))
    summary, found = trained(run)
    assert "head.score.weight" in found and "head.projection.weight" not in found
    assert losses_of(run)[-1] < losses_of(run)[0]
    out, imported = tmp_path / "exported", tmp_path / "imported"
    assert run_command(["export", str(run.run_dir), str(out)]) == 0
    rewards = rewards_of(out)
    assert_scores(summary, rewards)
    for words in ([str(run.run_dir)], [str(out), "--data", str(folder / "pairs.jsonl")]):
        assert_scores(evaluated(capsys, *words), rewards)

    again = resolve_pretrained(reward_run(folder, tmp_path / "again", mesh=Mesh(col=2), model=Transformer(
        pretrained=str(out), sequence=96), train=Train(steps=1, learning_rate=1e-30, sample_tokens=0)))
    rows = str(folder / "margins.jsonl")
    summary, _ = trained(replace(again, data=replace(again.data, train=rows, eval=rows)))
    assert_scores(summary, rewards)
    differences = torch.from_numpy(rewards[:, 0] - rewards[:, 1]) - 0.25 * torch.arange(40)
    assert abs(summary["eval_loss"] + float(torch.nn.functional.logsigmoid(differences).mean())) < 1e-5
    assert run_command(["import", str(out), str(imported)]) == 0
    assert 'task = "reward"' in (imported / "run.toml").read_text()
    assert run_command(["generate", str(out)]) == 2, "it is not a language model"


def test_adapters_of_a_reward_model_are_those_of_peft(folder, base, tmp_path, capsys):
    """The exported model, too, is a reward model to each command."""
    peft = pytest.importorskip("peft")
    run = resolve_pretrained(reward_run(folder, tmp_path / "run", lora=Lora(rank=2, alpha=64.0), model=Transformer(
        pretrained=str(base), sequence=96)))
    summary, _ = trained(run)
    adapters, out = tmp_path / "adapters", tmp_path / "exported"
    assert run_command(["export", str(run.run_dir), str(adapters), "--adapters"]) == 0
    assert run_command(["export", str(run.run_dir), str(out)]) == 0
    rewards = rewards_of(out)
    assert_scores(summary, rewards)
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), adapters)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    one = tokenizer.apply_chat_template(conversations()[5], return_tensors="pt", return_dict=True)
    assert abs(model(**one).logits.item() - rewards[2, 1]) < 1e-5
    assert_scores(evaluated(capsys, str(out), "--data", str(folder / "pairs.jsonl")), rewards)
    assert run_command(["import", str(out), str(tmp_path / "imported")]) == 0
    assert 'task = "reward"' in (tmp_path / "imported/run.toml").read_text()
    assert run_command(["generate", str(out)]) == 2, "it is not a language model"


def test_models_without_a_classifier_in_transformers_are_refused(folder, tmp_path):
    run = reward_run(folder, tmp_path, model=Transformer(
        num_layers=2, hidden=16, heads=2, vocab=300, sequence=96, residual_multiplier=0.5))
    with raises("no-classifier-in-hugging-face", where="data.task"):
        resolve_pretrained(run)
