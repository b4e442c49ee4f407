"""The model that lm-evaluation-harness evaluates: its `TemplateLM`, computed by an engine of several ranks.

Imports the package lm-eval, so it is imported only when its tasks are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from ranvier.errors import ConfigError
from ranvier.inference.evaluation import encode_pair, windows

if TYPE_CHECKING:
    from ranvier.inference.lm_eval_tasks import SharedEngine


_MAX_TOKENS = 256
"""Tokens of a generated text if the task sets no number, as in the package's own models."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """The engine as a model of lm-evaluation-harness. Every method is called on rank 0."""

    def __init__(self, shared: SharedEngine) -> None:
        super().__init__()
        self._shared = shared

    @property
    def eot_token_id(self) -> int:
        """The separator of texts."""
        return self._shared.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        return self._shared.tokenizer.nothing[-1]

    @property
    def tokenizer_name(self) -> str:
        """Name under which the package caches requests."""
        return self._shared.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text without a preceding text; add_special_tokens False: without the tokens that a text
        starts with."""
        tokenizer = self._shared.tokenizer
        return tokenizer.encode(string) if add_special_tokens is False else tokenizer.encode_from_start(string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context."""
        return self._loglikelihood_tokens([(request.args, *encode_pair(self._shared.tokenizer, *request.args))
                                           for request in requests])

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **kwargs: Any
                              ) -> list[tuple[float, bool]]:
        found = self._shared.loglikelihoods([(context, continuation) for _, context, continuation in requests])
        for (pair, _, _), answer in zip(requests, found, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each full text, in disjoint windows. As in the package's own models, the tokens that a
        text starts with are also scored."""
        nothing, longest = self._shared.tokenizer.nothing, self._shared.longest
        parts = [list(windows(self.tok_encode(text) if text else [], nothing, longest))
                 for text in (request.args[0] for request in requests)]
        scores = iter(self._shared.loglikelihoods([part for text in parts for part in text]))
        found = [sum(next(scores)[0] for _ in text) for text in parts]
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts up to a stop text or the end of text. A long prompt is cut to its last tokens; prompts with
        equal settings are continued together."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            settings = dict(requests[numbers[0]].args[1])
            until = settings.get("until") or []
            max_tokens = int(settings.get("max_gen_toks", _MAX_TOKENS))
            room = self._shared.longest - max_tokens
            if room < 1:
                raise ConfigError(f"leaves no room for a prompt: the model sees {self._shared.longest} tokens",
                                  code="max-gen-tokens", where="max_gen_toks", value=max_tokens,
                                  remedy="Set fewer in the task.")
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            draws = bool(settings.get("do_sample", settings.get("temperature", 0)))
            texts = self._shared.generate(
                prompts, until=[until] if isinstance(until, str) else until, max_tokens=max_tokens,
                temperature=float(settings.get("temperature", 1.0)) if draws else 0.0,
                top_k=settings.get("top_k"), top_p=float(settings.get("top_p", 1.0)))
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found


def results_of(shared: SharedEngine, names: Sequence[str], *, path: Path | None, limit: int | None, shots: int | None
               ) -> dict[str, dict[str, float]]:
    """Task -> metric -> value, with the arguments of `HarnessTasks`. ConfigError for a task that the package does not
    have."""
    manager = TaskManager(include_path=None if path is None else str(path))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ConfigError("is not a task of lm-evaluation-harness", code="unknown-lm-eval-task", where="lm-eval",
                          value=unknown[0],
                          remedy="`lm_eval ls tasks` lists them; `--lm-eval-path` names a folder with more.")
    found = lm_eval.simple_evaluate(model=HarnessModel(shared), tasks=list(names), task_manager=manager, limit=limit,
                                    num_fewshot=shots, bootstrap_iters=0)
    return {name: {metric.removesuffix(",none"): float(value) for metric, value in scores.items()
                   if isinstance(value, (int, float)) and not metric.partition(",")[0].endswith("_stderr")}
            for name, scores in found["results"].items()}
