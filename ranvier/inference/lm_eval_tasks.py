"""Tasks of lm-evaluation-harness on an engine of several ranks: rank 0 runs the package, the others compute with it.

`ranvier.inference.lm_eval_model` is the package's model; here the package is not imported, so that only rank 0 needs
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ranvier.comm.protocol import Group
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import ConfigError
from ranvier.inference.shared_engine import SharedEngine
from ranvier.pipeline.engine import Engine


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """Tasks of lm-evaluation-harness by name. path: a folder with further tasks. limit: samples of each; None for all.
    shots: examples in the prompt; None for the task's own number. ConfigError where the package is missing."""

    names: tuple[str, ...]
    path: Path | None = None
    limit: int | None = None
    shots: int | None = None

    def __post_init__(self) -> None:
        if find_spec("lm_eval") is None:
            raise ConfigError("needs the package lm-eval, which is not installed", code="lm-eval-missing",
                              where="lm-eval", value=",".join(self.names),
                              remedy="Install the extra: pip install 'ranvier[lm-eval]'.")

    def run(self, engine: Engine, ranks: Group, tokenizer: Tokenizer, *, longest: int, microbatch_size: int,
            vocab: int) -> dict[str, dict[str, float]]:
        """Task -> metric -> value, on every rank. Collective over `ranks`."""
        shared = SharedEngine(engine, ranks, tokenizer, longest=longest, microbatch_size=microbatch_size, vocab=vocab)
        results = None
        if ranks.index == 0:
            from ranvier.inference.lm_eval_model import results_of

            results = results_of(shared, self.names, path=self.path, limit=self.limit, shots=self.shots)
            shared.end()
        else:
            shared.serve()
        found: dict[str, dict[str, float]] = ranks.gather_objects(results)[0]
        return found
