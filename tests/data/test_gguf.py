"""GGUF files as folders in Hugging Face's format: what they compute, their tokens, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.data import tokenizer as own_tokenizers
from ranvier.data.chat_template import ChatTokenizer, Conversation
from ranvier.data.offline import gguf_file
from ranvier.data.offline.gguf_file import write_folder
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.errors import RanvierError
from tests.hf_peers import peer

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from tests.checkpoint.test_hf_llama import TEXT, published_tokenizer  # noqa: E402
from tests.covering import without  # noqa: E402
from tests.data.gguf_files import Q8, SIZES, byte_level, ids, sentence_piece_of, write_gguf  # noqa: E402
from tests.errors import raises  # noqa: E402

LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "llama": ("LlamaForCausalLM", dict(rms_norm_eps=1e-5)),
    "llama-3.2": ("LlamaForCausalLM", dict(tie_word_embeddings=True, head_dim=32, rope_parameters=LLAMA3)),
    "biased": ("LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "mistral": ("MistralForCausalLM", dict(sliding_window=5)),
    "qwen2": ("Qwen2ForCausalLM", dict(rope_parameters=YARN)),
    "qwen3": ("Qwen3ForCausalLM", dict(head_dim=32, tie_word_embeddings=True)),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", dict(head_dim=32, tie_word_embeddings=True)),
    "gemma2": ("Gemma2ForCausalLM", dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=5,
                                         tie_word_embeddings=True)),
    "gemma2-27b": ("Gemma2ForCausalLM", dict(head_dim=32, query_pre_attn_scalar=16, sliding_window=5,
                                             num_hidden_layers=46, tie_word_embeddings=True)),
}


def model_of(name="llama", **more):
    kind, settings = MODELS[name]
    return peer(kind, torch.float32, **SIZES | settings | more)


def converted(tmp_path, model, **how):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(write_gguf(tmp_path / "model.gguf", model, **how), folder)
    return folder


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", without(["gemma2-27b"], MODELS))
def test_a_file_computes_what_its_model_computes(tmp_path, name):
    model = model_of(name)
    found = loaded(converted(tmp_path, model))
    assert type(found) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(found(ids(model)).logits, model(ids(model)).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_a_quantised_file_computes_what_transformers_reads_from_it(tmp_path, kind):
    """transformers undoes quantisation and permutation in its own code."""
    import gguf

    model = model_of()
    folder = converted(tmp_path, model, kind=gguf.GGMLQuantizationType[kind])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ours = loaded(folder)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids(model)).logits, theirs.eval()(ids(model)).logits, rtol=0, atol=1e-5)
        assert not torch.equal(ours(ids(model)).logits, model(ids(model)).logits)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype is dtype


def test_transformers_reads_the_same_gemma(tmp_path):
    """transformers also subtracts the 1 of the norms."""
    folder = converted(tmp_path, model_of("gemma2"), kind=Q8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ours, expected = loaded(folder).state_dict(), theirs.state_dict()
    assert all(torch.allclose(ours[name], value, atol=1e-6) for name, value in expected.items())


def test_large_models_are_written_in_shards(tmp_path):
    model = model_of()
    path = write_gguf(tmp_path / "model.gguf", model)
    for name, size in (("one", 1 << 30), ("many", 50_000)):
        (tmp_path / name).mkdir()
        write_folder(path, tmp_path / name, shard_bytes=size)
    shards = list((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    apart = {name: value for path in shards for name, value in load_file(path).items()}
    whole = load_file(tmp_path / "one/model.safetensors")
    assert apart.keys() == whole.keys() and all(torch.equal(apart[name], value) for name, value in whole.items())
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "many")(ids(model)).logits, loaded(tmp_path / "one")(ids(model)).logits)


# --- tokenizers ------------------------------------------------------------------------------------------------------

TEXTS = (TEXT, "In 1969 12+30 is 42.\n\n  don't\tB\u00fcche \U0001f600 <|end_of_text|> Straße", "")


def test_byte_level_tokens_are_the_models_own(tmp_path):
    folder, there = converted(tmp_path, model_of()), published_tokenizer()
    found = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert found(text)["input_ids"] == there.encode(text).ids
        assert found.decode(found(text)["input_ids"]) == there.decode(there.encode(text).ids, skip_special_tokens=False)
    assert (found.bos_token, found.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 280, "eos_token_id": 281}
    own = own_tokenizers.load(folder / "tokenizer.json")
    assert (own.end_text, own.vocab) == ("<|end_of_text|>", SIZES["vocab_size"])
    there.encode_special_tokens = True
    assert [own.encode(text) for text in TEXTS] == [there.encode(text, add_special_tokens=False).ids for text in TEXTS]
    chat = ChatTokenizer(folder)
    conversation = Conversation(messages=[{"role": "user", "content": "Hi"}])
    assert chat.render(conversation, prompt=True) == "<|begin_of_text|>HiA:"


@pytest.mark.parametrize(("pre", "words"), [
    ("gpt-2", ["In", "Ġ1969", ",", "Ġdon", "'t", "ĠStra", "Ã", "Ł", "e"]),
    ("smollm", ["In", "Ġ", "1", "9", "6", "9", ",", "Ġdon", "'t"]),
    ("qwen2", ["In", "Ġ", "1", "9", "6", "9", ",", "Ġdon", "'t"]),
    ("llama-bpe", ["In", "Ġ", "196", "9", ",", "Ġdon", "'t"])])
def test_words_are_split_as_the_file_says(tmp_path, pre, words):
    folder = converted(tmp_path, model_of(), tokenizer=lambda writer, out: byte_level(writer, out, pre=pre))
    inner = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    found = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str("In 1969, don't")]
    assert found == [word for word in words if "Stra" not in word and word not in ("Ã", "Ł", "e")]
    assert json.loads(inner.to_str())["model"]["ignore_merges"] is (pre == "llama-bpe")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_a_text_begins_as_llama_cpp_begins_it_where_the_file_does_not_say(tmp_path, monkeypatch, pre):
    """Llama 3's files often do not say that they have a BOS. Ends of turns are ends of texts."""
    opened = gguf_file._File

    def changed(*, path, values, tensors):
        values = {key: value for key, value in values.items() if key != "tokenizer.ggml.add_bos_token"}
        return opened(path=path, values=values | {"tokenizer.ggml.eot_token_id": 7}, tensors=tensors)

    monkeypatch.setattr(gguf_file, "_File", changed)
    folder = converted(tmp_path, model_of(), tokenizer=lambda writer, out: byte_level(writer, out, pre=pre))
    own = own_tokenizers.load(folder / "tokenizer.json")
    assert own.start == ((280,) if pre == "llama-bpe" else ()) and own.ends == {7, 281}


