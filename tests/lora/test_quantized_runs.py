"""Runs on a quantized base: moved to other meshes, resumed, exported; also with transformers' weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.config.run import Checkpoint, Lora, Train, Transformer
from ranvier.data import tokenizer as tokenizers
from ranvier.mesh import Mesh
from ranvier.tensor.quantized_weight import BLOCK, QuantizedWeight
from tests.covering import quick
from tests.elastic.runs import IN_TWO, always, losses, run_all, transitions
from tests.elastic.test_elastic_decoders import BY_HAND, MODELS, in_one_process, run_of, text  # noqa: F401
from tests.lora.test_lora_runs import last_eval_loss

LLAMA = replace(MODELS["llama"], hidden=64)
LORA = Lora(rank=2, alpha=8.0, targets=("attention.*", "fc2"), base_format="int8")


@pytest.mark.slow
def test_a_moving_and_resumed_run_is_the_run_of_one_process(text, tmp_path, monkeypatch):  # noqa: F811
    shorter = {"model": LLAMA, "lora": LORA, "train": Train(
        steps=7, learning_rate=3e-3, warmup_steps=2, eval_sequences=4, sample_tokens=0)}
    by_hand = replace(BY_HAND, manual=("3:1",))
    expected = in_one_process(text, tmp_path / "one", elastic=by_hand, **shorter)
    always(monkeypatch)
    run = run_of(text, tmp_path / "run", mesh=Mesh(pipe=2), batch=IN_TWO, checkpoint=Checkpoint(every=5, keep=5),
                 elastic=replace(by_hand, cache_dir=tmp_path / "outputs"), **shorter)
    run_all(run)
    assert losses(run) == pytest.approx(expected, rel=1e-9)
    assert [(line["step"], line["mesh"]["pipe"], line["mesh"]["data"]) for line in transitions(run)] == [(3, 1, 2)]
    again = replace(run, run_dir=tmp_path / "again", mesh=Mesh(pipe=2), resume=str(tmp_path / "run/checkpoint/step-5"),
                    elastic=replace(run.elastic, cache=False))
    run_all(again)
    assert losses(again) == pytest.approx(expected[5:], rel=1e-9)


@pytest.mark.parametrize("weight_format", quick(1, ["nf4", "int8"]))
def test_from_a_folder_and_out_again(text, tmp_path, weight_format):  # noqa: F811
    """A run on transformers' weights computes what these weights compute when quantized; an export has the adapters
    merged into them."""
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=32, initializer_range=0.3))
    model.save_pretrained(tmp_path / "base")
    train = Train(steps=3, learning_rate=1e-30, eval_sequences=4, sample_tokens=0)
    on_base = Transformer(family="llama", pretrained=str(tmp_path / "base"), sequence=12)
    for name in ("base", "quantized"):
        (tmp_path / name).mkdir(exist_ok=True)
        tokenizers.train(["the quick brown fox"], 300).save(tmp_path / name / "tokenizer.json")
    run = resolve_pretrained(run_of(text, tmp_path / "run", mesh=Mesh(pipe=2), precision="fp32", model=on_base,
                                    train=train, lora=replace(LORA, base_format=weight_format)))
    run_all(run)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and name.startswith("model.layers") and weight.shape[1] % BLOCK == 0:
                weight.copy_(QuantizedWeight.from_values(weight, weight_format).values())
    model.save_pretrained(tmp_path / "quantized")
    run_all(resolve_pretrained(run_of(text, tmp_path / "plain", mesh=Mesh(), precision="fp32", train=train,
                                      model=replace(on_base, pretrained=str(tmp_path / "quantized")))))
    assert last_eval_loss(tmp_path / "run") == pytest.approx(last_eval_loss(tmp_path / "plain"), rel=1e-5)

    trained = replace(run, run_dir=tmp_path / "trained", train=replace(run.train, learning_rate=3e-2))
    run_all(trained)
    assert last_eval_loss(tmp_path / "trained") != pytest.approx(last_eval_loss(tmp_path / "run"), rel=1e-3)
    export(tmp_path / "trained", tmp_path / "merged", tell=lambda line: None)
    run_all(resolve_pretrained(run_of(text, tmp_path / "onwards", mesh=Mesh(), precision="fp32", train=train,
                                      model=replace(on_base, pretrained=str(tmp_path / "merged")))))
    assert last_eval_loss(tmp_path / "onwards") == pytest.approx(last_eval_loss(tmp_path / "trained"), rel=1e-5)
