"""Conformance test of your own corpus.

    check_corpus(MyCorpus())
"""

from __future__ import annotations

from itertools import islice

from ranvier.config.named_object import missing_attribute
from ranvier.data.corpus import CORPUS_ATTRIBUTES, Corpus, Document, OpenCorpus

_LOOKED_AT = 1000


def check_corpus(corpus: Corpus, *, max_bytes: int = 100_000) -> None:
    """Read up to 1000 documents, twice, and once with a small limit on their bytes.

    AssertionError if the corpus lacks an attribute, has no text, changes from one reading to the next, yields anything
    other than documents of Unicode text, or less of a document than requested.
    """
    missing = missing_attribute(corpus, CORPUS_ATTRIBUTES)
    assert missing is None, f"{type(corpus).__name__} has no {missing}"
    assert isinstance(corpus.fingerprint, str) and corpus.fingerprint, "fingerprint: must be a text that is not empty"
    assert corpus.fingerprint == corpus.fingerprint, "fingerprint: changes from one call to the next"
    first, second = (list(islice(corpus.read(max_bytes), _LOOKED_AT)) for _ in range(2))
    for document in first:
        assert isinstance(document, Document), f"read: gives a {type(document).__name__}, and no Document"
        assert isinstance(document.text, str), f"read: the text of {document.name} is a {type(document.text).__name__}"
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            raise AssertionError(f"read: {document.name} is no Unicode text: {error}") from error
    assert first == second, "read: gives other documents when it is called again"
    assert any(document.text for document in first), "read: gives no text"
    for limit in (1, 64):
        for whole, part in zip(first, islice(corpus.read(limit), _LOOKED_AT), strict=False):
            wanted = whole.text.encode()[:limit]
            assert part.text.encode()[:limit].startswith(wanted[:limit - 3]), (
                f"read: of {whole.name} less than the first {limit} bytes are given")
    taken = OpenCorpus(name="checked", fingerprint=corpus.fingerprint, read=corpus.read).documents(64)
    assert sum(len(document.text.encode()) for document in taken) <= 64
