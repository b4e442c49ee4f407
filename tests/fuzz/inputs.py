"""Shared by all fuzzers: many inputs in one process, each within limits of time and memory that no honest input needs,
and each ending normally or with a RanvierError; and changes of bytes and JSON that Hypothesis can shrink."""

from __future__ import annotations

import copy
import math
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier.errors import RanvierError

SECONDS = 40.0
"""Time limit of one input: code that waits for a pipe, or for a number with a billion digits, exceeds it."""
BYTES = 4 << 30
"""Limit of the additional address space: code that allocates a size from a hostile file exceeds it."""


class Hang(BaseException):
    """An input exceeds its time limit. No product code catches it."""


def try_all(strategy: st.SearchStrategy, work: Callable, count: int) -> int:
    """Call `work(value)` on at least `count` values, each of which may end in a complete RanvierError; returns the
    number of inputs. Fewer than 1000 are the same each time, more are new each time."""
    tried = 0

    @settings(max_examples=count, deadline=None, database=None, derandomize=count < 1000,
              suppress_health_check=list(HealthCheck))
    @given(strategy)
    def one(value):
        nonlocal tried
        tried += 1
        try_one(work, value)

    with little_memory(BYTES):
        one()
    assert tried >= count, f"{tried} of {count} inputs"
    return tried


def try_one(work: Callable, value: object) -> None:
    """Call `work(value)` within the time of an input; it may end in a complete RanvierError."""
    with within(SECONDS):
        try:
            work(value)
        except RanvierError as error:
            assert_in_words(error)
        except Exception as error:
            error.add_note(f"input: {value!r:.300}")
            raise


def assert_in_words(error: RanvierError) -> None:
    assert error.where and error.what and error.remedy
    assert str(error)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Hang inside after this many seconds. Another timer of this process continues afterwards."""
    def ring(number, frame):
        raise Hang(f"no end after {seconds:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left and max(0.01, left - (time.monotonic() - began)))
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def little_memory(more_bytes: int) -> Iterator[None]:
    """Inside, the process may map at most this many more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ---------------------------------------------------------------------- changed bytes

BYTE_CHANGES = st.lists(st.tuples(
    st.sampled_from(["flip", "set", "delete", "insert", "cut", "repeat", "swap"]), st.integers(0, 1 << 20),
    st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([
        b"\0", b"\xff" * 8, b"\xed\xa0\x80", b"{", b"]", b'"', b"9" * 400, b"1e999", b"-", b"NaN", b"[" * 3000,
        b'{"a":' * 3000, b"\xef\xbb\xbf", (1 << 31).to_bytes(4, "little"),
        *(size.to_bytes(8, "little") for size in (1, 1 << 20, 1 << 31, 1 << 40, 1 << 63))]))), min_size=1, max_size=3)


def change_bytes(data: bytes, changes) -> bytes:
    """`data` after these changes; the place is taken modulo the length."""
    for how, place, given_bytes in changes:
        at = place % (len(data) + 1)
        if how == "flip" and data:
            at %= len(data)
            data = data[:at] + bytes([data[at] ^ (1 << given_bytes[0] % 8)]) + data[at + 1:]
        elif how == "set":
            data = data[:at] + given_bytes + data[at + len(given_bytes):]
        elif how == "delete":
            data = data[:at] + data[at + given_bytes[0] % 30:]
        elif how == "insert":
            data = data[:at] + given_bytes + data[at:]
        elif how == "cut":
            data = data[:at]
        elif how == "repeat":
            data = data[:at] + data[at:at + 40] * (2 + given_bytes[0] % 3) + data[at + 40:]
        else:
            other = given_bytes[0] % (len(data) + 1)
            data = data[:other] + data[at:at + 8] + data[other + 8:]
    return data


# ---------------------------------------------------------------------- changed JSON

_LEAVES = st.one_of(
    st.integers(-2, 40), st.sampled_from([1 << 31, 1 << 53, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 10**30, 10**400]),
    st.booleans(), st.none(), st.sampled_from([math.nan, math.inf, -1.0, 0.0, 1.5, 1e308, 1e-320]), st.text(max_size=5),
    st.sampled_from(["", "..", "../part-00000.safetensors", "/etc/hostname", "part-00001.safetensors", "piece-0",
                     "piece-1", "float64", "float32", "bool", "complex64", "float8_e4m3fn", "F32", "F64", "F4", "I64",
                     "BF16", "uint16", "uint32", "a\0b", "\ud800", "x" * 300, "ByteLevel", "BPE", "WordLevel"]),
    st.just([]), st.just({}), st.just([[[[[0]]]]]), st.lists(st.integers(0, 9), max_size=4))
