"""An engine of several ranks that rank 0 commands: it asks for log-likelihoods and texts, and all ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranvier.comm.protocol import Group
from ranvier.data.tokenizer import Tokenizer
from ranvier.inference.evaluation import Request, loglikelihoods
from ranvier.inference.generate import generate
from ranvier.models.generate import Sampling
from ranvier.pipeline.engine import Engine


class SharedEngine:
    """An engine that rank 0 commands: what it asks for, all ranks compute together.

    longest: tokens that the model sees at once. vocab: tokens of the model.
    """

    def __init__(self, engine: Engine, ranks: Group, tokenizer: Tokenizer, *, longest: int, microbatch_size: int,
                 vocab: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self._engine, self._ranks, self._size = engine, ranks, microbatch_size
        self._vocab = min(vocab, tokenizer.vocab)

    def loglikelihoods(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Result of `ranvier.inference.evaluation.loglikelihoods`. Called by rank 0."""
        found: list[tuple[float, bool]] = self._all({"do": "score", "requests": [list(map(list, one))
                                                                                 for one in requests]})
        return found

    def generate(self, prompts: Sequence[Sequence[int]], *, until: Sequence[str], max_tokens: int,
                 temperature: float, top_k: int | None, top_p: float) -> list[str]:
        """Texts behind the prompts, up to the first stop text. Called by rank 0."""
        found: list[str] = self._all({
            "do": "generate", "prompts": list(map(list, prompts)), "until": list(until), "max_tokens": max_tokens,
            "sampling": {"temperature": temperature, "top_k": top_k, "top_p": top_p}})
        return found

    def serve(self) -> None:
        """Serve rank 0's requests on another rank until rank 0 calls `end`."""
        while (command := self._ranks.gather_objects(None)[0]) is not None:
            self._execute(command)

    def end(self) -> None:
        """Let the other ranks go."""
        self._ranks.gather_objects(None)

    def _all(self, command: dict[str, Any]) -> Any:
        self._ranks.gather_objects(command)
        return self._execute(command)

    def _execute(self, command: dict[str, Any]) -> Any:
        if command["do"] == "score":
            return loglikelihoods(self._engine, self._ranks, command["requests"], longest=self.longest,
                                  microbatch_size=self._size)
        until = command["until"]

        def text_of(written: Sequence[int]) -> str:
            text = self.tokenizer.decode(written)
            places = [place for place in map(text.find, until) if place >= 0]
            return text[:min(places)] if places else text

        def is_stopped(written: Sequence[int]) -> bool:
            return any(stop in self.tokenizer.decode(written[-_STOP_TOKENS:]) for stop in until)

        texts = [""] * len(command["prompts"])
        for active in generate(self._engine, self._ranks, command["prompts"], Sampling(**command["sampling"]),
                               max_tokens=command["max_tokens"], longest=self.longest, vocab=self._vocab,
                               ends=self.tokenizer.ends, is_stopped=is_stopped):
            for text in active:
                if text.reason is not None:
                    texts[text.number] = text_of(text.written)
        return texts


_STOP_TOKENS = 32
"""The last tokens of a text, in which a stop text is looked for."""
