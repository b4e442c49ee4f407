"""From a chat model of transformers to a fine-tuned one: adapters train on four ranks, resume on another mesh, and the
exported model gives the same answers in transformers as in Ranvier."""

import io
import json
from dataclasses import replace

import pytest
import torch

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.manifest import Saved, checkpoints
from ranvier.cli.main import run_command
from ranvier.config.run import Batch, Checkpoint, Data, Lora, Run, Train, Transformer
from ranvier.mesh import Mesh
from ranvier.models.lora import is_adapter
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from tests.data.test_chat import conversations, tokenizer_in

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tokenizer_in(tmp_path_factory.mktemp("chat") / "base")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(path), eos_token="<|end|>")
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=96, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id)).double().save_pretrained(path)
    tokenizer.save_pretrained(path)
    conversations(path / "talks.jsonl", [[{"role": "user", "content": f"{number}?"},
                                          {"role": "assistant", "content": "yes" * (1 + number % 3)}]
                                         for number in range(24)])
    return path


def trained(run):
    stream = io.StringIO()
    run_ranks(lambda world: train(run, "chat", world, stream=stream), run.mesh.size, timeout_seconds=200)
    saved = Saved(checkpoints(run.run_dir / "checkpoint")[0])
    return {name: saved.read("parameter", name) for name in saved.manifest.tensors["parameter"] if is_adapter(name)}


def test_chat_fine_tuning_from_import_to_text(base, tmp_path, capsys):
    run = resolve_pretrained(Run(
        mesh=Mesh(data=2, pipe=2), batch=Batch(global_size=8, microbatch_size=2), precision="fp64",
        run_dir=tmp_path / "run", train=Train(steps=2, learning_rate=2e-2, eval_sequences=2, sample_tokens=0),
        checkpoint=Checkpoint(every=2), model=Transformer(pretrained=str(base), sequence=32),
        data=Data(task="chat", train=str(base / "talks.jsonl"), cache_dir=tmp_path / "cache"),
        lora=Lora(rank=4, alpha=8.0, targets=("query", "value"))))
    trained(run)
    elsewhere = trained(replace(run, mesh=Mesh(pipe=1, col=2), resume="auto", train=replace(run.train, steps=4)))
    still = trained(replace(run, mesh=Mesh(), run_dir=tmp_path / "still", train=replace(run.train, steps=4)))
    assert elsewhere.keys() == still.keys() and len(still) == 8
    for name, adapter in still.items():
        torch.testing.assert_close(elsewhere[name], adapter, rtol=0, atol=1e-9)

    assert run_command(["export", str(run.run_dir), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "out"))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "4?"}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)

    def answer(folder):
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
        written = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return tokenizer.decode(written[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)

    expected = answer(tmp_path / "out")
    assert expected != answer(base), "training changed nothing"
    for source in (run.run_dir, tmp_path / "out"):
        assert run_command(["generate", str(source), "--chat", "--prompt", "4?", "--temperature", "0", "--max-tokens",
                            "8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["answer"] == expected