def test_sentence_piece_tokens_are_the_models_own(tmp_path):
    there, tokenizer = sentence_piece_of([TEXT])
    found = transformers.AutoTokenizer.from_pretrained(converted(tmp_path, model_of(), tokenizer=tokenizer))
    for text in (TEXT, "The fields\n \U0001f600 arrow 12 green  flies"):
        assert found(text)["input_ids"] == [1, *there.encode(text).ids]
        assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text
    assert len(there.encode(TEXT).ids) < len(TEXT) / 1.2, "nothing was merged"


def test_gemmas_tokens_begin_without_a_space(tmp_path):
    there, tokenizer = sentence_piece_of([TEXT])
    there.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    there.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("▁", " "),
                                                  tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    found = transformers.AutoTokenizer.from_pretrained(converted(
        tmp_path, model_of("gemma"), tokenizer=tokenizer, settings={"tokenizer.ggml.add_space_prefix": False}))
    for text in (TEXT, " The fields\n \U0001f600 arrow"):
        assert found(text)["input_ids"] == [1, *there.encode(text).ids]
        assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "error"), [
    ({"general.architecture": "phi3"}, ("gguf-architecture", "llama", "gemma2", "phi3")),
    ({"split.count": 3}, ("gguf-of-several-files", 3, "llama-gguf-split")),
    ({"llama.expert_count": 8}, ("gguf-setting-not-supported", "llama.expert_count")),
    ({"llama.attention.causal": False}, ("gguf-setting-not-supported", "llama.attention.causal")),
    ({"llama.rope.scaling.type": "longrope"}, ("gguf-rope-scaling", "longrope")),
    ({"llama.rope.dimension_count": 4}, ("gguf-head-width", "llama.rope.dimension_count", 16)),
    ({"llama.attention.head_count": 0}, ("gguf-size-missing", "llama.attention.head_count")),
    ({"llama.attention.head_count_kv": 5}, ("gguf-kv-heads", "llama.attention.head_count_kv", 4)),
    ({"tokenizer.ggml.model": "bert"}, ("gguf-tokenizer-kind", "gpt2", "bert")),
    ({"tokenizer.ggml.pre": "mystery"}, ("gguf-tokenizer-splits", "gpt-2", "mystery")),
    ({"tokenizer.ggml.model": "llama"}, ("gguf-sentencepiece-of-other-model",)),
    ({"tokenizer.ggml.merges": ["a nothing"]}, ("gguf-tokenizer-unreadable",)),
    ({"tokenizer.ggml.tokens": ["a", "a"]}, ("gguf-without-tokenizer",)),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0}, ("gguf-tokenizer-without-scores",)),
])
def test_what_is_not_supported_is_named(tmp_path, settings, error, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", model_of())
    opened = gguf_file._File

    def changed(*, path, values, tensors):
        return opened(path=path, values={**values, **settings}, tensors=tensors)

    monkeypatch.setattr(gguf_file, "_File", changed)
    with raises(*error, where=str(path)):
        folder_of(str(path), tmp_path / "cache", lambda line: None)
    assert [found for found in (tmp_path / "cache/pretrained").iterdir() if not found.name.startswith(".")] == []


def test_a_scaling_that_is_not_llama_3s(tmp_path):
    model = model_of("llama-3.2", rope_parameters=LLAMA3 | {"high_freq_factor": 8.0})
    with raises("gguf-rope-frequencies", "rope_freqs.weight"):
        converted(tmp_path, model)


def test_a_quantisation_that_cannot_be_undone(tmp_path, monkeypatch):
    from gguf import quants

    def unknown(data, kind):
        raise NotImplementedError

    path = write_gguf(tmp_path / "model.gguf", model_of(), kind=Q8)
    monkeypatch.setattr(quants, "dequantize", unknown)
    with raises("gguf-quantisation"):
        write_folder(path, tmp_path)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"GGUF", lambda data: data[:5000],
                                    lambda data: data[:-30_000], lambda data: b"\x00" * len(data)])
