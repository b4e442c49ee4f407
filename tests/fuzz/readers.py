"""Files other than checkpoints, corpora and recipes, each changed in an otherwise undamaged folder: one generic fuzzer,
and a list of readers and their files."""

from __future__ import annotations

import csv
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ranvier import __version__
from ranvier.checkpoint.hf import peft
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.pretrained import PretrainedConfig
from ranvier.checkpoint.hf.tokenizer_files import export_files_beside, import_files_beside
from ranvier.cli import generate
from ranvier.config import read as recipes
from ranvier.config.run import Data, Transformer
from ranvier.cost.cluster_files import load_cluster, write_cluster
from ranvier.data import tokenizer as tokenizers
from ranvier.data import wordpiece
from ranvier.data.arrays import Tokens, open_arrays, write_arrays, write_tokens
from ranvier.data.chat import conversations
from ranvier.data.corpus import open_corpus
from ranvier.data.named_files import readable_file
from ranvier.data.run_tokenizer import numbers_in
from ranvier.data.sentences import Columns, table_sentences
from ranvier.data.tables import open_file
from ranvier.errors import RanvierError
from ranvier.inference import trained
from ranvier.inference.prompts import ChatPrompts
from ranvier.launch.contact import read_contact
from ranvier.system.lease import Lease
from ranvier.train.history import History
from ranvier.train.logs import read_events, read_metrics
from ranvier.train.resize import take_oldest
from tests.fuzz.checkpoints import put
from tests.fuzz.inputs import (
    BYTE_CHANGES,
    BYTES,
    JSON_CHANGES,
    RAW,
    TEXT_CHANGES,
    change_bytes,
    change_json,
    change_text,
    little_memory,
    number_of_values,
    try_all,
    try_one,
)

Form = Literal["json", "lines", "toml", "bytes"]
TEXT = "The arrow flies\nover 12 green fields."
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """make: writes an undamaged folder. file: its file that is changed. read: ends normally or in a RanvierError."""

    name: str
    make: Callable[[Path], None]
    file: str
    form: Form
    read: Callable[[Path], object]
    share: int = 2
    """Its number of inputs in a round."""
    is_slow: bool = False


def quiet(text: str) -> None:
    """Drop lines for people."""


# ---------------------------------------------------------------------- models

def _model(config: Transformer, head: str = "tokens", **settings: object) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write = form_of(config).write
        assert write is not None
        (folder / "config.json").write_text(json.dumps({**write(config, head), **settings}, indent=1))
        found = PretrainedConfig(folder)
        torch.manual_seed(0)
        save_file({name: torch.randn(shape) for place in found.form.places(found.config, found.head).values()
                   for name, shape in zip(place.names, place.shapes, strict=True)}, folder / "model.safetensors")

    return make


GPT = _model(Transformer(family="gpt", num_layers=1, hidden=8, heads=2, vocab=30, sequence=8))
LLAMA_CONFIG = Transformer(family="llama", num_layers=2, hidden=16, heads=2, kv_heads=1, vocab=290, intermediate=24,
                           sequence=16, max_positions=32, tied=True)
LLAMA = _model(LLAMA_CONFIG, rope_scaling={
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16})
BERT = _model(Transformer(family="bert", num_layers=1, hidden=8, heads=2, vocab=30, sequence=8, num_classes=3),
              "classes", id2label={"0": "a", "1": "b", "2": "c"})
VIT = _model(Transformer(family="vit", num_layers=1, hidden=8, heads=2, image_size=8, patch_size=4, num_classes=3),
             "classes")


