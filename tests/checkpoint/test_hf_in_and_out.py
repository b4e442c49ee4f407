"""Export and import: a round trip is bit-identical, and transformers computes the same."""

import json
import re
import shutil
import tomllib
import weakref

import pytest
import torch
from hf_folders import SMALL, edit_manifest, parameters, write_checkpoint, write_model
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from ranvier.checkpoint.hf import export_model as hf_export
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf import gpt2 as hf_gpt2
from ranvier.checkpoint.hf import logits
from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.manifest import Saved, checksum, step_folder
from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.run import Transformer
from ranvier.data import tokenizer as tokenizers
from ranvier.system.tensor_file import Slot, shards, write_tensors
from tests.covering import covering
from tests.errors import raises


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype is tensor.dtype and torch.equal(ours[name], tensor), name


def silent(line):
    pass


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "config"), covering(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64],
    [SMALL, Transformer(family="gpt", num_layers=1, hidden=8, heads=1, vocab=11, sequence=5, dropout=0.2)]))
def test_there_and_back_to_the_bit(tmp_path, capsys, dtype, config):
    tensors = parameters(config, dtype)
    model = write_model(tmp_path / "model", tensors, config)
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]
    assert run_command(["import", str(model), str(tmp_path / "run")]) == 0
    assert f"parameters in {name}" in capsys.readouterr().out
    assert tomllib.loads((tmp_path / "run" / "run.toml").read_text())["precision"] == name
    assert run_command(["export", str(tmp_path / "run"), str(tmp_path / "there"), "--dtype", name]) == 0
    out, err = capsys.readouterr()
    assert "rounding" not in out and err == ""
    equal(tensors_of(tmp_path / "there"), tensors)
    assert files_of(tmp_path / "there") == ["config.json", "model.safetensors"]
    assert files_of(tmp_path) == ["model", "run", "there"]


def test_a_checkpoint_of_an_import(tmp_path):
    tensors = parameters()
    run = write_checkpoint(tmp_path / "run", tensors, precision="bf16")
    saved = Saved(step_folder(run / "checkpoint", 0))
    manifest = saved.manifest
    assert list(saved.damage()) == []
    assert (manifest.step, manifest.optimizer_steps, manifest.frozen) == (0, 0, ())
    assert set(manifest.tensors) == {"parameter", "master"}
    ours = {name: hf.tensor_here(place, [tensors[one] for one in place.names])
            for name, place in hf_gpt2.places(SMALL).items()}
    equal({name: saved.read("master", name) for name in manifest.tensors["master"]}, ours)
    equal({name: saved.read("parameter", name) for name in manifest.tensors["parameter"]},
          {name: tensor.bfloat16() for name, tensor in ours.items()})
    recipe = tomllib.loads((run / "run.toml").read_text())
    assert manifest.about["run"] == recipe
    found = read.merge([read.load(str(run / "run.toml"))[1]])
    assert found.problems == ()
    assert (found.run.model, found.run.precision) == (SMALL, "bf16")
    assert not (run / "tokenizer.json").exists()


def test_parts_of_a_checkpoint(tmp_path):
    tensors = parameters()
    import_model(write_model(tmp_path / "model", tensors), tmp_path / "run", part_bytes=20_000, tell=silent)
    saved = Saved(step_folder(tmp_path / "run/checkpoint", 0))
    assert len(saved.manifest.files) > 3 and list(saved.damage()) == []
    export(tmp_path / "run", tmp_path / "there", tell=silent)
    equal(tensors_of(tmp_path / "there"), tensors)


def test_masters_are_exported_where_there_are_some(tmp_path, capsys):
    tensors = parameters()
    run = write_checkpoint(tmp_path / "run", tensors, precision="fp16")
    export(run, tmp_path / "exact")
    assert "in fp32, from master copies" in capsys.readouterr().out
    equal(tensors_of(tmp_path / "exact"), tensors)
    export(run, tmp_path / "rounded", dtype="fp16")
    moved = re.search(r"rounding to fp16 has changed logits by at most (\S+)", capsys.readouterr().out)[1]
    assert 1e-5 < float(moved) < 0.1
    equal(tensors_of(tmp_path / "rounded"), {name: tensor.half() for name, tensor in tensors.items()})


