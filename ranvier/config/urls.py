"""URLs in settings, which must have no user information: name, password or token before the host."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]++://)[^/?#\s]*@")


def has_user_information(value: object) -> bool:
    """Whether a value, or an entry of it, has a URL such as http://user:password@host."""
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return any(_USER.search(str(entry)) for entry in entries)


def without_user_information(value: object) -> str:
    """The value as text, with user information removed."""
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return ",".join(_USER.sub(r"\1...@", str(entry)) for entry in entries)
