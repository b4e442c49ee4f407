"""A larger vocabulary than the pretrained model's: the added rows are as transformers makes them, on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.from_pretrained import load_pretrained, resolve_pretrained, with_model, with_rows, with_sizes
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Batch, Data, Lora, Optim, Run, Train, Transformer
from ranvier.data.tokenizer import load
from ranvier.data.tokenizer import train as train_tokenizer
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.test_hf_and_training import trained
from tests.covering import quick
from tests.hf_peers import peer, saved
from tests.models.test_llama import SIZES

transformers = pytest.importorskip("transformers")
TEXT = "The arrow flies over 12 green fields. " * 300
KINDS = {"GPT2LMHeadModel": dict(n_embd=24, n_layer=2, n_head=4, vocab_size=260, n_positions=16),
         "LlamaForCausalLM": SIZES | dict(vocab_size=260, num_attention_heads=4)}
NEW = 272


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """A model and its tokenizer; another tokenizer with further tokens is next to the folder."""
    found = saved(peer(request.param, torch.float32, **KINDS[request.param]), tmp_path / "model")
    own = train_tokenizer([TEXT], 260)
    own.save(found / "tokenizer.json")
    further = load(found / "tokenizer.json")
    further._inner.add_special_tokens([f"<|extra{number}|>" for number in range(NEW - 262)])
    further.save(tmp_path / "further.json")
    (tmp_path / "text.txt").write_text(TEXT)
    return found


def run_on(folder, **model):
    place = folder.parent
    return Run(model=Transformer(pretrained=str(folder), sequence=16, **model), batch=Batch(
        global_size=4, microbatch_size=2), train=Train(steps=1, sample_tokens=0, eval_sequences=2), data=Data(
        corpus=str(place / "text.txt"), cache_dir=place / "cache", tokenizer=str(place / "further.json")),
        optim=Optim(weight_decay=0.0))


def theirs(folder):
    """The model of transformers after its vocabulary has been resized."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(NEW)
    return model


@pytest.mark.parametrize("mesh", quick(1, [Mesh(row=2, col=2), Mesh(), Mesh(pipe=2, row=2, col=2)]), ids=str)
def test_rows_are_those_of_transformers_on_every_mesh(folder, mesh):
    source = Pretrained(folder)
    run = with_sizes(run_on(folder, vocab=NEW), source)
    assert run.model.vocab == NEW
    expected = theirs(folder)
    tables = {"embedding.token.weight": expected.get_input_embeddings().weight.detach(),
              "head.projection.weight": expected.get_output_embeddings().weight.detach()}

    def on_rank(world):
        engine = Engine(families.model_of(run), world, mesh=mesh)
        notes = load_pretrained(engine, source)
        layout, at = engine.layout, engine.coordinates
        boxes = {layout.key(end): layout.box(end, at.position) for end in layout.parameters
                 if end.block in layout.blocks(at.pipe)}
        values = {name: (value.detach().clone(), boxes[name]) for name, value in engine.named_parameters().items()}
        engine.close()
        return values, notes

    seen = set()
    for values, notes in run_ranks(on_rank, mesh.size, timeout_seconds=120.0):
        assert any("12 rows of embedding.token.weight are new" in note for note in notes)
        for name, table in tables.items():
            if name in values:
                value, box = values[name]
                there = table[tuple(slice(*edges) for edges in box)]
                is_old = torch.arange(NEW)[slice(*box[0])] < 260
                assert torch.equal(value[is_old], there[is_old])
                assert (value - there).abs().max() < 1e-3 * table.std()
                seen.add(name)
    assert "embedding.token.weight" in seen


def test_further_rows_have_the_mean_and_a_part_of_the_covariance():
    value = torch.randn(500, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) @ torch.randn(
        4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    new = with_rows(value, 40_500, "a")[500:]
    assert torch.equal(new, with_rows(value, 40_500, "a")[500:])
    assert not torch.equal(new, with_rows(value, 40_500, "b")[500:])
    covariance = value.T.cov(correction=0)
    assert (new.T.cov() / 1e-9 - covariance).abs().max() < 0.05 * covariance.abs().max()
    assert (new.mean(0) - value.mean(0)).abs().max() < 1e-6
    assert torch.equal(with_rows(value.bfloat16(), 501, "a")[:500], value.bfloat16())


def test_a_run_with_further_tokens_trains_and_is_exported(folder):
    source = Pretrained(folder)
    run = replace(resolve_pretrained(run_on(folder, vocab=NEW)), mesh=Mesh(pipe=2), run_dir=folder.parent / "run")
    trained(run)
    told = []
    export(folder.parent / "run", folder.parent / "out", tell=told.append)
    assert any(line.startswith("logits") for line in told)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "out")
    assert again.config.vocab_size == NEW == len(again.get_input_embeddings().weight)
    tied = source.config.family == "gpt"
    assert (again.get_output_embeddings().weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()) is tied
    assert load(folder.parent / "out/tokenizer.json").vocab == load(folder.parent / "further.json").vocab


def test_what_a_larger_vocabulary_cannot_be(folder):
    source = Pretrained(folder)
    with pytest.raises(ConfigError) as found:
        with_model(run_on(folder, vocab=100), source)
    assert (found.value.where, found.value.value) == ("model.vocab", 100)
    with pytest.raises(ConfigError) as found:
        with_model(replace(run_on(folder, vocab=NEW), lora=Lora(rank=2)), source)
    assert (found.value.where, found.value.value) == ("model.vocab", NEW) and "adapters" in found.value.what
    assert with_model(run_on(folder), source).model.vocab == 260
