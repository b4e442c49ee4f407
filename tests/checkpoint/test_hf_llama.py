"""The family llama in Hugging Face's format: weights, tokenizer and generation configuration, in and out again."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from ranvier.checkpoint.hf import llama as hf_llama
from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.forms import form_of, form_of_type
from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config import read
from ranvier.config.run import Batch, Data, Run, Train, Transformer
from ranvier.data.tokenizer import load
from ranvier.errors import CheckpointError
from ranvier.mesh import Mesh
from tests.checkpoint.test_hf_and_training import trained
from tests.errors import raises
from tests.hf_peers import peer, relative
from tests.models.test_llama import MODELS, SIZES

FEW = ("llama3", "phi3", "qwen3-first", "gemma3", "granite")
TEXT = "The arrow flies\nover 12 green fields. " * 20


def tensors_of(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def published_tokenizer(vocab=280):
    """A byte-level BPE like Qwen's and Llama 3's: another split into words, and special tokens outside the
    vocabulary."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    inner.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", inner.token_to_id("<|begin_of_text|>"))])
    return inner


def published(name, folder, **settings):
    """A model of transformers as its owner publishes it: shards, tokenizer and generation configuration."""
    kind, more = MODELS[name]
    model = peer(kind, **SIZES | dict(vocab_size=290) | more | settings)
    model.save_pretrained(folder, max_shard_size="20KB")
    inner = published_tokenizer()
    inner.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": inner.token_to_id("<|begin_of_text|>"), "eos_token_id": [inner.token_to_id(
        "<|end_of_text|>"), 7]}
    (folder / "generation_config.json").write_text(json.dumps({**ends, "temperature": 0.6}))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>", "chat_template": "{{ 1 }}"}))
    return model


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
                                  for name in MODELS])
