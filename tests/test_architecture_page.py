"""docs/architecture.md names files and functions that exist: its rooms, and where each decision is made."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ranvier"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    return PAGE[PAGE.index(f"## {title}"):].split("\n## ")[0]


def names_in(path: Path) -> set[str]:
    """Names that a file, or the files of a package, define at any level."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    text = "\n".join(file.read_text() for file in files)
    return set(re.findall(r"(?:def|class) (\w+)", text)) | set(re.findall(r"^\s*(?:self\.)?(\w+)(?::[^=\n]+)? = ", text,
                                                                           re.MULTILINE))


def test_where_each_decision_is_made() -> None:
    """In a row's second cell a path is followed by names from that file: `file` `name` `Class.method`."""
    rows, wrong = re.findall(r"^\| (.+?) \| (.+) \|$", section("Where is ... decided?"), re.MULTILINE), []
    for question, places in rows[1:]:
        known: set[str] = set()
        for place in re.findall(r"`([\w./]+)`", places):
            path = PACKAGE / place
            if path.is_dir() or path.with_suffix(".py").is_file():
                known = names_in(path)
            elif not set(place.split(".")) <= known:
                wrong.append(f"{question}: {place}")
    assert len(rows) > 20 and not wrong, "\n".join(wrong)


def test_rooms_are_those_of_the_package() -> None:
    listed = set(re.findall(r"^      (\w+)(?:\.py|/)", section("The packages"), re.MULTILINE))
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there - {"__init__", "__main__"} - listed == set()


def test_listed_files_exist() -> None:
    """A line of a room starts with names of its files and folders; Python files are named without their suffix."""
    room, missing = "", []
    for line in section("The packages").splitlines():
        if found := re.match(r"      (\w+)/ ", line):
            room = found[1]
        elif (found := re.match(r"        (\S+(?:, \S+)*)(?:  +| \()", line)) and room:
            missing += [f"{room}/{name}" for name in found[1].split(", ") if "*" not in name and not (
                (PACKAGE / room / f"{name}.py").is_file() or (PACKAGE / room / name).is_dir())]
    assert not missing, "\n".join(missing)


def test_decisions_have_tests() -> None:
    rows = re.findall(r"^\| .+ \| .+ \| (.+) \|$", section("Decisions that several packages share"), re.MULTILINE)[1:]
    folders = {name for row in rows for name in row.split(", ")}
    assert len(rows) > 20 and not [name for name in folders if not (ROOT / "tests" / name).exists()]
