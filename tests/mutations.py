"""`make mutations`: one-line faults in the code that trains, each of which the tests that execute its line must notice.

The faults are drawn with a fixed seed from the rooms below: another comparison, operator, number or condition, or a
call that is left out. A first run of the tests, with a probe at each of these places, finds which tests execute it, in
their own process or in a child. Then each fault is written into a copy of the repository, and its tests run, shortest
first, until one fails. Faults that no test notices are printed: each is a missing assertion, or a line without effect.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("schedule", "layout", "optim", "tensor", "checkpoint", "elastic")
EXECUTIONS, DURATIONS = "executions.jsonl", "durations.jsonl"

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "not in": "in",
               "is": "is not", "in": "not in"}
OPERATORS = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "|": "&", "&": "|"}
WORDS = {"and": "or", "or": "and"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, order=True)
class Mutation:
    """A fault in one line of `path`. begin, end: the expression that a probe wraps, in bytes of the line."""

    path: str
    line: int
    begin: int
    end: int
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was.strip()}  ->  {self.becomes.strip()}"


def mutations_of(path: str, source: str) -> Iterator[Mutation]:
    """Every fault of a file, only in functions: other lines run when the file is imported, in all tests."""
    lines = source.encode().splitlines()
    for node in _inside_functions(ast.parse(source)):
        for begin, end, text in _changes(node, lines):
            was = lines[node.lineno - 1]
            becomes = was[:begin] + text + was[end:]
            yield Mutation(path, node.lineno, node.col_offset, node.end_col_offset or 0, was.decode(), becomes.decode())


def _inside_functions(tree: ast.AST, within: bool = False) -> Iterator[ast.expr]:
    """One-line expressions that are evaluated in a function, except messages and annotations."""
    for name, child in ast.iter_fields(tree):
        for node in child if isinstance(child, list) else [child]:
            skipped = name in ("annotation", "returns", "decorator_list", "type_params")
            if skipped or not isinstance(node, ast.AST) or isinstance(
                    node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.pattern)) or _is_kernel(node):
                continue
            if within and isinstance(node, ast.expr) and node.lineno == node.end_lineno:
                yield node
            if name == "args" and isinstance(tree, ast.FunctionDef):
                continue  # defaults are also evaluated at import
            yield from _inside_functions(node, within or isinstance(tree, ast.FunctionDef))


def _is_kernel(node: ast.AST) -> bool:
    """Whether the node is a Triton kernel, whose text is compiled and cannot contain a probe."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)


