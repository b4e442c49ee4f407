"""Classes that hold a run's state stay readable: few methods, and all attributes defined in one place."""

import ast

from tests.sources import ROOT, nodes

ROOMS = ("train", "elastic", "planner")
MOST_METHODS = 20
MOST_LINES_OF_THE_LOOP = 200


def methods(node):
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]


def attributes(function):
    """Attributes that a method sets on its first argument."""
    own = function.args.args[0].arg if function.args.args else None
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == own}


def known(node, classes):
    """Attributes that a class or one of its bases has from the start: set by `__init__`, or fields of a dataclass."""
    found = {name for base in node.bases if isinstance(base, ast.Name) and base.id in classes
             for name in known(classes[base.id], classes)}
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return found.union(*(attributes(each) for each in methods(node) if each.name == "__init__"))


def faults(inside):
    """Faults of the classes in a file."""
    classes = {node.name: node for node in inside if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        if (count := len(methods(node))) > MOST_METHODS:
            yield f"{name} has {count} methods"
        for each in methods(node):
            if late := attributes(each) - known(node, classes):
                yield f"{name}.{each.name} makes {', '.join(sorted(late))}"


def test_classes_have_few_methods_and_no_late_attributes():
    found = {str(path.relative_to(ROOT)): list(faults(inside)) for path, inside in nodes().items()
             if path.relative_to(ROOT).parts[0] in ROOMS}
    assert len(found) > 60 and {path: each for path, each in found.items() if each} == {}


def test_the_loop_is_short():
    assert len((ROOT / "train" / "loop.py").read_text().splitlines()) < MOST_LINES_OF_THE_LOOP


def test_what_a_fault_is():
    source = """
class Base:
    def __init__(self):
        self.one = 1

@dataclass
class Fields:
    two: int
    def change(self):
        self.two, self.three = 2, 3

class Derived(Base):
    def change(self):
        self.one += 1
        self.four: int = 4
        for self.five in []:
            pass
"""
    assert list(faults(ast.walk(ast.parse(source)))) == ["Fields.change makes three", "Derived.change makes five, four"]
    many = "class Large:" + "".join(f"\n    def m{number}(self): pass" for number in range(MOST_METHODS + 1))
    assert list(faults(ast.walk(ast.parse(many)))) == ["Large has 21 methods"]