def test_a_damaged_file(tmp_path, damage):
    path = write_gguf(tmp_path / "model.gguf", model_of())
    path.write_bytes(damage(path.read_bytes()))
    with raises("gguf-damaged", "model.gguf"):
        write_folder(path, tmp_path)


def test_an_array_without_end(tmp_path):
    """The package would read past the end of the file until memory is full."""
    path = write_gguf(tmp_path / "model.gguf", model_of())
    data = bytearray(path.read_bytes())
    length = data.index(b"tokenizer.ggml.merges") + len(b"tokenizer.ggml.merges") + 8
    data[length:length + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)
    with raises("gguf-damaged"):
        write_folder(path, tmp_path)


def test_damage_anywhere_in_the_header_is_an_error_of_ours(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model_of(num_hidden_layers=1), kind=Q8)
    data, choose, refused = path.read_bytes(), random.Random(0), 0
    for number in range(60):
        broken = bytearray(data)
        for _ in range(choose.choice((1, 2, 5))):
            at = choose.randrange(choose.choice((1200, 7000)))
            broken[at] = choose.choice((0, 255, broken[at] ^ (1 << choose.randrange(8))))
        (tmp_path / "broken.gguf").write_bytes(bytes(broken))
        (tmp_path / str(number)).mkdir()
        try:
            write_folder(tmp_path / "broken.gguf", tmp_path / str(number))
            Pretrained(tmp_path / str(number))
        except RanvierError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(("changed", "error"), [
    (dict(num_key_value_heads=4), ("gguf-rotary-rows", 3, 64)),
    ({}, ("gguf-without-embedding",))])