def _sharded(folder: Path) -> None:
    GPT(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(place.values()):
        save_file({name: tensors[name] for name in tensors if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def _pickled(folder: Path) -> None:
    GPT(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _read_model(folder: Path) -> None:
    found = trained.open_trained(folder, quiet).pretrained
    assert found is not None
    for name in found.places:
        found.read(name)
    found.notes_on_tensors()


def _adapters(folder: Path) -> None:
    torch.manual_seed(0)
    names = [module for module in peft.modules_of(LLAMA_CONFIG, "tokens").values() if "q_proj" in module.name]
    save_file({f"base_model.model.{module.name}.{kind}.weight": torch.randn(shape) for module in names
               for kind, shape in (("lora_A", (3, 16)), ("lora_B", (16, 3)))}, folder / peft.TENSORS)
    (folder / peft.CONFIG).write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj"], "use_dora": False, "rank_pattern": {}, "init_lora_weights": True}))


def _read_adapters(folder: Path) -> None:
    found = peft.AdapterFolder(folder)
    for _, _, name in found.places(LLAMA_CONFIG, "tokens")[0].values():
        found.read(name)
    found.targets(LLAMA_CONFIG, "tokens")


def _gguf(folder: Path) -> None:
    import gguf

    from tests.data.gguf_files import SIZES, byte_level

    writer, hidden, inner = gguf.GGUFWriter(folder / "a.gguf", "llama"), 16, 24
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    byte_level(writer)
    shapes = {"token_embd": (SIZES["vocab_size"], hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,),
              "blk.0.attn_q": (hidden, hidden), "blk.0.attn_k": (hidden // 2, hidden),
              "blk.0.attn_v": (hidden // 2, hidden), "blk.0.attn_output": (hidden, hidden), "blk.0.ffn_norm": (hidden,),
              "blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_gguf(folder: Path) -> None:
    from ranvier.data.offline.gguf_file import write_folder

    (folder / "out").mkdir()
    write_folder(folder / "a.gguf", folder / "out")


# ---------------------------------------------------------------------- tokenizers

@cache
def _tokenizer_json() -> str:
    from tests.checkpoint.test_hf_llama import published_tokenizer

    return str(published_tokenizer().to_str(pretty=True))


def _tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 281, "vocab_size": 290}))
    (folder / "generation_config.json").write_text(json.dumps({
        "bos_token_id": 280, "eos_token_id": [281, 7], "temperature": 0.6}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>",
        "chat_template": TEMPLATE,
        "eos_token": {"__type": "AddedToken", "content": "<|end_of_text|>", "special": True}}))


def _read_tokenizer(folder: Path) -> None:
    found = tokenizers.load(folder / "tokenizer.json")
    ids = found.encode_from_start(TEXT)
    assert all(0 <= token < found.vocab for token in [*ids, found.end, *found.nothing])
    found.decode(ids)
    numbers_in(folder)
    (folder / "out").mkdir()
    import_files_beside(folder, folder / "out", quiet)
    export_files_beside(folder / "out", folder, quiet)


def _read_chat_tokenizer(folder: Path) -> None:
    found = ChatPrompts(folder / "tokenizer.json")
    found.decode(found.encode("Hello"))


TEXTS = ("the arrow flies over a green field\n" * 3, "def f(x):\n    return x * 2\n", "grüße, 你好 \0 \x7f\t", "")


def _own_tokenizer(folder: Path) -> None:
    tokenizers.train(TEXTS * 9, 280).save(folder / "tokenizer.json")


def _read_own_tokenizer(folder: Path) -> None:
    """Read the tokenizer: tokens of a text are in its vocabulary, and the text comes back."""
    found = tokenizers.load(folder / "tokenizer.json")
    for text in TEXTS:
        ids = found.encode(text)
        assert found.decode(ids) == text and all(0 <= token < found.vocab for token in [*ids, found.end])


def _wordpiece(folder: Path) -> None:
    wordpiece.train([*TEXTS, TEXT], 90).save(folder / "tokenizer.json")


def _vocabulary(folder: Path) -> None:
    found = wordpiece.train([*TEXTS, TEXT], 90)
    (folder / "vocab.txt").write_text("\n".join(found.decode([number]) for number in range(found.vocab)))


def _read_wordpiece(folder: Path) -> None:
    found = wordpiece.from_folder(folder)
    ids, = found.encode(["Grüße, the green 中文 field [SEP]"])
    assert all(0 <= number < found.vocab for number in [*ids, found.cls, found.sep, found.pad])


# ---------------------------------------------------------------------- the cache

NUMBERS = np.random.default_rng(0).integers(0, 300, 500)
ARRAYS = {"ids": np.arange(60, dtype=np.uint16).reshape(10, 6), "labels": np.arange(10, dtype=np.int32)}


def _cache(folder: Path) -> None:
    with write_tokens(folder / "train", vocab=300, tokenizer="t", corpus="c") as append:
        append(NUMBERS.tolist())
    write_arrays(folder / "arrays", ARRAYS, {"classes": ["a", "b"]})


def _read_tokens(folder: Path) -> None:
    tokens = Tokens(open_arrays(folder / "train"))
    assert tokens.head(len(tokens)) == NUMBERS.tolist()


def _read_arrays(folder: Path) -> None:
    found = open_arrays(folder / "arrays")
    assert found.facts == {"classes": ["a", "b"]}
    assert all(np.array_equal(found.arrays[name], array) for name, array in ARRAYS.items())


# ---------------------------------------------------------------------- a run's folder

def _run(folder: Path) -> None:
    run = recipes.merge([recipes.load("gpt-tiny")[1]]).run
    recipes.write(run, folder / "run.toml")
    (folder / "join.json").write_text(json.dumps({
        "version": __version__, "address": "10.0.0.1", "port": 29500, "secret": "abc"}))
    (folder / "resize.json").write_text(json.dumps({"data": 2, "pipe": 1, "row": 1, "request_id": "0123456789abcdef"}))
    mesh = {"data": 1, "pipe": 2, "row": 1, "col": 1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({
        "step": step, "loss": 2.5, "tokens": 64, "step_seconds": 0.1, "eval_loss": 2.4}) + "\n" for step in (1, 2)))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (
        {"step": 0, "event": "start", "mesh": mesh, "steps": 9}, {"step": 1, "event": "note", "text": "x"},
        {"step": 2, "event": "transition", "mesh": {**mesh, "data": 2}, "frozen_layers": 1})))
    Lease.acquire([folder]).release()


