"""A shared store whose values count only where a rank of this run has written them.

torch's TCPStore asks nobody who he is: whoever reaches its port may list, read and write keys. So each value carries a
signature (HMAC-SHA256 of its key and itself) by the run's secret, which the ranks have from their launcher, and a value
without a right one is not there. That keeps strangers from giving orders. It does not keep them from doing harm:
somebody who reaches the port can still delete keys, or keep the store busy.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from torch.distributed import PrefixStore, Store

_SIGNATURE_BYTES = 32


def private_prefix(secret: str) -> str:
    """A prefix of keys that follows from `secret`, and tells nothing of it."""
    return "ranvier/" + hmac.new(secret.encode(), b"prefix", hashlib.sha256).hexdigest()[:32]


class SignedStore:
    """`set`, `get`, `check`, `compare_set`, `delete_key` and `clone` of a torch store, with signatures by `secret`."""

    def __init__(self, store: Store, secret: str) -> None:
        self.store, self._secret = store, secret

    def clone(self) -> SignedStore:
        """The same store over a connection of its own."""
        return SignedStore(self.store.clone(), self._secret)

    def set(self, key: str, value: str) -> None:
        self.store.set(key, self._signed(key, value.encode()))

    def get(self, key: str) -> bytes:
        """The value; empty where there is one that no rank of this run has written. Waits where there is none."""
        return self._value(key, self.store.get(key)) or b""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether ranks of this run have written all of `keys`."""
        return self.store.check(list(keys)) and all(self._value(key, self.store.get(key)) is not None for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write `value` where nothing is yet (`expected` is empty), or nothing of this run; returns what is there."""
        assert expected == "", "a key is written once"
        mine = self._signed(key, value.encode())
        there = self.store.compare_set(key, "", mine)
        if self._value(key, there) is None:
            self.store.set(key, mine)
            there = mine.encode()
        return self._value(key, there) or b""

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def _signed(self, key: str, value: bytes) -> str:
        return self._signature(key, value) + value.decode()

    def _signature(self, key: str, value: bytes) -> str:
        message = len(key).to_bytes(4, "big") + key.encode() + value
        return hmac.new(self._secret.encode(), message, hashlib.sha256).hexdigest()

    def _value(self, key: str, written: bytes) -> bytes | None:
        signature, value = written[:2 * _SIGNATURE_BYTES], written[2 * _SIGNATURE_BYTES:]
        return value if hmac.compare_digest(signature, self._signature(key, value).encode()) else None


def signed(store: Store, secret: str | None) -> tuple[Store, Store | SignedStore]:
    """`store` for torch's own use, below a prefix of its own, and signed for ours; both as it is without a secret."""
    if secret is None:
        return store, store
    below = PrefixStore(private_prefix(secret), store)
    return below, SignedStore(below, secret)