def test_tensors_that_do_not_fit(tmp_path, monkeypatch, changed, error):
    path = write_gguf(tmp_path / "model.gguf", model_of(**changed))
    opened = gguf_file._File

    def other(*, path, values, tensors):
        if changed:
            return opened(path=path, values={**values, "llama.attention.head_count_kv": 3}, tensors=tensors)
        return opened(path=path, values=values, tensors={**tensors, "token_embd.weight": tensors["output_norm.weight"]})

    monkeypatch.setattr(gguf_file, "_File", other)
    with raises(*error):
        write_folder(path, tmp_path)


def test_without_gguf_an_error_names_the_extra(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", model_of())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with raises("gguf-package-missing", "model.gguf"):
        write_folder(path, tmp_path)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path):
    told: list[str] = []
    path, cache = write_gguf(tmp_path / "model.gguf", model_of()), tmp_path / "cache"
    first = folder_of(str(path), cache, told.append)
    assert folder_of(str(path), cache, told.append) == first and told == [f"converting {path}"]
    write_gguf(path, model_of(num_hidden_layers=1))
    second = folder_of(str(path), cache, told.append)
    assert second != first
    depths = [json.loads((folder / "config.json").read_text())["num_hidden_layers"] for folder in (first, second)]
    assert depths == [2, 1]
    with raises("unknown-pretrained-model"):
        folder_of(str(Path(tmp_path / "gone.gguf")), cache, told.append)


def test_the_first_files_of_gemma_2_do_not_name_its_caps(tmp_path, monkeypatch):
    opened = gguf_file._File
    monkeypatch.setattr(gguf_file, "_File", lambda *, path, values, tensors: opened(path=path, tensors=tensors, values={
        key: value for key, value in values.items() if not key.endswith("softcapping")}))
    config = json.loads((converted(tmp_path, model_of("gemma2")) / "config.json").read_text())
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)


def test_numbers_are_those_that_were_meant(tmp_path):
    config = json.loads((converted(tmp_path, model_of()) / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 10000.0
    assert float(np.float32(1e-5)) != 1e-5


@pytest.mark.parametrize(("name", "settings", "tensors", "error"), [
    ("qwen2", {"qwen2.attention.sliding_window": 5}, {}, ("gguf-sliding-window", 5)),
    ("llama-3.2", {"llama.rope.scaling.type": "linear"}, {}, ("gguf-two-rope-scalings", "linear")),
    ("llama", {}, {"blk.0.attn_more.weight": "output_norm.weight"}, ("gguf-unknown-tensor", "blk.0.attn_more.weight"))])
def test_settings_and_tensors_that_a_model_does_not_have(tmp_path, monkeypatch, name, settings, tensors, error):
    path = write_gguf(tmp_path / "model.gguf", model_of(name))
    opened = gguf_file._File

    def other(*, path, values, tensors):
        more = {new: tensors[old] for new, old in added.items()}
        return opened(path=path, values={**values, **settings}, tensors={**tensors, **more})

    added = tensors
    monkeypatch.setattr(gguf_file, "_File", other)
    with raises(*error):
        write_folder(path, tmp_path)


def test_a_tensor_that_is_damaged(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", model_of())

    def fails(data, kind):
        raise ValueError("shape of 3 bytes")

    monkeypatch.setattr("gguf.quants.dequantize", fails)
    with raises("gguf-tensor-damaged", "shape of 3 bytes"):
        write_folder(path, tmp_path)
