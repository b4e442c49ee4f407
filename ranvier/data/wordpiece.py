"""Text to token numbers as in BERT: its normaliser and pre-tokenizer, then WordPiece (Wu et al., 2016).

The vocabulary is that of a pretrained model's folder, or is trained on the text of the task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ranvier.data.cache import fingerprint
from ranvier.data.text_samples import TextTokenizer
from ranvier.errors import DataError
from ranvier.system.untrusted_file import parse_json, read_bytes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's special tokens, in the order of a trained vocabulary."""
SMALLEST_VOCAB = len(SPECIAL) + 2
"""The special tokens and one character, at the start of a word and within."""
_CONTINUES = "##"
_MOST_BYTES = 64 << 20
_MOST_CHARACTERS = 1000


_LONGEST_WORD = 100
"""Most characters of a word that is split into tokens; a longer word is [UNK], so nothing is learnt from it."""


class WordPiece(TextTokenizer):
    """A tokenizer; immutable. The characters of a special token in a text are encoded as plain text."""

    def __init__(self, vocab: Sequence[str], *, lowercase: bool = True, strip_accents: bool | None = None,
                 chinese: bool = True) -> None:
        """vocab: tokens by number, with [PAD], [UNK], [CLS] and [SEP]. lowercase, strip_accents, chinese: settings of
        BERT's normaliser (chinese: every CJK character is a word)."""
        inner = tokenizers.Tokenizer(models.WordPiece({token: number for number, token in enumerate(vocab)},
                                                      unk_token="[UNK]", continuing_subword_prefix=_CONTINUES))
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece(prefix=_CONTINUES)
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL
                                  if token in vocab])
        self.vocab = len(vocab)
        numbers = inner.get_vocab()
        self.pad, self.cls, self.sep = (numbers[token] for token in ("[PAD]", "[CLS]", "[SEP]"))
        inner.post_processor = processors.BertProcessing(("[SEP]", self.sep), ("[CLS]", self.cls))
        inner.encode_special_tokens = True
        self._inner = inner
        self.fingerprint = fingerprint(list(vocab), lowercase, strip_accents, chinese)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token numbers of each text, without [CLS] and [SEP]; on all cores."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Encode texts as `encode` does, with the (start, stop) of every token among the characters of the text."""
        return [(encoding.ids, encoding.offsets)
                for encoding in self._inner.encode_batch(list(texts), add_special_tokens=False)]


def train(texts: Iterable[str], vocab: int) -> WordPiece:
    """A tokenizer with at most `vocab` tokens, the same for the same texts. DataError if that is too few."""
    if vocab < SMALLEST_VOCAB:
        raise too_small(vocab)
    splitter, normaliser = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=True)
    sentences = [[word for word, _ in splitter.pre_tokenize_str(normaliser.normalize_str(text))
                  if len(word) <= _LONGEST_WORD] for text in texts]
    counts = Counter(character for words in sentences for word in words for character in word)
    most = min(_MOST_CHARACTERS, (vocab - len(SPECIAL)) // 2)
    alphabet = {character for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]}
    # The library numbers tokens in the order of a hash table, which differs by process, and breaks ties by number.
    continuing = sorted({_CONTINUES + character for words in sentences for word in words for character in word[1:]
                         if character in alphabet})
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab, special_tokens=[*SPECIAL, *continuing], show_progress=False,
                                        initial_alphabet=sorted(alphabet))
    inner.train_from_iterator((" ".join(word for word in words if alphabet.issuperset(word)) for words in sentences),
                              trainer)
    found = inner.get_vocab()
    return WordPiece(sorted(found, key=found.__getitem__))


def too_small(vocab: int) -> DataError:
    """The error for a vocabulary below `SMALLEST_VOCAB`."""
    return DataError("is too small for a WordPiece tokenizer: its special tokens and one character",
                     code="vocab-below-characters", where="model.vocab", value=vocab,
                     remedy=f"Set `--model.vocab {SMALLEST_VOCAB}` or more.")


