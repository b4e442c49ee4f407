"""Commands with a GGUF file or a model of the hub instead of a folder. The hub is a folder here."""

from __future__ import annotations

import io
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.manifest import Saved, checkpoints
from ranvier.cli import check
from ranvier.cli.main import run_command
from ranvier.config.run import Batch, Checkpoint, Data, Run, Train, Transformer
from ranvier.data.cache import CacheOnly, NotInCache
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train

huggingface_hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tests.checkpoint.test_hf_llama import TEXT, published  # noqa: E402
from tests.data.gguf_files import write_gguf  # noqa: E402
from tests.data.test_gguf import model_of  # noqa: E402
from tests.errors import raises  # noqa: E402

HUB = "someone/small-llama"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user/ranvier"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", model_of())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model, in a folder. Returns the requests: (name, revision, files that were given)."""
    requests = []
    there, snapshots = tmp_path / "there", tmp_path / "hub/snapshots"
    published("llama3", there)
    (there / "original.pth").write_bytes(b"another program's")

    def snapshot_download(repo_id, *, revision=None, allow_patterns, local_files_only):
        if repo_id != HUB:
            raise ConnectionError("the hub cannot be reached\nand more")
        folder = snapshots / (revision or "main")
        folder.mkdir(parents=True, exist_ok=True)
        given = sorted(path.name for path in there.iterdir() if any(path.match(each) for each in allow_patterns))
        for name in given:  # atomically, as the hub's client does: both ranks ask
            shutil.copyfile(there / name, part := folder / f"{name}.{threading.get_ident()}")
            part.replace(folder / name)
        requests.append((repo_id, revision, given))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return requests


def generated(capsys, *words):
    assert run_command(["generate", *words, "--temperature", "0", "--max-tokens", "6", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["answer"]


def run_on(tmp_path, name):
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(TEXT * 2)
    return Run(mesh=Mesh(pipe=2), batch=Batch(global_size=4, microbatch_size=2), run_dir=tmp_path / "run",
               train=Train(steps=2, eval_sequences=2, sample_tokens=2, learning_rate=1e-12),
               checkpoint=Checkpoint(every=2), model=Transformer(pretrained=name, sequence=16),
               data=Data(corpus=str(tmp_path / "texts"), cache_dir=tmp_path / "cache"))


def trained(run):
    stream = io.StringIO()
    run_ranks(lambda world: train(run, "test", world, stream=stream), run.mesh.size, timeout_seconds=200)
    return Saved(checkpoints(run.run_dir / "checkpoint")[0])


def test_a_run_starts_from_a_gguf_file(tmp_path, file):
    """Weights, sizes and tokenizer are the file's, on each rank of a pipeline."""
    saved = trained(resolve_pretrained(run_on(tmp_path, str(file))))
    expected = model_of().state_dict()
    for ours, theirs in (("layer1.attention.qkv.query.weight", "model.layers.1.self_attn.q_proj.weight"),
                         ("embedding.token.weight", "model.embed_tokens.weight"),
                         ("head.projection.weight", "lm_head.weight")):
        torch.testing.assert_close(saved.read("parameter", ours), expected[theirs], rtol=0, atol=1e-9)
    tokens = json.loads((tmp_path / "run/tokenizer.json").read_text())
    assert "<|end_of_text|>" in {token["content"] for token in tokens["added_tokens"]}


def test_import_generate_and_evaluate_take_a_gguf_file(tmp_path, file, capsys, cache):
    assert run_command(["import", str(file), str(tmp_path / "start")]) == 0
    said = capsys.readouterr().out
    assert f"converting {file}" in said and "against transformers" in said and "and its tokenizer" in said
    assert (tmp_path / "start/chat_template.jinja").is_file()
    text = generated(capsys, str(file), "--prompt", "The arrow")
    assert text == generated(capsys, str(tmp_path / "start"), "--prompt", "The arrow") and text
    tokenizer = transformers.AutoTokenizer.from_pretrained(next((cache / "pretrained").glob("model-*")))
    ids = tokenizer("The arrow", return_tensors="pt")
    written = model_of().generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=281)
    assert text == tokenizer.decode(written[0, ids["input_ids"].shape[1]:])
    (tmp_path / "text.txt").write_text(TEXT * 40)
    assert run_command(["evaluate", str(file), "--data", str(tmp_path / "text.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["text"]["loss"] > 1


def test_a_run_starts_from_a_model_of_the_hub(tmp_path, hub):
    run = resolve_pretrained(run_on(tmp_path, f"{HUB}@v1"))
    assert hub == [(HUB, "v1", ["config.json"])], "sizes need no weights"
    assert (run.model.family, run.model.rope_scaling, run.model.tied) == ("llama", "llama3", True)
    saved = trained(run)
    given = {name for *_, files in hub for name in files}
    assert "original.pth" not in given and "tokenizer.json" in given
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "there")
    expected = model.state_dict()["model.embed_tokens.weight"].float()
    torch.testing.assert_close(saved.read("parameter", "embedding.token.weight"), expected, rtol=0, atol=1e-9)


def test_commands_take_a_model_of_the_hub(tmp_path, hub, capsys):
    assert run_command(["import", HUB, str(tmp_path / "start")]) == 0
    assert "against transformers" in capsys.readouterr().out
    text = generated(capsys, HUB, "--prompt", "The arrow")
    assert text == generated(capsys, str(tmp_path / "there"), "--prompt", "The arrow")
    (problem,) = check.check(replace(run_on(tmp_path, HUB), mesh=Mesh(), model=Transformer(
        pretrained=HUB, sequence=64))).problems
    assert problem.where == "model.sequence"


def test_a_model_without_safetensors(tmp_path, hub):
    there = tmp_path / "there"
    torch.save(transformers.LlamaForCausalLM.from_pretrained(there).state_dict(), there / "pytorch_model.bin")
    for path in there.glob("*.safetensors*"):
        path.unlink()
    folder = folder_of(HUB, tmp_path, lambda line: None)
    assert (folder / "pytorch_model.bin").is_file() and len(hub) == 2


def test_files_that_refuse_or_change_a_model_are_fetched(tmp_path, hub):
    for name in (files := ("preprocessor_config.json", "adapter_config.json")):
        (tmp_path / f"there/{name}").write_text("{}")
    assert {*files} <= {path.name for path in folder_of(HUB, tmp_path, lambda line: None).iterdir()}


def test_what_the_hub_does_not_give_is_named(tmp_path, hub, capsys):
    with raises("hub-model-unreadable", "someone/else", "ConnectionError"):
        resolve_pretrained(run_on(tmp_path, "someone/else"))
    assert run_command(["generate", "someone/else", "--prompt", "x"]) == 2
    assert "someone/else" in capsys.readouterr().err
    (tmp_path / "there/config.json").unlink()
    with raises("hub-model-without-config", f"{HUB}@empty"):
        resolve_pretrained(replace(run_on(tmp_path / "there", HUB), model=Transformer(pretrained=f"{HUB}@empty")))
    with pytest.raises(NotInCache):
        folder_of(HUB, tmp_path, CacheOnly())


def test_a_folder_comes_before_a_model_of_the_hub_with_its_name(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "there", tmp_path / HUB)
    assert folder_of(HUB, tmp_path, lambda line: None) == Path(HUB) and hub == []