JSON_CHANGES = st.lists(st.tuples(
    st.sampled_from(["replace", "replace", "nudge", "delete", "double", "exchange", "rename", "wrap"]),
    st.integers(0, 1 << 30), st.integers(0, 1 << 30), _LEAVES), min_size=1, max_size=3)


def change_json(document: object, changes) -> object:
    """A copy of `document` after these changes; places are taken modulo the number of places."""
    root = [copy.deepcopy(document)]
    for how, first, second, leaf in changes:
        places = list(_places(root))
        holder, key = places[first % len(places)]
        if how == "replace":
            holder[key] = copy.deepcopy(leaf)
        elif how == "nudge":
            value = holder[key]
            holder[key] = value + 1 + second % 3 if isinstance(value, (int, float)) else copy.deepcopy(leaf)
        elif how == "delete" and holder is not root:
            del holder[key]
        elif how == "double" and isinstance(holder, list) and holder is not root:
            holder.insert(key, copy.deepcopy(holder[key]))
        elif how == "exchange":
            other, place = places[second % len(places)]
            holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
        elif how == "rename" and isinstance(holder, dict):
            holder[leaf if isinstance(leaf, str) else f"{key}x"] = holder.pop(key)
        else:
            holder[key] = [holder[key]]
    return root[0]


def nudge(document: object, number: int) -> object:
    """A copy of `document` in which one value that is neither a list nor a mapping is replaced by another of its
    type."""
    root = [copy.deepcopy(document)]
    places = [(holder, key) for holder, key in _places(root) if not isinstance(holder[key], (list, dict))]
    holder, key = places[number % len(places)]
    value = holder[key]
    holder[key] = value + "0" if isinstance(value, str) else 0 if value is None else not value if isinstance(
        value, bool) else value + 1
    return root[0]


def _places(node: object) -> Iterator[tuple[list | dict, object]]:
    """Every (list or mapping, index or key) under `node`."""
    for key in list(range(len(node))) if isinstance(node, list) else list(node):
        yield node, key
        if isinstance(node[key], (list, dict)):
            yield from _places(node[key])


# ---------------------------------------------------------------------- changed texts of JSON and TOML

_VALUES = re.compile(r'"(?:[^"\\\n]|\\.)*"|-?\d[\w.+-]*|\b(?:true|false|null|nan|inf)\b|[\w-]+(?=[ \t]*=)')
RAW = ("1e999", "-1", "0", "NaN", "9" * 5000, "18446744073709551616", "0.5", '""', '"\\ud800"', "null", "[]", "{}",
       "true", "[[[0]]]", "[" * 3000, '{"a":' * 3000, "nan", "1e-400", '"../../x"', '"/dev/zero"', f'"{"(" * 300}"',
       '["a"]', "1979-05-27", "{a = 1}", ".".join("a" * 40), "\0", "")
"""Texts that replace a value in JSON or TOML."""
TEXT_CHANGES = st.lists(st.tuples(st.sampled_from(["value", "value", "double", "key"]), st.integers(0, 1 << 20),
                                  st.sampled_from(RAW)),
                        min_size=1, max_size=3)


def change_text(text: str, changes) -> str:
    """A document after these changes of its text, which may make it invalid. value: replaces a name, text or number;
    double: repeats a name, with this value; key: replaces a name."""
    for how, place, raw in changes:
        found = list(_VALUES.finditer(text))
        keys = [one for one in found if re.match(r"\s*[:=]", text[one.end():one.end() + 9])]
        found = keys if how != "value" and keys else found
        if not found:
            return raw
        one = found[place % len(found)]
        if how == "double":
            sign, end = (" =", "\n") if re.match(r"\s*=", text[one.end():one.end() + 9]) else (":", ", ")
            text = f"{text[:one.start()]}{one[0]}{sign} {raw}{end}{text[one.start():]}"
        else:
            text = text[:one.start()] + raw + text[one.end():]
    return text


def number_of_values(text: str) -> int:
    """Names, texts and numbers that `change_text` finds in a document."""
    return len(_VALUES.findall(text))