def test_there_and_back_to_the_bit(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    there, told = tmp_path / "there", []
    model = published(name, there)
    assert len(list(there.glob("*.safetensors"))) > 1
    import_model(there, tmp_path / "run", tell=told.append)
    assert_equal_logits(told)
    export(tmp_path / "run", tmp_path / "back", shard_bytes=20_000, tell=told.append)
    before, after = tensors_of(there), tensors_of(tmp_path / "back")
    is_fused = name.startswith("phi")  # is exported as Mistral or Llama, which compute the same
    if not is_fused:
        assert before.keys() == after.keys()
        assert all(torch.equal(after[each], tensor) for each, tensor in before.items())
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (there / file).read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert (type(again) is type(model)) != is_fused and again.config.eos_token_id == [281, 7]
    ids = torch.arange(16)[None]
    assert relative(again.double()(ids).logits, model(ids).logits) < 1e-6  # angles are in fp32 there
    assert again.config.max_position_embeddings == model.config.max_position_embeddings


def assert_equal_logits(told):
    """An import or an export reports a comparison with transformers with a small difference."""
    line, = (one for one in told if one.startswith("logits"))
    difference, scale = re.fullmatch(
        r"logits of \d+ tokens against transformers \S+: largest difference (\S+), their scale being (\S+)", line
    ).groups()
    assert float(difference) <= 1e-5 * max(1.0, float(scale))


def test_an_export_in_half_precision_is_compared_in_fp32(tmp_path):
    """Gemma's factor of embeddings would also be rounded if transformers read the model in half precision."""
    published("gemma3", tmp_path / "there")
    import_model(tmp_path / "there", tmp_path / "run", tell=lambda line: None)
    export(tmp_path / "run", tmp_path / "back", dtype="bf16", tell=(told := []).append)
    assert_equal_logits(told)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_type_with_a_window_in_no_layer_is_exported(tmp_path, name):
    """transformers makes a mask for the model's window, whatever layer_types says."""
    model = published(name, tmp_path / "there", layer_types=["full_attention"] * SIZES["num_hidden_layers"])
    import_model(tmp_path / "there", tmp_path / "run", tell=lambda line: None)
    export(tmp_path / "run", tmp_path / "back", tell=lambda line: None)
    again = type(model).from_pretrained(tmp_path / "back").eval()
    ids = torch.arange(16)[None]
    assert relative(again.double()(ids).logits, model(ids).logits) < 1e-6


def test_another_family_is_refused_with_the_way_that_there_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with raises("unknown-model-type", "mamba", "ranvier.from_transformers"):
        Pretrained(tmp_path)


def test_rotary_embeddings_under_the_keys_of_transformers_4():
    """Gemma 3's base of layers with a window has its own key; OLMo 3 scales only the other layers."""
    document = dict(vocab_size=61, hidden_size=24, num_hidden_layers=8, num_attention_heads=4, intermediate_size=40,
                    max_position_embeddings=32)
    gemma, _ = form_of_type("gemma3_text").read({**document, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (gemma.rope_base, gemma.window_rope_base, gemma.rope_factor) == (1e6, 1e4, 8.0)
    assert (gemma.window, gemma.full_every, gemma.qk_norm) == (4096, 6, "head")
    olmo, _ = form_of_type("olmo3").read({**document, "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}})
    assert (olmo.rope_base, olmo.window_rope_base, olmo.rope_scaling, olmo.full_every) == (5e5, 5e5, "yarn", 4)
    plain, _ = form_of_type("olmo3").read(document)
    assert plain.window_rope_base is None
    with raises("rope-of-window", "sliding_attention"):
        form_of_type("gemma3_text").read({**document, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}})


def test_ends_of_texts_without_a_generation_configuration(tmp_path):
    published("llama2", tmp_path / "there", bos_token_id=3, eos_token_id=4)
    (tmp_path / "there/generation_config.json").unlink()
    import_model(tmp_path / "there", tmp_path / "run", tell=lambda line: None)
    assert json.loads((tmp_path / "run/generation_config.json").read_text()) == {"bos_token_id": 3, "eos_token_id": 4}


def test_ends_of_texts_of_a_model_whose_tokenizer_is_not_read(tmp_path):
    published("llama2", tmp_path / "there")
    (tmp_path / "there/tokenizer.json").unlink()
    import_model(tmp_path / "there", tmp_path / "run", tell=lambda line: None)
    export(tmp_path / "run", tmp_path / "back", tell=lambda line: None)
    documents = [json.loads((tmp_path / folder / file).read_text()) for folder, file in (
        ("there", "generation_config.json"), ("back", "generation_config.json"), ("back", "config.json"))]
    assert [one["eos_token_id"] for one in documents] == [[281, 7]] * 3 and documents[0] == documents[1]


def test_a_run_on_imported_weights(tmp_path):
    """A run takes the model's tokenizer, with both ways to start it, and refuses another tokenizer."""
    pytest.importorskip("transformers")
    there = tmp_path / "there"
    published("qwen3", there)
    import_model(there, tmp_path / "start", tell=lambda line: None)
    longer = Run(model=Transformer(pretrained=str(there), sequence=33))
    with raises("sequence-beyond-pretrained", 33, 32, "max_position_embeddings"):
        resolve_pretrained(longer)
    own = load(there / "tokenizer.json")
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(TEXT * 2)
    found = read.merge([read.load(str(tmp_path / "start/run.toml"))[1]])
    assert found.problems == () and found.run.model.qk_norm == "head" and found.run.model.max_positions == 32
    run = replace(found.run, mesh=Mesh(col=2), batch=Batch(global_size=8, microbatch_size=2),
                  train=Train(steps=2, eval_sequences=8, sample_tokens=4),
                  data=replace(found.run.data, corpus=str(tmp_path / "texts"), cache_dir=tmp_path / "cache"),
                  resume=str(tmp_path / "start"), run_dir=tmp_path / "first")
    trained(run)
    assert load(tmp_path / "first/tokenizer.json").fingerprint == own.fingerprint
    with raises("checkpoint-of-other-tokenizer"):
        trained(replace(run, data=replace(run.data, tokenizer="bpe"), run_dir=tmp_path / "second"))
    export(tmp_path / "first", tmp_path / "back", tell=lambda line: None)
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (there / "tokenizer.json").read_bytes()
    assert (tmp_path / "back/generation_config.json").exists()

    direct = Run(mesh=Mesh(data=2), batch=run.batch, train=run.train, run_dir=tmp_path / "third",
                 data=Data(corpus=run.data.corpus, cache_dir=tmp_path / "cache"),
                 model=Transformer(pretrained=str(there), family="llama", sequence=16))
    trained(direct)
    assert load(tmp_path / "third/tokenizer.json").fingerprint == own.fingerprint
    other = tmp_path / "other.json"
    published_tokenizer(270).save(str(other))
    with raises("tokenizer-of-other-model"):
        trained(replace(direct, data=replace(direct.data, tokenizer=str(other)), run_dir=tmp_path / "fourth"))


# ---------------------------------------------------------------------- tokenizers


def test_a_published_tokenizer_is_read_as_it_is(tmp_path):
    inner = published_tokenizer()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    text = TEXT + "<|end_of_text|> ünd 2024"
    expected = inner.encode(TEXT + " ünd 2024", add_special_tokens=False).ids
    assert tokenizer.encode(TEXT + " ünd 2024") == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab, tokenizer.end, tokenizer.end_text) == (282, 281, "<|end_of_text|>")
    tokenizer.save(tmp_path / "again.json")
    assert load(tmp_path / "again.json").fingerprint == tokenizer.fingerprint


def test_a_tokenizer_with_words_is_not_cut(tmp_path):
    """Llama 2's tokenizer adds a space before each text, so a document is encoded as one text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "\n": 5, "▁a": 6}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=False))
    inner.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    text = "a\n" * 60_000
    assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False).ids and tokenizer.end == 2
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(("change", "code"), [
    (dict(model={"type": "WordPiece", "vocab": {}}), "not-byte-level-bpe"),
    (dict(added_tokens=[{"id": 1 << 60, "content": "x"}]), "not-byte-level-bpe"),
    (dict(added_tokens=[{"id": 280, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
                         "normalized": False, "special": True}]), "not-byte-level-bpe"),
])
def test_tokenizers_that_cannot_be_read(tmp_path, change, code):
    inner = published_tokenizer()
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(inner.to_str()), **change}))
    with raises(code):
        load(tmp_path / "tokenizer.json")


# ---------------------------------------------------------------------- config.json

DOCUMENT = dict(model_type="llama", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=4,
                num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096)


@pytest.mark.parametrize(("change", "error"), [
    (dict(mlp_bias=True), ("llama-mlp-bias",)),
    (dict(rope_scaling={"rope_type": "longrope", "factor": 2.0}),
     ("rope-type",)),
    (dict(rope_scaling=3), ("rope-scaling-not-object",)),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}), ("rope-setting-not-supported",)),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
     ("rope-setting-not-supported",)),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "truncate": False}), ("rope-setting-not-supported",)),
    (dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}), ("rope-setting-not-supported",)),
    (dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "attention_factor": 2.0}),
     ("rope-setting-not-supported",)),
    (dict(rope_scaling={"rope_type": "yarn"}), ("rope-factor-missing",)),
    (dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), ("rope-setting-not-supported",)),
    (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), ("rope-type",)),
    (dict(rope_parameters={"rope_theta": 1e6}, rope_scaling={"type": "linear", "factor": 2.0}), ("rope-twice",)),
    (dict(original_max_position_embeddings=2048, rope_scaling={
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}),
     ("rope-positions-twice", 2048, 1024)),
    (dict(model_type="olmo3", rope_parameters={"rope_theta": 1e4}), ("rope-of-kinds", "rope_parameters")),
    (dict(model_type="gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_parameters={
        "full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}), ("rope-twice",)),
    (dict(model_type="gemma3_text", attn_logit_softcapping=50.0), ("config-json-value", "attn_logit_softcapping")),
    (dict(is_causal=False), ("config-json-value", "is_causal")),
    (dict(hidden_act="relu"), ("config-json-value",)),
    (dict(num_key_value_heads="2"), ("config-json-invalid",)),
    (dict(partial_rotary_factor=0.5), ("config-json-value",)),
    (dict(model_type="mistral", layer_types=["full_attention", "sliding_attention"] * 2),
     ("llama-layer-types",)),
    (dict(model_type="mistral", layer_types=["sliding_attention", "full_attention"] * 2), ("llama-layer-types",)),
    (dict(model_type="qwen2", use_sliding_window=True, layer_types=["sliding_attention"] * 3), ("llama-layer-types",)),
    (dict(model_type="smollm3", sliding_window=4, layer_types=["sliding_attention"] * 4), ("llama-layer-types",)),
    (dict(model_type="gemma2", layer_types=["chunked_attention"] * 4), ("llama-layer-types",)),
    (dict(model_type="qwen3", use_sliding_window=True, max_window_layers="2"), ("llama-max-window-layers", "2")),
    (dict(model_type="smollm3", no_rope_layers=[1, 0, 2, 1]), ("llama-rope-layers",)),
    (dict(model_type="smollm3", no_rope_layer_interval=0), ("llama-rope-layers",)),
    (dict(model_type="granite", residual_multiplier="0.2"), ("granite-multiplier", "residual_multiplier", "0.2")),
    (dict(model_type="granite", logits_scaling=0), ("granite-multiplier", "logits_scaling")),
    (dict(num_attention_heads=5), ("config-json-heads", 24)),
])
def test_configurations_that_are_refused(change, error):
    document = DOCUMENT | change
    with raises(*error):
        form_of_type(document["model_type"]).read(document)


def test_defaults_of_transformers_hold_for_keys_that_are_missing():
    read_as = {kind: form_of_type(kind).read(DOCUMENT | dict(model_type=kind))[0] for kind in hf_llama.LLAMA_FORMS}
    assert read_as["mistral"].window == 4096 and read_as["llama"].window is None
    assert read_as["qwen3"].head_dim == 128 and read_as["gemma"].tied and not read_as["llama"].tied
    patterned = form_of_type("mistral").read(DOCUMENT | dict(model_type="mistral", sliding_window_pattern=2))[0]
    assert patterned == read_as["mistral"]  # Gemma 3 alone has that key
    parts = form_of_type("llama").read(DOCUMENT | dict(pretraining_tp=2))[0]
    assert parts == read_as["llama"]  # of some Llama 2 and SmolLM 3: products in parts, with the same sum
    assert read_as["gemma2"].full_every == 2 and read_as["gemma2"].attention_softcap == 50
    assert read_as["olmo2"].norm_epsilon == 1e-5 and read_as["qwen2"].bias == "qkv"
    assert read_as["llama"].sequence == 2048 and read_as["llama"].max_positions == 4096


def test_settings_that_no_architecture_has_are_not_exported():
    config = Transformer(family="llama", num_layers=1, hidden=24, heads=6, qk_norm="head", norms="after")
    with raises("no-form-in-hugging-face", "model.qk-norm", "2's"):
        form_of(config).write(config, "tokens")


def test_a_head_of_its_own_is_read(tmp_path):
    published("llama2", tmp_path / "there")
    pretrained = Pretrained(tmp_path / "there")
    assert not torch.equal(pretrained.read("head.projection.weight"), pretrained.read("embedding.token.weight"))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_an_export_copies_nothing_from_outside_the_runs_folder(tmp_path, name):
    published("llama2", tmp_path / "there")
    import_model(tmp_path / "there", tmp_path / "run", tell=lambda line: None)
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError) as refused:
        export(tmp_path / "run", tmp_path / "back", tell=lambda line: None)
    assert name in refused.value.what and str(tmp_path / "run") in refused.value.where
    assert not (tmp_path / "back").exists()
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "own").write_text("{}")
    (tmp_path / "run" / name).symlink_to("own")
    export(tmp_path / "run", tmp_path / "back", tell=lambda line: None)
    assert (tmp_path / "back" / name).read_text() == "{}"
