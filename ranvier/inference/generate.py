"""Text generation with a decoder: all prompts together in the pipeline, one token at a time (KV cache).

Every prompt is a microbatch of one sample. The prompts are divided among replicas; the rows of a replica compute the
same ones. The last stage draws each token and sends it to all ranks, so a greedy text is the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from ranvier.comm.protocol import Group
from ranvier.errors import ConfigError
from ranvier.models.decoding_cache import WholeTexts, caches_of
from ranvier.models.token_sampling import Sampling, next_token
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch

Reason = Literal["end", "stop", "length"]


@dataclass(kw_only=True, eq=False)
class Text:
    """A prompt and its generated continuation.

    reason: why it is complete: an end token (end), a stop word (stop), or the limit of tokens (length); None before.
    """

    number: int
    prompt: Sequence[int]
    written: list[int] = field(default_factory=list)
    reason: Reason | None = None


@dataclass(frozen=True, kw_only=True)
class StopWords:
    """Strings that end an answer and are not part of it. decode: gives the text of tokens."""

    words: Sequence[str]
    decode: Callable[[Sequence[int]], str]

    def are_in(self, written: Sequence[int]) -> bool:
        """Whether the newest tokens contain a stop word."""
        return any(word in self.decode(written[-_STOP_TOKENS - len(word.encode()):]) for word in self.words)

    def answer(self, text: Text) -> str:
        """The generated text, up to the first stop word."""
        answer = self.decode(text.written)
        return answer[:min((place for place in map(answer.find, self.words) if place >= 0), default=None)]


_STOP_TOKENS = 16
"""Newest tokens that are searched for a stop word, in addition to one for each of its bytes."""


def generate(engine: Engine, ranks: Group, prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_tokens: int,
             longest: int, vocab: int, ends: Collection[int] = (),
             is_stopped: Callable[[Sequence[int]], bool] = lambda written: False) -> Iterator[list[Text]]:
    """Continue `prompts`. After each token, yields the texts that are incomplete, and those that it completed.

    Collective: all ranks of the engine, which are those of `ranks`, iterate, and get the same texts.

    Args:
        prompts: at least one token each, and fewer than `longest`.
        max_tokens: of each text, without its prompt.
        longest: the model's context length in tokens; a text ends there.
        vocab: number of the tokenizer's tokens; the model may have more.
        ends: the tokens that end a text; they are not part of it.
        is_stopped: whether a text, given by the tokens written so far, is complete.

    ConfigError for a prompt that is empty or too long.
    """
    texts = [Text(number=number, prompt=prompt) for number, prompt in enumerate(prompts)]
    for text in texts:
        if not 0 < len(text.prompt) < longest:
            raise ConfigError("is empty" if not text.prompt else "leaves no room for an answer: the model sees "
                              f"{longest} tokens at once", code="prompt-length", where=f"prompt {text.number + 1}",
                              value=f"{len(text.prompt)} tokens", remedy="Give a text of 1 to "
                              f"{longest - 1} tokens.")
    mesh, mine = engine.mesh, engine.coordinates.replica
    roots = [ranks.ranks.index(engine.rank_of_outputs(replica)) for replica in range(mesh.num_replicas)]
    chosen = torch.zeros(len(texts), dtype=torch.int64)
    with _open_caches(engine) as forget:
        while active := [text for text in texts if text.reason is None]:
            own = [text for text in active if text.number % mesh.num_replicas == mine]
            outputs = engine.predict([_microbatch(engine, text) for text in own] or [token_batch(engine, [0], -1)])
            if not own:  # all replicas make the same calls
                forget(-1)
            if outputs is not None:
                for text, logits_BSV in zip(own, outputs, strict=False):
                    assert isinstance(logits_BSV, torch.Tensor)  # a decoder's head gives one tensor
                    earlier = [*text.prompt, *text.written]
                    chosen[text.number] = next_token(logits_BSV[0, -1, :vocab], sampling, text=text.number,
                                                     position=len(earlier), earlier=earlier)
            for replica, root in enumerate(roots):
                part = chosen[replica::mesh.num_replicas].contiguous()
                ranks.broadcast(part, root=root).wait()
                chosen[replica::mesh.num_replicas] = part
            for text in active:
                _take(text, int(chosen[text.number]), max_tokens, longest, ends, is_stopped)
                if text.reason is not None:
                    forget(text.number)
            yield active


def _take(text: Text, token: int, max_tokens: int, longest: int, ends: Collection[int],
          is_stopped: Callable[[Sequence[int]], bool]) -> None:
    if token in ends:
        text.reason = "end"
        return
    text.written.append(token)
    if is_stopped(text.written):
        text.reason = "stop"
    elif len(text.written) >= max_tokens or len(text.prompt) + len(text.written) >= longest:
        text.reason = "length"


def _microbatch(engine: Engine, text: Text) -> Microbatch:
    """The tokens of a text that are not in the caches: at first its prompt, then the newest token. Without caches, all
    tokens."""
    if any(isinstance(block, WholeTexts) for block in engine.blocks.values()):
        return token_batch(engine, [*text.prompt, *text.written], text.number)
    return token_batch(engine, text.written[-1:] or text.prompt, text.number)


def token_batch(engine: Engine, tokens: Sequence[int], number: int) -> Microbatch:
    """A microbatch of one text."""
    ids_BS = torch.tensor([list(tokens)], dtype=torch.int64, device=engine.world.device)
    return Microbatch(inputs=ids_BS if engine.is_first_stage else None, samples=torch.tensor([number]))


@contextmanager
def _open_caches(engine: Engine) -> Iterator[Callable[[int], None]]:
    """A context with open caches; yields a function that frees the caches of one text."""
    caches = [cache for block in engine.blocks.values() for cache in caches_of(block)]

    def forget(number: int) -> None:
        for cache in caches:
            cache.forget([number])

    for cache in caches:
        cache.open()
    try:
        yield forget
    finally:
        for cache in caches:
            cache.close()
