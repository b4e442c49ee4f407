"""Small models of transformers as GGUF files, written by the package `gguf` as llama.cpp's converter does."""

from __future__ import annotations

import gguf
import numpy as np
import tokenizers
import torch
from gguf.quants import quantize

from tests.checkpoint.test_hf_llama import published_tokenizer

SIZES = dict(vocab_size=350, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
                 "Qwen3ForCausalLM": "qwen3", "Olmo2ForCausalLM": "olmo2", "GemmaForCausalLM": "gemma",
                 "Gemma2ForCausalLM": "gemma2"}
TEMPLATE = ("{% for message in messages %}{{ '<|begin_of_text|>' + message['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}")
Q8 = gguf.GGMLQuantizationType.Q8_0


def permuted(weight, heads):
    """The rows of queries or keys as convert_hf_to_gguf.py writes them for Llama (LlamaModel.permute)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(config):
    """rope_freqs.weight as convert_hf_to_gguf.py computes it for Llama 3's scaling."""
    rope = config.rope_parameters
    low, high = (rope["original_max_position_embeddings"] / rope[f"{name}_freq_factor"] for name in ("low", "high"))
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim):
        length = 2 * np.pi / frequency
        smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"])
        found.append(1.0 if length < high else rope["factor"] if length > low else 1 / (
            (1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def write_gguf(path, model, *, kind=None, settings=None, tokenizer=None, leave_out=()):
    """kind: quantisation of matrices, or None for fp32; settings: keys that are added or replaced, by their full names;
    leave_out: keys of the tokenizer."""
    config = model.config
    architecture = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    if type(model).__name__ in ("MistralForCausalLM", "Gemma2ForCausalLM"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    (tokenizer or byte_level)(writer, leave_out)
    for key, value in (settings or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = parameter.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            value = permuted(value, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            value = permuted(value, config.num_key_value_heads)
        if architecture in ("gemma", "gemma2") and name.endswith("norm.weight"):
            value = value + 1
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        if kind is None or value.ndim == 1:
            writer.add_tensor(there, np.ascontiguousarray(value))
        else:
            writer.add_tensor(there, quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(writer, leave_out=(), inner=None, pre="smollm"):
    inner = inner or published_tokenizer()
    numbers = inner.get_vocab()
    special = [token.content for token in inner.get_added_tokens_decoder().values()]
    tokens = sorted(numbers, key=numbers.__getitem__)
    tokens += [f"[PAD{number}]" for number in range(len(tokens), SIZES["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    if "pre" not in leave_out:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 5 if token.startswith("[PAD") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in _merges(inner)])
    writer.add_bos_token_id(tokens.index("<|begin_of_text|>"))
    writer.add_eos_token_id(tokens.index("<|end_of_text|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def sentence_piece_of(texts, vocab=345):
    """A SentencePiece BPE as Llama 2's tokenizer.json has it, trained on texts."""
    space = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = tokenizers.normalizers.Sequence(space)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=vocab - len(pieces),
                                                                      show_progress=False))
    words = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    merges = _merges(trained)
    made = ["".join(pair) for pair in merges]
    characters = [word for word in words if word not in made]
    tokens = [*pieces, *made, *characters]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(
        {token: number for number, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True,
        byte_fallback=True))
    inner.normalizer = tokenizers.normalizers.Sequence(space)
    inner.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])

    def write(writer, leave_out=()):
        kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*tokens, *(f"[PAD{number}]" for number in range(len(tokens), SIZES["vocab_size"]))])
        more = SIZES["vocab_size"] - len(tokens)
        scores = [0.0] * len(pieces) + [-float(rank) for rank in range(len(made))] + [-1e9] * (len(characters) + more)
        if "scores" not in leave_out:
            writer.add_token_scores(scores)
        writer.add_token_types([kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens] + [5] * more)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    return inner, write


def _merges(inner):
    import json

    return [tuple(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]


def ids(model, length=24):
    return (torch.arange(length) * 7919 % model.config.vocab_size)[None]