def from_folder(folder: Path) -> WordPiece:
    """The tokenizer in the folder of a model: tokenizer.json, or else vocab.txt with tokenizer_config.json.

    DataError if there is neither, or if it is damaged or not a WordPiece tokenizer like BERT's.
    """
    if (folder / "tokenizer.json").exists():
        return load(folder / "tokenizer.json")
    path, config = folder / "vocab.txt", folder / "tokenizer_config.json"
    if not path.exists():
        raise DataError("has neither tokenizer.json nor vocab.txt", code="wordpiece-missing", where=str(folder),
                        remedy="Put the model's own there, or choose another `--model.pretrained`.")
    settings = _json(config) if config.exists() else {}
    found = {"lowercase": settings.get("do_lower_case", True), "strip_accents": settings.get("strip_accents"),
             "chinese": settings.get("tokenize_chinese_chars", True)}
    _check_beside(path, found)
    return _check_vocabulary(path, _text(path).removesuffix("\n").split("\n"), found)


def load(path: Path) -> WordPiece:
    """The tokenizer in a tokenizer.json. Only its vocabulary and BERT's settings are used, after they were checked.
    DataError if it is damaged."""
    document = _json(path)
    model, normaliser = document.get("model"), document.get("normalizer")
    if not isinstance(model, dict) or not isinstance(vocab := model.get("vocab"), dict) or model.get(
            "type", "WordPiece") != "WordPiece" or model.get("continuing_subword_prefix", _CONTINUES) != _CONTINUES:
        raise _damaged_error(path, "its model is not WordPiece")
    if not isinstance(normaliser, dict) or normaliser.get("type") != "BertNormalizer":
        raise _damaged_error(path, "its normalizer is not BertNormalizer")
    numbers = [number for number in vocab.values() if type(number) is int]
    if sorted(numbers) != list(range(len(vocab))):
        raise _damaged_error(path, "its tokens are not numbered from 0 without a gap")
    settings = {"lowercase": normaliser.get("lowercase", True), "strip_accents": normaliser.get("strip_accents"),
                "chinese": normaliser.get("handle_chinese_chars", True)}
    _check_unused(path, document)
    _check_beside(path, settings)
    return _check_vocabulary(path, sorted(vocab, key=vocab.__getitem__), settings)


def _check_unused(path: Path, document: dict[str, Any]) -> None:
    """DataError for parts of a tokenizer.json that would change a text's tokens but are not used here."""
    step, added = document.get("pre_tokenizer"), document.get("added_tokens")
    if isinstance(step, dict) and step.get("type") != "BertPreTokenizer":
        raise _damaged_error(path, f"its pre_tokenizer is {step.get('type')}")
    if document["normalizer"].get("clean_text", True) is not True:
        raise _damaged_error(path, "it keeps control characters (clean_text)")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("special") is False and token.get("content") not in SPECIAL:
            raise _damaged_error(path, f"its token {str(token.get('content'))[:40]} is added outside WordPiece")


def _check_beside(path: Path, settings: dict[str, Any]) -> None:
    """DataError if tokenizer_config.json has other settings: some classes of transformers use the one file, some the
    other. Also if it cuts texts at their beginning."""
    config = path.with_name("tokenizer_config.json")
    told = _json(config) if config.is_file() else {}
    beside = {"lowercase": told.get("do_lower_case"), "chinese": told.get("tokenize_chinese_chars"),
              "strip_accents": told.get("strip_accents")}
    for name, value in beside.items():
        here = settings["lowercase"] if settings[name] is None else settings[name]
        if isinstance(value, bool) and value != here:
            raise _damaged_error(path, f"{name} is {here}, and {value} in {config.name}")
    if told.get("truncation_side") == "left":
        raise _damaged_error(config, "it cuts long texts at their beginning (truncation_side)")


def _check_vocabulary(path: Path, vocab: list[str], settings: dict[str, Any]) -> WordPiece:
    missing = [token for token in SPECIAL[:4] if token not in vocab]
    if missing:
        raise _damaged_error(path, f"it has no {', '.join(missing)}")
    if len(set(vocab)) != len(vocab):
        raise _damaged_error(path, "it has a token twice")
    for name, value in settings.items():
        if type(value) is not bool and not (name == "strip_accents" and value is None):
            raise _damaged_error(path, f"{name} is {value!r}")
    try:
        return WordPiece(vocab, **settings)
    except Exception as error:  # the library raises plain Exception; lone surrogates are a UnicodeError
        raise _damaged_error(path, error) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(_text(path))
    except ValueError as error:
        raise _damaged_error(path, error) from error
    if not isinstance(document, dict):
        raise _damaged_error(path, "not a JSON object")
    return document


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, reason: object) -> DataError:
    return DataError("is not a WordPiece tokenizer as expected", code="not-wordpiece", where=str(path),
                     value=str(reason),
                     remedy="Fetch the model's folder again, or choose another `--model.pretrained`.")
