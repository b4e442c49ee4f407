"""Tasks of lm-evaluation-harness on an engine of several ranks: rank 0 runs the package, the others compute with it.

`ranvier.inference.lm_eval_model` is the package's model; this module does not import the package, so that only rank 0
needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ranvier.comm.protocol import Group
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import ConfigError
from ranvier.inference.evaluation import Request, loglikelihoods
from ranvier.inference.generate import StopWords, generate
from ranvier.models.token_sampling import Sampling
from ranvier.pipeline.engine import Engine


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """Tasks of lm-evaluation-harness by name. path: a folder with further tasks. limit: samples of each; None for all.
    shots: examples in the prompt; None for the task's own number. ConfigError if the package is missing."""

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


class SharedEngine:
    """An engine that rank 0 controls: all ranks compute rank 0's requests together.

    longest: the model's context length in tokens. vocab: number of the model's tokens.
    """

    def __init__(self, engine: Engine, ranks: Group, tokenizer: Tokenizer, *, longest: int, microbatch_size: int,
                 vocab: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self._engine, self._ranks, self._size = engine, ranks, microbatch_size
        self._vocab = min(vocab, tokenizer.vocab)

    def loglikelihoods(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Result of `ranvier.inference.evaluation.loglikelihoods`. Called by rank 0."""
        found: list[tuple[float, bool]] = self._call_all_ranks(
            {"do": "score", "requests": [list(map(list, request)) for request in requests]})
        return found

    def generate(self, prompts: Sequence[Sequence[int]], *, until: Sequence[str], max_tokens: int,
                 temperature: float, top_k: int | None, top_p: float) -> list[str]:
        """The continuations of the prompts, up to the first stop text. Called by rank 0."""
        found: list[str] = self._call_all_ranks({
            "do": "generate", "prompts": list(map(list, prompts)), "until": list(until), "max_tokens": max_tokens,
            "sampling": {"temperature": temperature, "top_k": top_k, "top_p": top_p}})
        return found

    def serve(self) -> None:
        """Serve rank 0's requests on another rank until rank 0 calls `end`."""
        while (command := self._ranks.gather_objects(None)[0]) is not None:
            self._execute(command)

    def end(self) -> None:
        """End `serve` on the other ranks."""
        self._ranks.gather_objects(None)

    def _call_all_ranks(self, command: dict[str, Any]) -> Any:
        self._ranks.gather_objects(command)
        return self._execute(command)

    def _execute(self, command: dict[str, Any]) -> Any:
        if command["do"] == "score":
            return loglikelihoods(self._engine, self._ranks, command["requests"], longest=self.longest,
                                  microbatch_size=self._size)
        stops = StopWords(words=command["until"], decode=self.tokenizer.decode)
        texts = [""] * len(command["prompts"])
        for active in generate(self._engine, self._ranks, command["prompts"], Sampling(**command["sampling"]),
                               max_tokens=command["max_tokens"], longest=self.longest, vocab=self._vocab,
                               ends=self.tokenizer.ends, is_stopped=stops.are_in):
            for text in active:
                if text.reason is not None:
                    texts[text.number] = stops.answer(text)
        return texts