def _run_under_way(folder: Path) -> None:
    _run(folder)
    Lease.acquire([folder])


def _read_logs(folder: Path) -> None:
    history, events, metrics = History(), read_events(folder), read_metrics(folder, 5)
    history.remember(metrics.lines, events.lines)
    assert isinstance(history.losses, dict) and history.on_this_mesh("step_seconds") is not None
    assert events.text() is None or "events.jsonl" in str(events.text())


def _read_recipe(folder: Path) -> None:
    recipes.origin(folder)
    recipes.own_settings(folder)
    recipes.merge([recipes.load(str(folder / "run.toml"))[1]])


def _read_lease(folder: Path) -> None:
    Lease.acquire([folder], expiry_seconds=0.0, wait_seconds=0.0).release()


def _cluster(folder: Path) -> None:
    write_cluster(load_cluster("laptop"), folder / "a.toml")


# ---------------------------------------------------------------------- data

ROWS: list[dict[str, Any]] = [{"text": f"grüße, film {number} 中文", "label": number % 3} for number in range(6)]


def _data(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    lines("rows.jsonl", ROWS)
    lines("chat.jsonl", [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho",
                                                                          "weight": 1}], "tools": [{"name": "f"}]}] * 3)
    lines("prompts.jsonl", [{"prompt": "The sky"}, {"messages": [{"role": "user", "content": "Hi"}], "tools": []}])
    with open(folder / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(ROWS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")


def _read_rows(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        with readable_file(folder / name, "train", "a table"):
            table_sentences(open_file(folder / name, name), Columns())

    return read


def _read_documents(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        for document in open_corpus(str(folder / name), folder / "cache", quiet).documents(1 << 22):
            document.text.encode()

    return read


READERS = (
    *(Reader(name=f"config of {name}", make=make, file="config.json", form="json", read=_read_model)
      for name, make in (("gpt", GPT), ("llama", LLAMA), ("bert", BERT), ("vit", VIT))),
    Reader(name="safetensors", make=LLAMA, file="model.safetensors", form="bytes", read=_read_model, share=4),
    Reader(name="index of safetensors", make=_sharded, file="model.safetensors.index.json", form="json",
           read=_read_model),
    Reader(name="pytorch_model.bin", make=_pickled, file="pytorch_model.bin", form="bytes", read=_read_model),
    Reader(name="adapter_config.json", make=_adapters, file=peft.CONFIG, form="json", read=_read_adapters, share=3),
    Reader(name="adapters", make=_adapters, file=peft.TENSORS, form="bytes", read=_read_adapters),
    Reader(name="tokenizer.json", make=_tokenizer, file="tokenizer.json", form="json", read=_read_tokenizer, share=3),
    Reader(name="tokenizer_config.json", make=_tokenizer, file="tokenizer_config.json", form="json",
           read=_read_tokenizer),
    Reader(name="generation_config.json", make=_tokenizer, file="generation_config.json", form="json",
           read=_read_tokenizer),
    Reader(name="a tokenizer of ours", make=_own_tokenizer, file="tokenizer.json", form="json",
           read=_read_own_tokenizer, share=6),
    Reader(name="wordpiece", make=_wordpiece, file="tokenizer.json", form="json", read=_read_wordpiece, share=3),
    Reader(name="vocab.txt", make=_vocabulary, file="vocab.txt", form="bytes", read=_read_wordpiece),
    *(Reader(name=f"{file} of the cache", make=_cache, file=file, form=form, read=read, share=4)
      for folder, name, read in (("train", "tokens", _read_tokens), ("arrays", "ids", _read_arrays))
      for file, form in ((f"{folder}/about.json", "json"), (f"{folder}/{name}.npy", "bytes"))),
    *(Reader(name=f"{file} of a chat", make=_tokenizer, file=file, form="json", read=_read_chat_tokenizer, share=1,
             is_slow=True) for file in ("tokenizer_config.json", "tokenizer.json")),
    Reader(name="gguf", make=_gguf, file="a.gguf", form="bytes", read=_read_gguf, is_slow=True),
    Reader(name="run.toml", make=_run, file="run.toml", form="toml", read=_read_recipe),
    Reader(name="join.json", make=_run_under_way, file="join.json", form="json", read=read_contact),
    Reader(name="resize.json", make=_run, file="resize.json", form="json", read=take_oldest),
    Reader(name="metrics.jsonl", make=_run, file="metrics.jsonl", form="lines", read=_read_logs),
    Reader(name="events.jsonl", make=_run, file="events.jsonl", form="lines", read=_read_logs),
    Reader(name="lease", make=_run, file=".owner.1", form="lines", read=_read_lease),
    Reader(name="cluster", make=_cluster, file="a.toml", form="toml",
           read=lambda folder: load_cluster(str(folder / "a.toml"))),
    *(Reader(name=f"{what} in {file}", make=_data, file=file, form=form, read=read(file))
      for file, form in (("rows.jsonl", "lines"), ("rows.csv", "bytes"), ("rows.parquet", "bytes"))
      for what, read in (("labels", _read_rows), ("documents", _read_documents))),
    Reader(name="conversations", make=_data, file="chat.jsonl", form="lines",
           read=lambda folder: list(conversations(str(folder / "chat.jsonl"), "train", Data()))),
    Reader(name="prompts", make=_data, file="prompts.jsonl", form="lines",
           read=lambda folder: generate._prompts((), folder / "prompts.jsonl")),
)


class Place:
    """A reader's folder, undamaged and changed."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.whole, self.changed = reader, folder / "whole", folder / "changed"
        self.whole.mkdir(parents=True)
        reader.make(self.whole)
        self.content = (self.whole / reader.file).read_bytes()

    def read(self, content: bytes) -> None:
        """Read the folder with this content of the file."""
        self._copy().write_bytes(content)
        self.reader.read(self.changed)

    def read_something_else(self, kind: str) -> None:
        """Read the folder with something of this kind instead of the file."""
        put(self._copy(), kind)
        self.reader.read(self.changed)

    def _copy(self) -> Path:
        shutil.rmtree(self.changed, ignore_errors=True)
        return shutil.copytree(self.whole, self.changed) / self.reader.file


CHANGES = st.one_of(st.tuples(st.just("tree"), JSON_CHANGES), st.tuples(st.just("text"), TEXT_CHANGES),
                    st.tuples(st.just("bytes"), BYTE_CHANGES))


def changed(content: bytes, form: Form, kind: str, changes: Any) -> bytes:
    """The content of a file after changes of its JSON, its text or its bytes."""
    if kind == "bytes" or form == "bytes" or (kind == "tree" and form == "toml"):
        return change_bytes(content, changes) if kind == "bytes" else change_text(
            content.decode("latin-1"), changes if kind == "text" else []).encode("latin-1", "replace")
    if kind == "text":
        return change_text(content.decode(), changes).encode("utf-8", "surrogatepass")
    if form == "json":
        return json.dumps(change_json(json.loads(content), changes)).encode()
    lines = content.splitlines(keepends=True)
    at = changes[0][1] % len(lines)
    with suppress(ValueError):
        lines[at] = json.dumps(change_json(json.loads(lines[at]), changes)).encode() + b"\n"
    return b"".join(lines)


def fuzz(reader: Reader, folder: Path, count: int) -> int:
    """Try `count` inputs of one reader, half of which replace values; returns their number."""
    place = Place(reader, folder)
    place.read(place.content)  # the undamaged file is read
    swept = sweep(place, count // 2)
    return swept + try_all(CHANGES, lambda value: place.read(changed(place.content, reader.form, *value)),
                           count - swept)


def sweep(place: Place, count: int) -> int:
    """Replace every value of the file by every one of `RAW`, or `count` of these pairs, always the same."""
    form = place.reader.form
    if form == "bytes":
        return 0
    pairs = list(itertools.product(range(number_of_values(place.content.decode())), RAW))
    chosen = random.Random(0).sample(pairs, min(count, len(pairs)))

    def work(pair: tuple[int, str]) -> None:
        place.read(changed(place.content, form, "text", [("value", *pair)]))

    with little_memory(BYTES):
        for pair in chosen:
            try_one(work, pair)
    return len(chosen)


def megabytes(form: Form, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Contents of a megabyte, or of the most that is read, by name: shapes that take far more memory or time than
    others."""
    size = 250_000 if form == "toml" else 1_000_000  # more is not read

    def filled(part: str, first: str = "", last: str = "") -> str:
        return first + part * ((size - len(first) - len(last)) // len(part)) + last

    values = {"lists": filled("[],", "[", "[]]"), "depth": filled("["), "objects": filled('{"a":'),
              "digits": filled("9"), "text": filled("x", '"', '"'), "halves": filled("\\ud800", '"', '"'),
              "numbers": filled("1e5,", "[", "0]"), "pairs": filled('{"":{}},', "[", "{}]")}
    if form == "toml":
        values = {name: values[name] for name in ("lists", "depth", "digits", "text", "numbers")} | {
            "tables": filled("{a={}},", "[", "{}]")}
    whole = {"keys": "{" + ",".join(f'"{number}":{number}' for number in range(size // 14)) + "}",
             "zeros": filled("\0"), "lines": filled("\n"), "short lines": filled("{}\n"), "quotes": filled('"'),
             "commas": filled(","), "of its own": content.decode("latin-1") * (size // len(content) or 1)}
    if form == "toml":
        whole = {"dotted": filled("a.", "", "a = 1"), "quoted": filled('"".', "", "a = 1"), "escaped": filled(
            '"\\"".', "", "a = 1"), "headers": filled("a.", "[", "a]\nb = 1"), "unclosed": filled('\\"', '"'),
            "word": filled("a"), "tables": "".join(f"[a{number}]\n" for number in range(size // 9)), "arrays": filled(
                "[[a]]\n"), **{name: whole[name] for name in ("zeros", "lines", "quotes", "of its own")}}
    yield from ((name, text.encode("latin-1")) for name, text in (whole if form == "bytes" else whole | values).items())
    if form == "bytes":
        yield "noise", random.Random(0).randbytes(size)
        yield "a long header", size.to_bytes(8, "little") + filled('{"":', "", "").encode()
        yield "many tensors", _many_tensors(size)
        return
    text = content.decode()
    for name, value in values.items():
        for number in (1, 2, 7):  # instead of a value of the undamaged file
            yield f"{name} as value {number}", change_text(text, [("value", 2 * number + 1, value)]).encode()


def _many_tensors(size: int) -> bytes:
    header = "{" + ",".join(f'"{number}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
                            for number in range(size // 58)) + "}"
    return len(header).to_bytes(8, "little") + header.encode()


def peak_bytes(place: Place, content: bytes) -> int:
    """Peak growth of the memory of this process while this content is read."""
    def status(name: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak to the present size
    before = status("VmRSS")
    with suppress(RanvierError):
        place.read(content)
    return status("VmHWM") - before
