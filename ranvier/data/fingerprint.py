"""Short hashes that name content: of corpora, tokenizers, token files and settings."""

from __future__ import annotations

import hashlib


def fingerprint(*parts: object) -> str:
    """A short text that differs where the `repr` of the parts differs: 16 hexadecimal digits."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
