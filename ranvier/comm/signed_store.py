"""A shared key-value store that accepts only values that ranks of this run have written.

torch's TCPStore has no authentication: any client that reaches its port may list, read and write keys. Each value
therefore carries a signature by the run's secret (HMAC-SHA256 of key and value), which the launcher gives to the ranks;
a value without a valid signature counts as absent. This keeps outsiders from controlling the run. It does not protect
against denial of service: a client that reaches the port can still delete keys or keep the store busy.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.distributed import PrefixStore, Store

_SIGNATURE_BYTES = 32
_POLL_SECONDS = 0.02


def private_prefix(secret: str) -> str:
    """A prefix of keys derived from `secret`; the secret cannot be computed from it."""
    return "ranvier/" + hmac.new(secret.encode(), b"prefix", hashlib.sha256).hexdigest()[:32]


def clone_store(store: Store) -> Store:
    """The same torch store over a separate connection. torch's type stubs lack `Store.clone`."""
    return cast(Store, cast(Any, store).clone())


class SignedStore:
    """The methods of a torch store that Ranvier uses, with values signed by `secret`."""

    def __init__(self, store: Store, secret: str) -> None:
        assert secret, "an empty secret signs nothing"
        self.store, self._secret = store, secret

    def clone(self) -> SignedStore:
        """The same store over a separate connection."""
        return SignedStore(clone_store(self.store), self._secret)

    def set(self, key: str, value: str) -> None:
        """Write `value` with its signature."""
        self.store.set(key, self._sign(key, value.encode()))

    def get(self, key: str) -> bytes:
        """The value; b"" if its signature is invalid. Blocks until the key exists, like torch's `Store.get`."""
        return self._value(key, self.store.get(key)) or b""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` exist with a valid signature."""
        return self.store.check(list(keys)) and all(self._value(key, self.store.get(key)) is not None for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write `value` unless a validly signed value exists; returns the value that the key has afterwards.

        expected: must be "" (write once).
        """
        assert expected == "", "a key is written once"
        own = self._sign(key, value.encode())
        written = self.store.compare_set(key, "", own)
        if self._value(key, written) is None:
            self.store.set(key, own)
            written = own.encode()
        return self._value(key, written) or b""

    def delete_key(self, key: str) -> bool:
        """Delete the key; returns whether it existed."""
        return self.store.delete_key(key)

    def _sign(self, key: str, value: bytes) -> str:
        return self._signature(key, value) + value.decode()

    def _signature(self, key: str, value: bytes) -> str:
        message = len(key).to_bytes(4, "big") + key.encode() + value
        return hmac.new(self._secret.encode(), message, hashlib.sha256).hexdigest()

    def _value(self, key: str, written: bytes) -> bytes | None:
        signature, value = written[:2 * _SIGNATURE_BYTES], written[2 * _SIGNATURE_BYTES:]
        return value if hmac.compare_digest(signature, self._signature(key, value).encode()) else None


SharedStore = Store | SignedStore
"""The store that all ranks of a run share; signed if the launcher provides a secret."""


def clone_shared_store(store: SharedStore) -> SharedStore:
    """The same store over a separate connection, which no other thread waits on."""
    return store.clone() if isinstance(store, SignedStore) else clone_store(store)


def sign_store(store: Store, secret: str | None) -> tuple[Store, SharedStore]:
    """The store for torch's own use, below a private prefix, and a signed view of it; `store` for both without secret.
    """
    if secret is None:
        return store, store
    below = PrefixStore(private_prefix(secret), store)
    return below, SignedStore(below, secret)


def await_keys(store: SharedStore, keys: Sequence[str], seconds: float, *, stops: Callable[[], bool] = lambda: False
               ) -> bool:
    """Wait until all `keys` exist; False if they do not within `seconds`, or if `stops()` is true first.

    Unlike torch's `Store.wait`, this handles signals while it waits, and ignores keys without a valid signature."""
    deadline = time.monotonic() + seconds
    while not store.check(list(keys)):
        if time.monotonic() > deadline or stops():
            return False
        time.sleep(_POLL_SECONDS)
    return True
