"""The tokenizer in a GGUF file as tokenizer.json, with its settings and chat template, as transformers saves them.

A GGUF file has tokens, merges or scores, and the name of a rule for splitting texts into words, but not the rule
itself. The rules in `_SPLITS` are those of the published tokenizers of these names; others are refused, since a
tokenizer that splits differently gives other tokens than the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ranvier.errors import DataError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of tokens (tokenizer.ggml.token_type)."""
_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
          r"\s+")
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_SPLITS = {"gpt-2": None, "smollm": None, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "dbrx": _LLAMA3,
           "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
"""tokenizer.ggml.pre -> regular expression of words; None: GPT-2's. smollm: with each digit separate; dbrx: OLMo
2's."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Tokenizers that encode a word that is a token as that token, without applying the merges."""
_ENDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
         "pad_token": "padding_token_id"}
_REMEDY = "Name the model's folder in Hugging Face's format instead."
Values = Mapping[str, Any]
"""The keys of a GGUF file and their values."""


def write_tokenizer(values: Values, folder: Path, where: str, *, max_length: int) -> dict[str, object]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`. Returns the numbers of the
    tokens at the ends of texts, as config.json and generation_config.json name them.

    where: the file, for errors; max_length: positions of the model. DataError for a tokenizer that is damaged or not
    supported.
    """
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or len(set(tokens)) < len(tokens):
        raise _error("gguf-without-tokenizer", where, "has no tokenizer, or one with a token twice")
    named = {name: _number(values, key, len(tokens)) for name, key in _ENDS.items()}
    try:
        inner = _tokenizer(values, tokens, where)
        _add_tokens(inner, values, tokens, named)
    except DataError:
        raise
    except Exception as error:  # the library raises plain Exception, and its own panics
        raise _error("gguf-tokenizer-unreadable", where, "has a tokenizer that cannot be read",
                     f"{type(error).__name__}: {error}") from error
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length,
                "clean_up_tokenization_spaces": False,
                **{name: tokens[number] for name, number in named.items() if number is not None}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = values.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    stops = [named["eos_token"], *(_number(values, key, len(tokens)) for key in ("eot_token_id", "eom_token_id"))]
    numbers = list(dict.fromkeys(number for number in stops if number is not None))
    ends = {"bos_token_id": named["bos_token"], "pad_token_id": named["pad_token"],
            "eos_token_id": numbers if len(numbers) > 1 else next(iter(numbers), None)}
    return {key: number for key, number in ends.items() if number is not None}


def _number(values: Values, key: str, count: int) -> int | None:
    found = values.get(f"tokenizer.ggml.{key}")
    return found if isinstance(found, int) and 0 <= found < count else None


def _tokenizer(values: Values, tokens: Sequence[str], where: str) -> tokenizers.Tokenizer:
    match values.get("tokenizer.ggml.model"):
        case "gpt2":
            return _byte_level(values, tokens, where)
        case "llama":
            return _sentence_piece(values, tokens, where)
    raise _error("gguf-tokenizer-kind", where,
                 "has a tokenizer that is not supported: gpt2 (byte-level BPE) and llama (SentencePiece) are",
                 values.get("tokenizer.ggml.model"))


def _byte_level(values: Values, tokens: Sequence[str], where: str) -> tokenizers.Tokenizer:
    pre = values.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise _error("gguf-tokenizer-splits", where,
                     f"has a tokenizer that splits words in a way that is not known: {', '.join(_SPLITS)} are", pre)
    merges = [tuple(merge.split(" ")) for merge in values.get("tokenizer.ggml.merges", ())]
    inner = tokenizers.Tokenizer(models.BPE(_numbers(tokens), merges, ignore_merges=pre in _WHOLE_WORDS))
    split = _SPLITS[pre]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        first = pre_tokenizers.Split(Regex(split), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_only])
    elif pre == "smollm":
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    else:
        inner.pre_tokenizer = bytes_only
    if split is _QWEN2:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentence_piece(values: Values, tokens: Sequence[str], where: str) -> tokenizers.Tokenizer:
    """A SentencePiece BPE with bytes for unknown characters, as Llama 2's and Gemma's."""
    kinds, scores = values.get("tokenizer.ggml.token_type"), values.get("tokenizer.ggml.scores")
    unknown = _number(values, "unknown_token_id", len(tokens))
    if values.get("general.architecture") not in ("llama", "gemma", "gemma2") or unknown is None:
        raise _error("gguf-sentencepiece-of-other-model", where,
                     "has a SentencePiece tokenizer that is neither Llama's nor Gemma's",
                     values.get("general.architecture"))
    if not isinstance(kinds, list) or not isinstance(scores, list) or not len(kinds) == len(scores) == len(tokens):
        raise _error("gguf-tokenizer-without-scores", where,
                     "has a tokenizer without a kind and a score for each token")
    inner = tokenizers.Tokenizer(models.BPE(
        _numbers(tokens), _merges(tokens, kinds, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    space, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("tokenizer.ggml.add_space_prefix", True):
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = space
    inner.decoder = decoders.Sequence(back)
    return inner


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that merge into a token, the highest score first: the order in which SentencePiece merges."""
    numbers = {token: number for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
               if kind in (_NORMAL, _USER_DEFINED)}
    found = []
    for token, number in numbers.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in numbers and second in numbers:
                found.append((-scores[number], number, numbers[first], numbers[second], (first, second)))
    return [pair for *_, pair in sorted(found)]


def _add_tokens(inner: tokenizers.Tokenizer, values: Values, tokens: Sequence[str], named: Mapping[str, int | None]
                ) -> None:
    """Add the tokens that are found in a text before it is split, including special ones, and the one that begins a
    text."""
    kinds = values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    special = {number for number, kind in enumerate(kinds) if kind == _CONTROL}
    special |= {number for name, number in named.items() if number is not None and name != "unk_token"}
    inner.add_special_tokens([AddedToken(tokens[number], special=True, normalized=False) for number in sorted(special)])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token, kind in zip(
        tokens, kinds, strict=True) if kind == _USER_DEFINED])
    usually = values.get("tokenizer.ggml.model") == "llama" or values.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    begins = values.get("tokenizer.ggml.add_bos_token", usually)  # llama.cpp's default
    if begins and (start := named["bos_token"]) is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{tokens[start]} $A", pair=f"{tokens[start]} $A $B", special_tokens=[(tokens[start], start)])


def _numbers(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _error(code: str, where: str, what: str, value: object = None) -> DataError:
    return DataError(what, code=code, where=where, value=value, remedy=_REMEDY)
