"""Counts the lines in which the programs of this folder differ from the one in plain PyTorch.

    python examples/whole_modules/changed_lines.py

A line counts that is not blank, a comment or part of the first docstring. Lines that difflib finds replaced count once.
"""

import ast
import difflib
from pathlib import Path

FOLDER = Path(__file__).parent
MODELS = ("resnet", "unet", "nanogpt", "lstm")
PIPELINING = {"nanogpt": ("with_pipelining_and_ties", "nanogpt"), "lstm": ("with_pipelining", "lstm_contiguous")}
"""What runs and is right for a model, as (program, model), where it is not ("with_pipelining", model)."""


def code(name):
    """The lines of a file of this folder that count."""
    text = (FOLDER / f"{name}.py").read_text()
    docstring = ast.parse(text).body[0]
    return [line for number, line in enumerate(text.splitlines(), 1)
            if number > (docstring.end_lineno or 0) and line.strip() and not line.strip().startswith("#")]


def changed(before, after):
    """Lines of `before` and `after` that differ; a line that is replaced by another counts once."""
    differences = difflib.SequenceMatcher(None, code(before), code(after), autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in differences if kind != "equal")


def table():
    """(model, changed lines with Ranvier, with torch.distributed.pipelining), program and model together."""
    rows = []
    for model in MODELS:
        program, theirs = PIPELINING.get(model, ("with_pipelining", model))
        rows.append((model, changed("plain", "with_ranvier"), changed("plain", program) + changed(model, theirs)))
    return rows


if __name__ == "__main__":
    for row in table():
        print("{:<8} with_ranvier {:>2}   with_pipelining {:>2}".format(*row))
