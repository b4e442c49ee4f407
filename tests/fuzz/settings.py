"""Run files and command lines as people and programs mistype them."""

from __future__ import annotations

import io
import os
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import resources
from pathlib import Path

import tomli_w
from hypothesis import strategies as st

from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.launch import start as launch
from ranvier.planner.auto import with_plan
from ranvier.planner.problems import problems, warnings
from tests.cli.test_fuzz import FLAGS, TEXTS, TREES
from tests.fuzz.inputs import BYTE_CHANGES, assert_in_words, change_bytes, try_all

RECIPES = {name: (resources.files("ranvier") / "config" / "recipes" / f"{name}.toml").read_bytes()
           for name in read.recipe_names()}
FULL = b"""seed = 3
precision = "bf16"
run_dir = "runs/x"
[mesh]
data = 2
pipe = 2
[batch]
global_size = 8
microbatch_size = 2
[optim]
betas = [0.9, 0.95]
groups = ["*.bias:1:0"]
offload = "stream"
[pipeline]
boundaries = [3]
[checkpoint]
every = 10
dir = "kept"
"""


def _read(path: Path) -> None:
    """Resolve and check the file; an accepted value is the one in the file."""
    _, layer = read.load(str(path))
    found = read.merge([layer])
    run, more = with_plan(found.run, 4)
    for problem in (*found.problems, *more, *problems(run, 4), *warnings(run)):
        assert_in_words(problem)
    if found.problems:
        raise found.problems[0]
    values = read.flatten(found.run)
    for key, value in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for name, given in {f"{key}.{inner}": part for inner, part in value.items()}.items() if isinstance(
                value, dict) else [(key, value)]:
            took = values[name]
            assert (list(took) if isinstance(took, tuple) else os.fspath(took) if isinstance(took, Path) else took
                    ) == (os.path.normpath(given) if isinstance(took, Path) else given), name


def file_bytes(folder: Path, count: int) -> int:
    originals = [*RECIPES.values(), FULL, b""]

    def work(value):
        which, changes = value
        (folder / "x.toml").write_bytes(change_bytes(originals[which], changes))
        _read(folder / "x.toml")

    return try_all(st.tuples(st.integers(0, len(originals) - 1), BYTE_CHANGES), work, count)


def file_trees(folder: Path, count: int) -> int:
    def work(tree):
        (folder / "x.toml").write_bytes(tomli_w.dumps(tree).encode("utf-8", "surrogatepass"))
        _read(folder / "x.toml")

    return try_all(TREES, work, count)


class Started(BaseException):
    """The command line is valid, and ranks would be started now."""


def _run(args: list[str]) -> None:
    """Run a command line, which ends with 0, or with 2 and a line for each mistake, or when ranks would be started."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run_command(args)
        except Started:
            return
    assert code in (0, 2), (code, args)
    if code == 2:
        said = err.getvalue()
        assert said or "problem" in out.getvalue()
        assert all(line.startswith(("ranvier: error: ", "ranvier: warning: ")) for line in said.splitlines())


_WORDS = st.one_of(FLAGS, TEXTS.filter(lambda text: ":" not in text), st.integers(-2, 80).map(str), st.sampled_from(
    ["--run-dir", "--resume", "--checkpoint.dir", "a\0b", "x" * 5000, "/dev/null", "runs", "\ud800", "~nobody", "odd",
     "--mesh.row=auto", "--data.corpus=", "--train.steps=1e9"]))
_RECIPES = st.one_of(st.sampled_from(["gpt-tiny", "gpt2-small", "nope", "x.toml", "pipe.toml", "folder.toml",
                                      "loop.toml", "", "a\0.toml", "z" * 5000 + ".toml", "\ud800.toml", "tiny",
                                      "no_such_module:run", ":", "os:", ":x", ".:x", "--", "os:getcwd", "os:abort_"]))


def command_lines(folder: Path, count: int) -> int:
    """`train` up to the start of ranks, and the other commands."""
    if not (folder / "pipe.toml").exists():
        os.mkfifo(folder / "pipe.toml")
        (folder / "folder.toml").mkdir()
        (folder / "loop.toml").symlink_to("loop.toml")
        (folder / "odd").mkdir()
        (folder / "odd" / "run.toml").write_text("")
    (folder / "x.toml").write_bytes(FULL)

    def start(*args, **options):
        raise Started

    def work(value):
        command, recipe, words = value
        _run([command, *([recipe] if command in ("train", "check") else []), *words])

    before, launch.start_ranks = launch.start_ranks, start
    try:
        return try_all(st.tuples(st.sampled_from(["train", "train", "train", "check", "doctor", "export", "import",
                                                  "trian", "", "--version", "-h"]), _RECIPES,
                                 st.lists(_WORDS, max_size=5)).filter(lambda value: value[0] != "doctor" or value[2]),
                       work, count)
    finally:
        launch.start_ranks = before


def values(folder: Path, count: int) -> int:
    """One of all flags with one text: it is taken literally, or a problem."""
    settings = read.settings()

    def work(value):
        name, text = value
        found = read.merge([read.Layer(origin="flag", values={name: text}, is_text=True)])
        run, more = with_plan(found.run, 4)
        for problem in (*found.problems, *more, *problems(run, 4)):
            assert_in_words(problem)
        if not found.problems:
            taken = read.as_text(read.flatten(found.run)[name])
            again = read.merge([read.Layer(origin="flag", values={name: taken}, is_text=True)])
            assert again.run == found.run, "the value in run.toml is the one that was taken"

    return try_all(st.tuples(st.sampled_from(sorted(settings)), _WORDS), work, count)


FUZZERS: dict[Callable[[Path, int], int], int] = {file_bytes: 5, file_trees: 8, command_lines: 6, values: 12}
"""Fuzzer -> its number of inputs in a round."""