def _changes(node: ast.expr, lines: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(begin, end, text): bytes of the node's line, and their replacement."""
    line = lines[node.lineno - 1]
    begin, end = node.col_offset, node.end_col_offset or 0

    def between(first: ast.expr, second: ast.expr, others: dict[str, str]) -> Iterator[tuple[int, int, bytes]]:
        start = first.end_col_offset or 0
        found = re.search(rb"[^\s()]+(\s+(not|in)\b)?", line[start:second.col_offset])
        if found and (text := others.get(found[0].decode())):
            yield start + found.start(), start + found.end(), text.encode()

    if isinstance(node, ast.Compare):
        yield from between(node.left, node.comparators[0], COMPARISONS)
    elif isinstance(node, ast.BinOp):
        yield from between(node.left, node.right, OPERATORS)
    elif isinstance(node, ast.BoolOp):
        yield from between(node.values[0], node.values[1], WORDS)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield begin, node.operand.col_offset, b""
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield begin, end, str(not node.value).encode()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield begin, end, str(node.value + 1).encode()
    elif isinstance(node, ast.IfExp):
        yield begin, end, line[node.orelse.col_offset:node.orelse.end_col_offset]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield begin, node.func.end_col_offset or 0, NAMES[node.func.id].encode()
    elif isinstance(node, ast.Call) and line.strip() == line[begin:end]:
        yield begin, end, b"None"  # a call for its effect


def chosen(count: int, seed: int, rooms: Sequence[str] = ROOMS) -> list[Mutation]:
    """`count` faults in different lines, equally many in each room."""
    random_ = random.Random(seed)
    found: list[Mutation] = []
    for number, room in enumerate(rooms):
        by_line: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
        for file in sorted((ROOT / "ranvier" / room).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            for mutation in mutations_of(path, file.read_text()):
                by_line[mutation.path, mutation.line].append(mutation)
        share = count * (number + 1) // len(rooms) - count * number // len(rooms)
        found += [random_.choice(sorted(by_line[place])) for place in random_.sample(sorted(by_line), share)]
    return sorted(found)


PROBE = '''"""Writes down which test executes which probe."""
import json, os
_seen = set()

def at(number):
    key = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if key not in _seen:
        _seen.add(key)
        file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, json.dumps(key).encode() + b"\\n")
        os.close(file)
'''


def copy_repository(folder: Path) -> Path:
    """Copy the files that git tracks, and the new ones that it does not ignore."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                           check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(repository: Path, arguments: Sequence[str], seconds: float | None = None) -> tuple[int, str]:
    """Exit code of pytest in a copy, and what it printed; code -1 after `seconds`."""
    environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
                               cwd=repository, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return -1, ""
    return process.returncode, output


def pytest_runtest_logreport(report: object) -> None:
    """As a plugin of the run with probes, record the seconds of each test and whether it passed."""
    with open(DURATIONS, "a") as file:
        file.write(json.dumps([report.nodeid, report.duration, report.passed]) + "\n")  # type: ignore[attr-defined]


def executing_tests(mutations: Sequence[Mutation], repository: Path, arguments: Sequence[str]) -> list[list[str]]:
    """The tests that execute each mutation's line and pass, shortest first."""
    (repository / "ranvier" / "_probe.py").write_text(PROBE.format(path=str(repository / EXECUTIONS)))
    by_path: dict[str, list[tuple[int, Mutation]]] = defaultdict(list)
    for number, mutation in enumerate(mutations):
        by_path[mutation.path].append((number, mutation))
    for path, placed in by_path.items():
        lines = (repository / path).read_bytes().splitlines(keepends=True)
        for number, mutation in placed:
            line, begin, end = lines[mutation.line - 1], mutation.begin, mutation.end
            probed = b'(__import__("ranvier._probe", fromlist=["at"]).at(%d) or (%s))' % (number, line[begin:end])
            lines[mutation.line - 1] = line[:begin] + probed + line[end:]
        (repository / path).write_bytes(b"".join(lines))
    run_tests(repository, ["-p", "tests.mutations", *arguments])
    for path in by_path:
        shutil.copy2(ROOT / path, repository / path)
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for name, duration, passed in map(json.loads, (repository / DURATIONS).read_text().splitlines()):
        seconds[name] += duration
        failed |= set() if passed else {name}
    found: list[set[str]] = [set() for _ in mutations]
    for number, name in map(json.loads, (repository / EXECUTIONS).read_text().splitlines()):
        found[number].add(name.rpartition(" (")[0])
    return [sorted(names & set(seconds) - failed, key=seconds.__getitem__) for names in found]


def noticed(mutation: Mutation, tests: Sequence[str], repository: Path, limit_seconds: float) -> str:
    """The test that fails with the fault, "does not end", or nothing."""
    path = repository / mutation.path
    lines = (ROOT / mutation.path).read_bytes().splitlines(keepends=True)
    lines[mutation.line - 1] = mutation.becomes.encode() + b"\n"
    path.write_bytes(b"".join(lines))
    try:
        (repository / "names.txt").write_text("\n".join(tests))
        code, output = run_tests(repository, ["-x", "--timeout", "60", "@names.txt"], limit_seconds)
    finally:
        shutil.copy2(ROOT / mutation.path, path)
    if code == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
    return failed[1] if failed else "does not end" if code == -1 else f"exit code {code}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each fault that no test notices, and the number of noticed faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="packages of ranvier")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of tests for one fault (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path, help="a file of JSON lines: each fault, and the test that notices it")
    parser.add_argument("tests", nargs="*", help="what pytest runs in the first run (all tests)")
    asked = parser.parse_args(arguments)
    mutations = chosen(asked.count, asked.seed, asked.rooms)
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.workers):
            copies.put(copy_repository(Path(folder) / str(number)))
        first = copies.get()
        tests = executing_tests(mutations, first, ["-n", str(asked.workers), "--dist", "loadfile", *asked.tests])
        copies.put(first)

        def judge(place: int) -> str | None:
            if not tests[place]:
                return None
            repository = copies.get()
            try:
                return noticed(mutations[place], tests[place], repository, asked.limit)
            finally:
                copies.put(repository)

        with ThreadPoolExecutor(asked.workers) as pool:
            results = list(pool.map(judge, range(len(mutations))))
    for mutation, result in zip(mutations, results, strict=True):
        if not result:
            print("no test executes" if result is None else "no test notices", mutation)
    if asked.write:
        asked.write.write_text("".join(json.dumps({"mutation": str(mutation), "noticed": result}) + "\n"
                                       for mutation, result in zip(mutations, results, strict=True)))
    executed = [result for result in results if result is not None]
    print(f"{sum(map(bool, executed))} of {len(executed)} executed faults are noticed, of {len(mutations)} in all")


if __name__ == "__main__":
    main()
