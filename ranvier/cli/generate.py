"""`ranvier generate`: continues texts and chats with a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from click.core import ParameterSource

from ranvier.cli.options import NUMBER_FORMATS
from ranvier.cli.ranks import print_once, work_as_rank
from ranvier.errors import ConfigError, DataError
from ranvier.system.untrusted_file import parse_json

if TYPE_CHECKING:
    from ranvier.inference.generate import StopWords, Text
    from ranvier.inference.prompts import ChatPrompts, TextPrompts
    from ranvier.inference.trained import LanguageModel
    from ranvier.mesh import Mesh
    from ranvier.models.token_sampling import Sampling
    from ranvier.world import World

    Writer = TextPrompts | ChatPrompts


@click.command(short_help="Continue texts or chats with a trained model.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="A text to continue; may be given several times.")
@click.option("--prompts", "file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="A file with one prompt in each line, or a .jsonl file of objects with a field prompt or messages, "
                   "and with --chat tools and chat_template_kwargs.")
@click.option("--chat", is_flag=True, help="Each prompt is a user's message, in the model's chat template.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=100, show_default=True,
              help="Maximum number of tokens that are generated for each prompt.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 takes the most likely token.")
@click.option("--top-k", type=int, help="Sample from this number of most likely tokens only.")
@click.option("--top-p", type=float, default=1.0, show_default=True,
              help="Sample from the most likely tokens whose probabilities add up to this.")
@click.option("--repetition-penalty", type=float,
              help="Divides the logits of tokens that the text has.  [default: as generation_config.json says, or 1]")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for sampling.")
@click.option("--stop", multiple=True, help="A text that ends the answer, and is left out; may be given several times.")
@click.option("--mesh.data", "data", type=click.IntRange(min=1), default=1, show_default=True,
              help="Replicas, which share the prompts.")
@click.option("--mesh.pipe", "pipe", type=click.IntRange(min=1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--mesh.row", "row", type=click.IntRange(min=1), default=1, show_default=True, help="Rows.")
@click.option("--mesh.col", "col", type=click.IntRange(min=1), default=1, show_default=True, help="Columns.")
@click.option("--tensor.scheme", "scheme", type=click.Choice(["stationary", "summa", "megatron"]), default="stationary",
              show_default=True, help="Tensor parallel scheme.")
@click.option("--precision", type=NUMBER_FORMATS, default="fp32", show_default=True,
              help="Number format of the parameters.")
@click.option("--launch.device", "device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True, help="Device of the ranks.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json; by default the model's own.")
@click.option("--ema", is_flag=True,
              help="Use the moving average of the parameters (optim.ema) instead of the parameters.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt, with the reason of its end.")
def generate(model: Path, prompts: tuple[str, ...], file: Path | None, chat: bool, stop: tuple[str, ...],
             data: int, pipe: int, row: int, col: int, device: str, tokenizer: Path | None, ema: bool, as_json: bool,
             **options: Any) -> int:
    """Continue texts with the language model MODEL: a run's folder, a checkpoint, a Hugging Face folder, a GGUF
    file, OWNER/NAME of the Hugging Face hub, or a name that --model.pretrained takes.

    The mesh may be any, whatever the model was trained on. With --temperature 0 the texts are the same on every mesh.
    """
    from ranvier.config.run import Comm, Launch
    from ranvier.inference import generation_config
    from ranvier.inference.prompts import TextPrompts
    from ranvier.inference.trained import open_model
    from ranvier.launch import start as launch
    from ranvier.mesh import Mesh
    from ranvier.models.token_sampling import Sampling

    mesh = Mesh(data=data, pipe=pipe, row=row, col=col)
    flags = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "repetition_penalty", "seed")}
    sampling = Sampling(**{name: value for name, value in flags.items() if value is not None})
    asked = _prompts(prompts, file)
    if "" in stop:
        raise ConfigError("is empty, and every text contains it", code="stop-empty", where="stop", value="",
                          remedy="Give a text, or leave it out.")
    found = open_model(model, print_once, ema=ema)
    writer = _writer(found, tokenizer, chat)
    if isinstance(writer, TextPrompts) and (token := next(filter(None, map(writer.special_in, asked)), None)):
        print_once(f"a prompt has the text {token}: special tokens in prompts are encoded as plain characters; with "
                   "--chat the model's template inserts them")
    folder = found.origin if found.tokenizer is None else found.tokenizer.parent
    if flags["repetition_penalty"] is None:
        sampling = replace(sampling, repetition_penalty=generation_config.repetition_penalty(folder))
    source = click.get_current_context().get_parameter_source
    if text := generation_config.not_followed(folder, samples=sampling.temperature > 0, given={
            name for name in flags if source(name) is not ParameterSource.DEFAULT}):
        print_once(text)
    world = launch.start_ranks(mesh, Comm(), Launch(device=device), stream=sys.stderr)  # type: ignore[arg-type]  # a choice
    return work_as_rank(world, lambda: _write(
        found, writer, asked, world, mesh, sampling, stop=stop, as_json=as_json, **options))


def _prompts(given: Sequence[str], file: Path | None) -> list[Any]:
    """The prompts: texts, or lists of messages. ConfigError if there are none, or a line is neither."""
    from ranvier.data.tables import JSON_LINES

    found: list[Any] = list(given)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n") if file is not None else ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", code="prompts-unreadable",
                          where="prompts", value=str(file), remedy="Name a file of UTF-8 text.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if file is not None and file.suffix.lower() not in JSON_LINES:
            found.append(line)
            continue
        try:
            document: Any = parse_json(line)
            only = document["prompt"] if "prompt" in document else document["messages"]
            json.dumps(document, ensure_ascii=False).encode()  # no tokenizer accepts half of a surrogate pair
            found.append(document if {"tools", "chat_template_kwargs"} & document.keys() else only)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("is not a JSON object with a field prompt or messages", code="prompt-not-json",
                              where=f"{file}, line {number}", value=line[:80],
                              remedy='Write {"prompt": "..."} in each line.') from error
    if not found:
        raise ConfigError("is missing", code="prompt-missing", where="prompt",
                          remedy="Give `--prompt TEXT`, or `--prompts FILE`.")
    return found


def _writer(model: LanguageModel, tokenizer: Path | None, chat: bool) -> Writer:
    """The tokenizer of the model. ConfigError if there is none, or no chat template."""
    from ranvier.inference.prompts import ChatPrompts, TextPrompts

    path = tokenizer or model.tokenizer
    if path is None:
        raise ConfigError("has no tokenizer.json", code="model-without-tokenizer", where="model",
                          value=str(model.origin), remedy="Name one with `--tokenizer`.")
    try:
        return ChatPrompts(path) if chat else TextPrompts(path)
    except DataError as error:
        if error.code != "folder-without-chat-template":
            raise
        raise ConfigError("has no chat template", code="chat-without-template", where="--chat", value=str(path),
                          remedy="Leave it out, or name the tokenizer.json of a chat model with `--tokenizer`."
                          ) from error


def _write(model: LanguageModel, writer: Writer, asked: Sequence[Any], world: World, mesh: Mesh, sampling: Sampling, *,
           stop: Sequence[str], max_tokens: int, scheme: str, precision: str, as_json: bool) -> None:
    """Generate the answers; collective. Rank 0 prints them."""
    from ranvier.config.run import TensorParallel
    from ranvier.inference.generate import StopWords
    from ranvier.inference.generate import generate as texts_of
    from ranvier.inference.trained import build_language_engine
    from ranvier.precision import DTYPES

    engine = build_language_engine(model, world, mesh, tensor=TensorParallel(scheme=scheme),  # type: ignore[arg-type]  # a choice
                          dtype=DTYPES[precision])
    stops = StopWords(words=stop, decode=writer.decode)
    ranks = world.backend.group("generate", [tuple(range(world.size))])
    rounds = texts_of(engine, ranks, [writer.encode(prompt) for prompt in asked], sampling, max_tokens=max_tokens,
                      longest=model.longest, vocab=min(writer.vocab, model.config.vocab), ends=writer.ends,
                      is_stopped=stops.are_in)
    streams = world.rank == 0 and len(asked) == 1 and not as_json
    for text in _complete(rounds, stops, sys.stdout if streams else None):
        if world.rank == 0:
            _print(text, stops, asked, as_json, is_streamed=streams)
    engine.close()
    ranks.close()


def _complete(rounds: Iterator[list[Text]], stops: StopWords, stream: TextIO | None) -> Iterator[Text]:
    """Texts as they become complete. stream: where a single text is printed while it is generated."""
    printed = 0
    for texts in rounds:
        if stream is not None:
            answer = stops.answer(texts[0])
            if texts[0].reason is not None or not answer.endswith("\ufffd"):  # else the rest of a character follows
                ready = len(answer) - (0 if texts[0].reason is not None else _held_back(answer, stops.words))
                stream.write(answer[printed:ready])
                stream.flush()
                printed = max(printed, ready)
        yield from (text for text in texts if text.reason is not None)


def _held_back(answer: str, stop: Sequence[str]) -> int:
    """Characters at the end of `answer` that may be the beginning of a stop word."""
    return max((size for word in stop for size in range(len(word)) if answer.endswith(word[:size])), default=0)


def _print(text: Text, stops: StopWords, asked: Sequence[Any], as_json: bool, *, is_streamed: bool) -> None:
    answer = stops.answer(text)
    if as_json:
        print(json.dumps({"prompt": asked[text.number], "answer": answer, "tokens": len(text.written),
                          "reason": text.reason}, ensure_ascii=False), flush=True)
    elif is_streamed:
        print(flush=True)
    else:
        print(f"--- {text.number + 1}: {asked[text.number]}\n{answer}", flush=True)
