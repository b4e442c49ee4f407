"""Lines of code of the package, without blanks, comments and docstrings: `python tests/count_lines.py [PATH ...]`."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ranvier"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(text: str) -> int:
    """Number of lines of a Python file with a token of code. Strings that are statements, such as docstrings and texts
    under fields, are not code."""
    texts = {line for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
             for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = {line for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)}
    return len(code - texts)


def count(path: Path) -> int:
    """Lines of code of a file, or of all files below a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return sum(lines_of_code(file.read_text(encoding="utf-8")) for file in files)


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        for room in sorted(path for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"):
            print(f"{count(room):7,}  {room.name}")
        paths = [PACKAGE]
    for path in paths:
        print(f"{count(path):7,}  {path}")
