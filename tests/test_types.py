"""The package under a type checker: every public name has its own type, and the pages' programs have no errors.

`make lint` checks the package and the examples; this is another run of mypy, on code that is in no file.
"""

import ast
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

import ranvier
from ranvier.arguments import alternatives
from tests.test_readme import blocks

ROOT = Path(__file__).parents[1]
AS_USERS_WRITE = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls"
"""The calls of a program are checked strictly, but its own functions need no types."""


OTHERS_FILE = "from model import "
"""Start of a program that uses another project's file, such as nanoGPT's."""


def programs() -> list[str]:
    """The complete programs of the pages; excerpts import nothing."""
    return [block for block in blocks("python") if "import " in block and OTHERS_FILE not in block]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """File -> mypy's messages about it."""
    folder = tmp_path_factory.mktemp("typed")
    names = [*(f"ranvier.{name}" for name in ranvier.__all__), "ranvier.__version__"]
    (folder / "names.py").write_text("import ranvier\n" + "".join(f"reveal_type({name})\n" for name in names))
    for number, program in enumerate(programs()):
        (folder / f"program{number}.py").write_text(f"{AS_USERS_WRITE}\n{program}")
    # With the options of `make lint`, so that both runs can use the same cache.
    said = subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary", *map(str, sorted(folder.iterdir()))],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not said.stderr, said.stderr
    lines: dict[str, list[str]] = {path.name: [] for path in folder.iterdir()}
    for line in said.stdout.splitlines():
        place, _, text = line.partition(": ")
        lines[Path(place.partition(":")[0]).name].append(text)
    return lines


@pytest.mark.slow
def test_every_public_name_has_a_type(found: dict[str, list[str]]) -> None:
    types = [re.fullmatch(r'note: Revealed type is "(.*)"', line) for line in found["names.py"]]
    shown = dict(zip([*ranvier.__all__, "__version__"], (one and one[1] for one in types), strict=True))
    assert not {name: one for name, one in shown.items() if not one or one in ("Any", "object", "builtins.object")}
    assert shown["Engine"].startswith("def (model: ") and shown["Engine"].endswith("ranvier.pipeline.engine.Engine")
    assert "in_flight" not in shown["Engine"] and "**" not in shown["Engine"], "it takes named arguments only"
    assert shown["train"].endswith("-> dict[str, object]") and shown["start"].endswith("-> ranvier.world.World")


@pytest.mark.slow
def test_programs_of_the_pages_have_no_errors(found: dict[str, list[str]]) -> None:
    assert len(found) == 1 + len(programs()) > 2
    assert not {name: lines for name, lines in found.items() if name != "names.py" and lines}


def test_what_is_imported_when_used_is_what_type_checkers_read() -> None:
    """The names under TYPE_CHECKING, each from the module that defines it."""
    tree = ast.parse((ROOT / "ranvier" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.asname: (node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom)
                for alias in node.names}
    assert sorted(declared) == sorted([*ranvier.__all__, *ranvier._PACKAGES])
    for name, (module, original) in declared.items():
        assert name == original and getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)
        if name != "train":
            assert getattr(ranvier, name) is getattr(sys.modules[module], name)


def test_all_sections_of_a_run_are_public() -> None:
    sections = {one for kind in get_type_hints(ranvier.Run).values() for one in alternatives(kind) if is_dataclass(one)}
    assert len(sections) > 15
    assert all(getattr(ranvier, one.__name__) is one for one in sections)


def test_the_package_of_runs_is_the_function_that_trains() -> None:
    import ranvier.train.loop

    assert ranvier.train is sys.modules["ranvier.train"] and callable(ranvier.train)
    with pytest.raises(TypeError, match=r"train\(\) missing 3 required positional arguments"):
        ranvier.train()


def test_all_that_is_public_is_documented() -> None:
    """Each public name, and each method and property of a class without a leading underscore."""
    missing = []
    for name in ranvier.__all__:
        one = getattr(ranvier, name)
        members = {} if not isinstance(one, type) else {
            f".{member}": getattr(value, "__func__", value) for member, value in vars(one).items()
            if not member.startswith("_") and member not in getattr(one, "__dataclass_fields__", ()) and (
                callable(value) or isinstance(value, (property, classmethod)))}
        missing += [name + member for member, value in {"": one, **members}.items() if not value.__doc__]
    assert not missing
