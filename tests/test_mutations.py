"""Faults that `make mutations` writes: each changes a line of Python in a function, and none changes a message."""

import ast

from tests.mutations import chosen, mutations_of

SOURCE = '''
LIMIT = 3


def shares(count: int | None, parts: int = 2) -> list[int]:
    """Sizes 1."""
    if count is None or not parts > 1:
        raise ValueError(f"{count + 1} parts" + "1")
    found = [max(count // parts, 1) if count else 0 for _ in range(parts)]
    found.sort(reverse=True)
    return found
'''


def test_faults_are_lines_of_functions_and_not_of_messages():
    found = list(mutations_of("shares.py", SOURCE))
    assert [mutation.becomes.strip() for mutation in found] == [
        "if count is None and not parts > 1:", "if count is not None or not parts > 1:",
        "if count is None or parts > 1:", "if count is None or not parts >= 1:", "if count is None or not parts > 2:",
        "found = [0 for _ in range(parts)]",
        "found = [min(count // parts, 1) if count else 0 for _ in range(parts)]",
        "found = [max(count * parts, 1) if count else 0 for _ in range(parts)]",
        "found = [max(count // parts, 2) if count else 0 for _ in range(parts)]",
        "found = [max(count // parts, 1) if count else 1 for _ in range(parts)]",
        "None", "found.sort(reverse=False)"]
    for mutation in found:
        lines = SOURCE.splitlines()
        lines[mutation.line - 1] = mutation.becomes
        ast.parse("\n".join(lines))


def test_the_same_seed_draws_the_same_faults_from_every_room():
    found = chosen(4, 0, rooms=("schedule", "layout"))
    assert found == chosen(4, 0, rooms=("schedule", "layout")) != chosen(4, 1, rooms=("schedule", "layout"))
    assert sorted(mutation.path.split("/")[1] for mutation in found) == ["layout"] * 2 + ["schedule"] * 2