def test_what_was_frozen_has_no_master(tmp_path):
    run = write_checkpoint(tmp_path / "run", tensors := parameters(), precision="bf16")
    edit_manifest(run / "checkpoint/step-0", lambda document: document["tensors"]["master"].pop("head.norm.bias"))
    export(run, tmp_path / "there", tell=silent)
    frozen = "transformer.ln_f.bias"
    equal(tensors_of(tmp_path / "there"), tensors | {frozen: tensors[frozen].bfloat16().float()})


def test_shards(tmp_path):
    run = write_checkpoint(tmp_path / "run", tensors := parameters())
    assert run_command(["export", str(run), str(tmp_path / "there"), "--shard-bytes", "20000"]) == 0
    names = [name for name in files_of(tmp_path / "there") if name.endswith(".safetensors")]
    assert names == [f"model-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
    index = json.loads((tmp_path / "there/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name in names:
        part = load_file(tmp_path / "there" / name)
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == part.keys()
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 20000
    equal(tensors_of(tmp_path / "there"), tensors)
    import_model(tmp_path / "there", tmp_path / "again", tell=silent)
    written = tomllib.loads((tmp_path / "again/run.toml").read_text())
    assert written["model"] == tomllib.loads((run / "run.toml").read_text())["model"]
    one, other = (Saved(step_folder(folder / "checkpoint", 0)) for folder in (run, tmp_path / "again"))
    equal({name: one.read("parameter", name) for name in one.manifest.tensors["parameter"]},
          {name: other.read("parameter", name) for name in other.manifest.tensors["parameter"]})


def test_pieces_of_a_mesh_are_put_together(tmp_path):
    """A checkpoint whose tensors consist of several boxes, as ranks of a mesh write them."""
    run = write_checkpoint(tmp_path / "run", tensors := parameters())
    step = step_folder(run / "checkpoint", 0)
    whole = load_file(step / "part-00000.safetensors")
    cut = {}

    def in_two(document):
        for name, tensor in document["tensors"]["parameter"].items():
            stored = whole[tensor["pieces"][0][1]]
            half = stored.shape[-1] // 2
            boxes = [[*([0, size] for size in stored.shape[:-1]), part] for part in (
                [0, half], [half, stored.shape[-1]])]
            cut.update({f"{name}/0": stored[..., :half].contiguous(), f"{name}/1": stored[..., half:].contiguous()})
            tensor["pieces"] = [[0, f"{name}/{number}", box] for number, box in enumerate(boxes)]
        save_file(cut, step / "part-00000.safetensors")
        document["files"][0] |= {"size_bytes": (step / "part-00000.safetensors").stat().st_size,
                                 "crc32": checksum(step / "part-00000.safetensors")}

    edit_manifest(step, in_two)
    export(step, tmp_path / "there", tell=silent)
    equal(tensors_of(tmp_path / "there"), tensors)


# --- against transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """transformers' GPT-2 with random weights, as save_pretrained writes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=3, vocab_size=300, n_positions=16, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("peer")
    model.save_pretrained(folder / "model")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    torch.save(model.state_dict(), folder / "zip.bin")
    torch.save(model.state_dict(), folder / "legacy.bin", _use_new_zipfile_serialization=False)
    return transformers, model, folder


@pytest.mark.parametrize("form", ["model", "shards", "zip", "legacy"])
def test_import_computes_what_transformers_computes(tmp_path, capsys, peer, form):
    _, model, folder = peer
    source = folder / form
    if form in ("zip", "legacy"):
        source = tmp_path / "model"
        source.mkdir()
        shutil.copy(folder / "model/config.json", source)
        shutil.copy(folder / f"{form}.bin", source / "pytorch_model.bin")
    assert run_command(["import", str(source), str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"logits of 16 tokens against transformers \S+: largest difference \d\S*, their scale", out)
    assert "attn_pdrop 0.1 is left out" in out
    saved = Saved(step_folder(tmp_path / "run/checkpoint", 0))
    config = Pretrained(source).config
    assert (config.num_layers, config.hidden, config.heads, config.dropout) == (2, 24, 3, 0.1)
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(4))
    ours = logits.logits(config, lambda name: saved.read("parameter", name), ids)
    assert (ours - model(ids).logits).abs().max() < 1e-5 * ours.abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_transformers_loads_an_export(tmp_path, peer, dtype):
    transformers, model, folder = peer
    import_model(folder / "model", tmp_path / "run", tell=silent)
    export(tmp_path / "run", tmp_path / "there", dtype=dtype, shard_bytes=40_000, tell=silent)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert isinstance(theirs, transformers.GPT2LMHeadModel)
    assert theirs.dtype is hf_export.DTYPES[dtype]
    config = json.loads((tmp_path / "there/config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == str(theirs.dtype).removeprefix("torch.")
    for name, value in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value.to(theirs.dtype)), name
    ids = torch.arange(16)[None]
    expected = model(ids).logits
    error = (theirs.eval()(ids).logits.float() - expected).abs().max() / expected.abs().max()
    assert error < {"fp32": 1e-6, "bf16": 5e-2, "fp16": 5e-3}[dtype]


def test_the_runs_tokenizer_goes_along(tmp_path, capsys, peer):
    transformers, _, folder = peer
    tokenizer = tokenizers.train(["some text to learn from, and some more text"] * 5, 290)
    run = tmp_path / "run"
    import_model(folder / "model", run, tell=silent)
    tokenizer.save(run / "tokenizer.json")
    for number, named in enumerate([run, run / "checkpoint", run / "checkpoint/step-0"]):
        export(named, tmp_path / f"there{number}")
        assert f"tokenizer: {run / 'tokenizer.json'}" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there0")
    text = "some more\ntext, ünd more"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end and theirs.model_max_length == 16
    config = json.loads((tmp_path / "there0/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.end, tokenizer.end)

    (tmp_path / "there0/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "there0/additional_chat_templates").mkdir()
    (tmp_path / "there0/additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "there0/generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.6}')
    import_model(tmp_path / "there0", tmp_path / "again")
    assert "and its tokenizer" in capsys.readouterr().out
    assert tokenizers.load(tmp_path / "again/tokenizer.json").fingerprint == tokenizer.fingerprint
    export(tmp_path / "again", tmp_path / "back", tell=silent)
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "generation_config.json",
                 "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "there0" / name).read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == 7
    shutil.move(run / "tokenizer.json", tmp_path / "elsewhere.json")
    export(run, tmp_path / "without")
    assert "without a tokenizer" in capsys.readouterr().out
    args = ["export", str(run), str(tmp_path / "with"), "--tokenizer", str(tmp_path / "elsewhere.json")]
    assert run_command(args) == 0
    assert "tokenizer.json" in files_of(tmp_path / "with")


def test_old_names_and_masks(tmp_path):
    """The first GPT-2 on the hub has no prefix, and its causal masks among the parameters."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in parameters().items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    import_model(write_model(tmp_path / "model", tensors), tmp_path / "run", tell=silent)
    export(tmp_path / "run", tmp_path / "there", tell=silent)
    equal(tensors_of(tmp_path / "there"), parameters())


def test_several_formats_become_fp32(tmp_path):
    tensors = parameters()
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].half()
    recipe = import_model(write_model(tmp_path / "model", tensors), tmp_path / "run", tell=silent)
    assert recipe["precision"] == "fp32"


def test_the_hubs_cache_is_made_of_links(tmp_path):
    snapshot = tmp_path / "models--gpt2/snapshots/abc"
    write_model(snapshot)
    blobs = tmp_path / "models--gpt2/blobs"
    blobs.mkdir()
    for name in files_of(snapshot):
        shutil.move(snapshot / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    import_model(snapshot, tmp_path / "run", tell=silent)
    assert (tmp_path / "run/run.toml").exists()


# --- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["library", "memory"])
def test_without_transformers_our_own_reading_is_the_peer(tmp_path, capsys, monkeypatch, missing):
    if missing == "library":
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        why = "transformers is not installed"
    else:
        monkeypatch.setattr(logits, "available_memory_bytes", lambda: 1 << 20)
        why = r"transformers' model needs 0\.5 GiB of memory, and 0\.0 are free"
    import_model(write_model(tmp_path / "model"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "there")
    out = capsys.readouterr().out
    assert len(re.findall(rf"{why}: compared with Ranvier's own reading", out)) == 2
    assert out.count("largest difference 0, ") == 2


@pytest.mark.parametrize(("way", "fault"), covering(["export", "import"], ["transpose", "heads", "swap"]))
def test_a_wrong_layout_is_noticed_and_leaves_nothing(tmp_path, monkeypatch, fault, way):
    pytest.importorskip("transformers")
    run = write_checkpoint(tmp_path / "run")
    model = tmp_path / "run-model"
    before = sorted(tmp_path.rglob("*"))
    right = getattr(hf, "tensors_there" if way == "export" else "tensor_here")

    def wrong(place, given):
        tensor, name = given if way == "export" else given[0], place.names[0]
        if fault == "transpose" and name.endswith("h.1.attn.c_proj.weight"):
            tensor = tensor.t()
        if fault == "heads" and "c_attn" in name:
            tensor = tensor.t().contiguous() if tensor.dim() == 2 else tensor
            return [tensor] if way == "export" else tensor
        if fault == "swap" and name.endswith("h.0.ln_2.weight"):
            tensor = tensor.flip(0)
        return right(place, tensor if way == "export" else [tensor])

    monkeypatch.setattr(hf, right.__name__, wrong)
    with raises("export-computes-otherwise", 16):
        if way == "export":
            export(run, tmp_path / "there", tell=silent)
        else:
            import_model(model, tmp_path / "again", tell=silent)
    assert sorted(tmp_path.rglob("*")) == before


def test_logits_that_are_no_numbers_are_not_equal():
    compared = logits.Comparison(largest=float("nan"), scale=1.0, what="1 tokens", peer="")
    assert not compared.is_equal
    assert logits.Comparison(largest=0.0, scale=0.0, what="1 tokens", peer="").is_equal


# --- streaming -------------------------------------------------------------------------------------------------------


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    run = write_checkpoint(tmp_path / "run")
    right, seen, alive = hf.tensors_there, [], []

    def watched(place, tensor):
        found = [right(place, tensor)[0].clone()]
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(hf, "tensors_there", watched)
    export(run, tmp_path / "there", tell=silent)
    assert len(seen) == len(hf_gpt2.places(SMALL))
    assert max(alive) <= 1


def test_files_that_safetensors_reads(tmp_path):
    tensors = {"a": torch.randn(3, 5), "bß": torch.randn(7).bfloat16(), "c": torch.randn(2, 3, 4).half(),
               "d": torch.randn(4, 3).double().t(), "e": torch.randn(9)[::2]}
    slots = [Slot(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    path = tmp_path / "part-00000.safetensors"
    written = write_tensors(path, slots, iter(tensors.values()))
    equal(load_file(path), tensors)
    assert written == (path.stat().st_size, checksum(path))
    with pytest.raises(ValueError, match=r"got a tensor of torch\.float16 and \(2, 3, 4\)"):
        write_tensors(tmp_path / "x", slots[:1], [tensors["c"]])
    for number in (1, 3):
        with pytest.raises(ValueError, match=r"more tensors than slots, 2|got no tensor"):
            write_tensors(tmp_path / "x", slots[:2], list(tensors.values())[:number])


def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """Of what is made for the file: the tensor, or its copy if the elements are not in order."""
    slots = [Slot(name=name, dtype=torch.float32, shape=(3, 2)) for name in "abc"]
    alive, contiguous = [], torch.Tensor.contiguous

    def copied(tensor):
        assert all(one.expired() for one in alive)
        result = contiguous(tensor)
        alive.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(torch.Tensor, "contiguous", copied)
    write_tensors(tmp_path / "x", slots, (torch.ones(2, 3).t() for _ in slots))
    assert len(alive) == 3


def test_cut_into_shards():
    slots = [Slot(name=str(size), dtype=torch.float32, shape=(size,)) for size in (2, 1, 5, 1, 1, 1)]
    assert [[slot.shape[0] for slot in part] for part in shards(slots, 12)] == [[2, 1], [5], [1, 1, 1]]
    assert [len(part) for part in shards(slots, 1)] == [1] * 6
    assert [len(part) for part in shards(slots, 44)] == [6]
