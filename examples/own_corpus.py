"""A corpus of your own: `ranvier train gpt-tiny --data.corpus examples.own_corpus:Sums --run-dir runs/own-corpus`.

A corpus is a source of documents, from which the task `lm` makes a tokenizer and token files once.
`ranvier.testing.corpora.check_corpus` checks that a corpus implements the protocol.
"""

import random

from ranvier.data.corpus import Document


class Sums:
    """Pages of sums: "12 + 7 = 19"."""

    fingerprint = "sums, 200 pages"  # tokens are cached by it: change it with the documents

    def read(self, max_bytes):
        for page in range(200):
            chance = random.Random(page)
            pairs = [(chance.randint(0, 99), chance.randint(0, 99)) for _ in range(100)]
            yield Document(f"page {page}", "\n".join(f"{one} + {other} = {one + other}" for one, other in pairs))
