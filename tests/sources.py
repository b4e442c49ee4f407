"""The package's own files, read and parsed once in a process: tests of how it is written share their trees."""

import ast
import gc
from functools import cache
from pathlib import Path

import ranvier

ROOT = Path(ranvier.__file__).parent


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Every file of the package with all nodes of its tree, the module first, as `ast.walk` gives them.

    There are 600,000 of them: garbage collections while they are made take twice as long as parsing does.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(ROOT.rglob("*.py"))}
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
