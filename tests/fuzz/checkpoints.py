"""Checkpoints as left by a damaged disk, an interrupted copy or a hostile author."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.manifest import MANIFEST, Manifest, Saved, find, read_manifest
from ranvier.comm.inprocess import InProcessWorld
from ranvier.config.run import Optim
from ranvier.pipeline.engine import Engine
from ranvier.world import World
from tests.checkpoint.anywhere import write_manifest
from tests.fuzz.inputs import BYTE_CHANGES, JSON_CHANGES, change_bytes, change_json, nudge, try_all

PART = "part-00000.safetensors"


def engine_alone() -> Engine:
    """An engine of two small blocks on the only rank, which is this thread."""
    world = World(backend=InProcessWorld(1).backend(0), store=dist.HashStore(), launcher="in-process",
                  device=torch.device("cpu"), local_rank=0, local_size=1)
    torch.manual_seed(0)
    return Engine([nn.Linear(3, 4), nn.Linear(4, 2)], world, loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()),
                  optim=Optim(bucket_size=10), learning_rate=1e-2, dtype=torch.bfloat16)


def trained(engine: Engine) -> Engine:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    for _ in range(3):
        engine.train_batch([(x, x[:, :2])])
    return engine


class Whole:
    """An undamaged checkpoint, its contents, and a folder for changed copies."""

    def __init__(self, folder: Path) -> None:
        checkpoints = Checkpoints(trained(engine_alone()), folder / "whole")
        checkpoints.save({"samples": 6, "text": "abc", "run": {"seed": 0, "batch": {"global_size": 2}}})
        assert [one.error for one in checkpoints.wait()] == [None]
        self.folder, self.changed = folder / "whole" / "step-3", folder / "changed" / "step-3"
        self.manifest = read_manifest(self.folder)
        self.document = json.loads((self.folder / MANIFEST).read_text())
        self.tensors = everything(Saved(self.folder))
        self.engine = engine_alone()

    def copy(self) -> Path:
        """Make a new copy that will be changed."""
        shutil.rmtree(self.changed, ignore_errors=True)
        return shutil.copytree(self.folder, self.changed)

    def check(self, folder: Path) -> None:
        """Read the checkpoint: only RanvierErrors are raised, and without an error its contents are those that were
        saved."""
        saved = Saved(folder)
        try:
            for problem in saved.damage():
                raise problem
            found = everything(saved)
        finally:
            saved.close()
        assert said(saved.manifest) == said(self.manifest)
        assert found.keys() == self.tensors.keys()
        for key, tensor in found.items():
            assert tensor.dtype is self.tensors[key].dtype and torch.equal(tensor, self.tensors[key]), key

    def load(self, folder: Path) -> None:
        """Load the checkpoint into an engine, which then has the state that was saved, or raises."""
        with torch.no_grad():
            for parameter in self.engine.named_parameters().values():
                parameter.fill_(7.0)
        loaded = Checkpoints(self.engine, folder.parent).load(folder)
        assert (loaded.step, self.engine.steps, self.engine.flat_optimizer.steps) == (3, 3, 3)
        for name, parameter in self.engine.named_parameters().items():
            assert torch.equal(parameter, self.tensors["parameter", name])
        for part in self.engine.flat_optimizer.slices():
            for kind, state in part.states.items():
                assert torch.equal(state, self.tensors[kind, part.parameter].flatten()[part.start:part.stop])


def said(manifest: Manifest) -> str:
    """Contents of a manifest, independent of its spelling."""
    return repr(replace(manifest, crc32=0))


def everything(saved: Saved) -> dict[tuple[str, str], torch.Tensor]:
    return {(kind, name): saved.read(kind, name) for kind, tensors in saved.manifest.tensors.items()
            for name in tensors}


# ---------------------------------------------------------------------- the manifest

def manifest_bytes(whole: Whole, count: int) -> int:
    original, folder = (whole.folder / MANIFEST).read_bytes(), whole.copy()

    def work(changes):
        (folder / MANIFEST).write_bytes(change_bytes(original, changes))
        whole.check(folder)

    return try_all(BYTE_CHANGES, work, count)


def manifest_tree(whole: Whole, count: int) -> int:
    """Change the manifest, and leave its checksum as it is."""
    folder = whole.copy()

    def work(changes):
        (folder / MANIFEST).write_text(json.dumps(change_json(whole.document, changes)))
        whole.check(folder)

    return try_all(JSON_CHANGES, work, count)


def manifest_numbers(whole: Whole, count: int) -> int:
    """Change one number or text: each of them in turn, from both ends."""
    folder = whole.copy()

    def work(number):
        place = number // 2 if number % 2 else -1 - number // 2
        (folder / MANIFEST).write_text(json.dumps(nudge(whole.document, place)))
        whole.check(folder)

    return sum(try_all(st.just(number), work, 1) for number in range(count))


def manifest_of_a_liar(whole: Whole, count: int) -> int:
    """Change the manifest, and make its checksum fit: its numbers may be others, but nothing else goes wrong."""
    folder = whole.copy()

    def work(changes):
        write_manifest(folder, change_json(whole.document, changes))
        saved = Saved(folder)
        try:
            for _ in saved.damage():
                pass
            everything(saved)
        finally:
            saved.close()

    return try_all(JSON_CHANGES, work, count)


def engine_and_a_liar(whole: Whole, count: int) -> int:
    """Like `manifest_of_a_liar`, loaded into an engine."""
    folder = whole.copy()

    def work(changes):
        write_manifest(folder, change_json(whole.document, changes))
        Checkpoints(whole.engine, folder.parent).load(folder)

    return try_all(JSON_CHANGES, work, count)


# ---------------------------------------------------------------------- files of pieces

def part_bytes(whole: Whole, count: int) -> int:
    original, folder = (whole.folder / PART).read_bytes(), whole.copy()

    def work(changes):
        (folder / PART).write_bytes(change_bytes(original, changes))
        whole.check(folder)

    return try_all(BYTE_CHANGES, work, count)


def part_unlooked_at(whole: Whole, count: int) -> int:
    """Read tensors without first comparing checksums."""
    original, folder = (whole.folder / PART).read_bytes(), whole.copy()

    def work(changes):
        (folder / PART).write_bytes(change_bytes(original, changes))
        everything(Saved(folder))

    return try_all(BYTE_CHANGES, work, count)


def header_of_a_liar(whole: Whole, count: int) -> int:
    """Change the header of a file of pieces, with a wrong or right length, and make all checksums fit."""
    data, folder = (whole.folder / PART).read_bytes(), whole.copy()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])

    def work(value):
        changes, stated = value
        text = json.dumps(change_json(header, changes)).encode()
        written = struct.pack("<Q", len(text) if stated is None else stated) + text + data[8 + length:]
        (folder / PART).write_bytes(written)
        file = {"name": PART, "size_bytes": len(written), "crc32": zlib.crc32(written)}
        write_manifest(folder, {**whole.document, "files": [file]})
        saved = Saved(folder)
        assert list(saved.damage()) == []
        everything(saved)

    lengths = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 5000), st.sampled_from(
        [1 << 20, 100_000_000, 100_000_001, (1 << 40), (1 << 63) - 1, 1 << 63, (1 << 64) - 1]))
    return try_all(st.tuples(JSON_CHANGES, lengths), work, count)


# ---------------------------------------------------------------------- folders

KINDS = ("missing", "folder", "pipe", "empty", "link to nothing", "link to itself", "link to zeros", "link to another",
         "unreadable", "whole")


def put(path: Path, kind: str) -> None:
    """Replace `path` by something of this kind."""
    kept = path.read_bytes() if path.is_file() else b""
    if kind == "whole":
        return
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind.startswith("link"):
        other = {"nothing": "/no/such/file", "itself": path.name, "zeros": "/dev/zero", "another": f"{path}.other"}
        if kind == "link to another":
            Path(other["another"]).write_bytes(kept)
        path.symlink_to(other[kind.rpartition(" ")[2]])
    elif kind == "unreadable":
        path.write_bytes(kept)
        path.chmod(0)


def folders(whole: Whole, count: int) -> int:
    def work(value):
        manifest, part, name = value
        folder = whole.copy()
        put(folder / MANIFEST, manifest)
        put(folder / PART, part)
        there = folder.parent / name if name.isascii() and "/" not in name else folder
        if there != folder and "\0" not in name and name not in ("", ".", ".."):
            shutil.rmtree(there, ignore_errors=True)
            folder = folder.rename(there)
        try:
            for found in find(folder.parent):
                whole.load(found)
            whole.check(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    names = st.one_of(st.just("step-3"), st.sampled_from(["step-", "step-03", "step-x", ".step-3", "step-3.tmp", "a b",
                                                          "step-999999999999", "step-1e3"]), st.text(max_size=6))
    return try_all(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS), names), work, count)


def engine_and_damage(whole: Whole, count: int) -> int:
    """Load the remains of a damaged disk into an engine: they are refused, or the state is the saved one."""
    folder = whole.copy()
    originals = {name: (whole.folder / name).read_bytes() for name in (MANIFEST, PART)}

    def work(value):
        name, changes = value
        for other, data in originals.items():
            (folder / other).write_bytes(change_bytes(data, changes) if other == name else data)
        whole.load(folder)

    return try_all(st.tuples(st.sampled_from([MANIFEST, PART]), BYTE_CHANGES), work, count)


FUZZERS: dict[Callable[[Whole, int], int], int] = {
    manifest_bytes: 6, manifest_tree: 6, manifest_numbers: 6, manifest_of_a_liar: 10, engine_and_a_liar: 4,
    part_bytes: 4, part_unlooked_at: 4, header_of_a_liar: 6, folders: 3, engine_and_damage: 4}
"""Fuzzer -> its number of inputs in a round."""
