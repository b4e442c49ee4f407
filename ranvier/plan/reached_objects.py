"""Objects that the code of a block or of a loss reaches, in which a forward may leave a value that other code finds.

    class Aux(nn.Module):                             Head(blocks).blocks[0]        a module, in a list
        def forward(self, x):                         context                       an object, by a global variable
            self.aux = context.aux = x.mean()         lambda y, t: model[0].aux     a module, by a closure

The search follows attributes, hooks, elements of lists, tuples, dicts and sets, classes, closures and defaults of
functions and methods, and the global variables that they name. It does not follow Python's own objects, torch's and
Ranvier's, those of installed packages that do not use torch (pandas, matplotlib), elements of containers that hold data
(`object_contents`), and attributes of objects with `ranvier_per_stage = True`.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from queue import Queue
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor, nn

from ranvier.block import HOOKS
from ranvier.originals import object_contents as objects
from ranvier.originals.object_contents import attributes, constants, container, is_foreign, is_of_user, is_per_stage
from ranvier.originals.read_attributes import codes_in
from ranvier.plan.code_uses import ANY, Key, Uses, names_own, uses_of, with_values
from ranvier.plan.function_tree import BY_NAME, CHANGES

_HOLD_NOTHING = frozenset({type(None), bool, int, float, complex, str, bytes, nn.Parameter})
_KEYED = frozenset({list, dict, OrderedDict, defaultdict, Counter})
_WRAPPERS = (UserDict, UserList, ChainMap, Queue, WeakKeyDictionary, WeakValueDictionary)
"""Classes of Python that keep their elements in an inner container."""
_Cached = type(functools.lru_cache(len))
_NOT_IN_A_FORWARD = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__",
                               "__eq__", "__hash__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__",
                               "__setstate__", "__copy__", "__deepcopy__", "extra_repr"})
"""Methods that code of a block does not run on existing objects."""
_CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context", "vjp", "jvp"})


class Reached(NamedTuple):
    """Something that code may change: an object of a user's class, a list, dict, set, tensor or array, a class, a
    variable of a closure, the global variables of a module.

    name: how it is reached, "block.path.attribute[0]". is_part: whether it is the root or a registered submodule of it.
    """

    name: str
    value: Any
    is_part: bool


class PlaceName(NamedTuple):
    """The path to an object, its class, and its number among objects with the same path and class: `block.log` may be
    an attribute of the block and a global variable."""

    path: str
    kind: str
    number: int


class _Link(NamedTuple):
    """A step of the walk. name: of the attribute or variable; None if the value is reached whenever its holder is.
    method: its name in a class. bound: the class, if its first argument is the object. constructs: whether code that
    reaches a class by this step may make objects of it."""

    path: str
    value: Any
    name: str | None = None
    method: str | None = None
    bound: type | None = None
    constructs: bool = True


class CodeReach:
    """What the code of a stage reaches, and what it reads of that: `add` each block, then the loss. whole: the reach of
    more code, which may call methods by its names."""

    def __init__(self, whole: CodeReach | None = None) -> None:
        self.found: dict[int, Reached] = {}
        """By identity, each once; attributes of the blocks' own submodules come first."""
        self.per_stage: set[int] = set()
        """Identities of objects that the user has declared to be per stage (`is_per_stage`)."""
        self.uses = Uses()
        self.stored_on: set[str] = set()
        """Variables whose attributes code stores."""
        self._seen: dict[int, Any] = {}
        self._links: dict[int, set[tuple[int | None, str | None]]] = {}
        """Identity of a value -> its holders (None for a function) and its name there."""
        self._bound: set[int] = set()
        """Objects with bound methods."""
        self._functions: dict[int, tuple[Uses, type | None]] = {}
        """What each function reads and writes, and the class that it is a method of."""
        self._classes: dict[type, set[int]] = {}
        """Class -> methods whose own object is of this class."""
        self._names: set[str] = set() if whole is None else set(whole._names)
        """Names in code that may run."""
        self._unnamed: dict[str, list[_Link]] = {}
        """Methods that no code has named so far, by name."""
        self._constructed: set[type] = set()
        """Classes of which code may make objects."""

    @classmethod
    def from_roots(cls, roots: Iterable[tuple[str, object]], whole: CodeReach | None = None) -> CodeReach:
        """What blocks and a loss reach, each with its name."""
        reach = cls(whole)
        for name, root in roots:
            reach.add(name, root)
        return reach

    def add(self, name: str, root: object) -> None:
        """Add the code of `root`, a block or a loss, with its name."""
        num_known = len(self._functions)
        waiting = deque(self._behind_parts(name, root) if isinstance(root, nn.Module) else [_Link(name, root)])
        while waiting:
            link = waiting.popleft()
            if link.bound is not None:
                self._classes.setdefault(link.bound, set()).add(id(link.value))
            if link.constructs and isinstance(link.value, type) and link.value not in self._constructed:
                self._constructed.add(link.value)
                waiting.extend(_constructors_of(link.path, link.value))
            if type(link.value) in _HOLD_NOTHING or id(link.value) in self._seen:
                continue
            if link.method is None or self._may_run(link.method):
                waiting.extend(self._reach(link))
            else:
                self._unnamed.setdefault(link.method, []).append(link)
        if new := list(self._functions.values())[num_known:]:
            self.uses = Uses.union([self.uses, *(uses for uses, _ in new)])

    def _behind_parts(self, name: str, root: nn.Module) -> list[_Link]:
        """Reach all of a block's own modules first; return the links from them."""
        parts = list(root.named_modules(prefix=name))
        new = [(path, part) for path, part in parts if id(part) not in self._seen]
        self._seen |= {id(part): part for _, part in new}
        self.found |= {id(part): Reached(path, part, True) for path, part in parts
                       if (not is_foreign(type(part)) or _has_buffers(part)) and not is_per_stage(part)}
        return [link for path, part in new for link in self._find_links(path, part)]

    def _reach(self, link: _Link) -> Iterator[_Link]:
        """Reach a new value: yield links from it, and to methods that it names."""
        value = link.value
        self._seen[id(value)] = value
        if is_per_stage(value):
            self.per_stage.add(id(value))
        elif _may_change(value):
            self.found[id(value)] = Reached(link.path, value, False)
        if isinstance(value, FunctionType) and not is_foreign(value):
            code = value.__code__
            own = code.co_varnames[0] if link.bound is not None and code.co_argcount else None
            self._functions[id(value)] = uses_of(code, own), link.bound
            names = _names(code)
            self._names.update(names)
            self.stored_on |= _stored_on(code)
            yield from (one for name in names for one in self._unnamed.pop(name, ()))  # in the same order on all ranks
        elif isinstance(value, MethodType):
            self._bound.add(id(value.__self__))
            self._classes.setdefault(type(value.__self__), set()).add(id(value.__func__))
        yield from self._find_links(link.path, value)

    def contains(self, identity: int) -> bool:
        """Whether code reaches the object with this identity, including parameters."""
        return identity in self._seen or identity in self._links

    def places(self) -> dict[PlaceName, Any]:
        """The objects that were found, by unique names."""
        places, namesakes = dict[PlaceName, Any](), Counter[tuple[str, str]]()
        for one in self.found.values():
            both = one.name, type(one.value).__name__
            places[PlaceName(*both, namesakes[both])] = one.value
            namesakes[both] += 1
        return places

    def _may_run(self, method: str) -> bool:
        return method not in _NOT_IN_A_FORWARD and (
            method in self._names or method in _CALLED_BY_TORCH or method.startswith("__"))

    def _find_links(self, path: str, value: Any) -> Iterator[_Link]:
        holder = None if isinstance(value, FunctionType) else id(value)
        uses, _ = self._functions.get(id(value), (None, None))
        for link in _next(path, value):
            if uses is not None and link.name is not None and link.name not in uses.given:
                link = link._replace(constructs=False)
            self._links.setdefault(id(link.value), set()).add((holder, link.name))
            yield link

    def reads(self, value: Any) -> bool:
        """Whether code may read what is in a container, a tensor, an array or a variable of a closure, when another
        stage has left it there."""
        # a container of the user's own class may read its contents when it is changed
        return any(name is None or (is_inside and name in self.uses.called) or (
            self.uses.reads(name) if holder is None else bool(self.names_read(self._seen[holder], frozenset({name}))))
            for holder, name, is_inside in self._holders(value)) or (
            not is_foreign(type(value)) and not self.uses.stores.isdisjoint(self.names_of(value)))

    def names_read(self, value: Any, names: frozenset[str]) -> frozenset[str]:
        """The attributes of an object, or variables of a module, among `names` that code may read, and not only
        call."""
        if self.uses.reads_any:
            return names
        return names & (self.uses.others | self.own_names(value))

    def keys_read(self, value: Any) -> set[Key] | None:
        """Keys of the elements of a container that code may read, with values for attributes of methods' own objects;
        None if it may read any."""
        if type(value) not in _KEYED or self.uses.reads_any:
            return None
        found = set[Key]()
        for _, name, is_inside in self._holders(value):
            if name is None or is_inside or name in self.uses.whole:
                return None
            for key, kind in {(element.key, kind) for uses, kind in self._functions.values()
                              for element in uses.elements
                              if element.name == name}:
                found |= self._values_of(key, kind)
        is_from_end = any(key[0] == "is" and isinstance(key[1], int) and key[1] < 0 for key in found)
        return None if is_from_end and type(value) is list else found

    def _holders(self, value: Any) -> Iterator[tuple[int | None, str | None, bool]]:
        """Yield the attributes and variables through which code has a value: the object, None for a function; the name,
        None if a function has it without a name; and whether it is inside of something else there."""
        waiting, seen = deque([(id(value), False)]), {id(value)}
        while waiting:
            identity, is_inside = waiting.popleft()
            for holder, name in self._links.get(identity, ()):
                if holder is None or name is not None:
                    yield holder, name, is_inside
                elif holder not in seen and not _only_changes(self._seen.get(holder)):
                    seen.add(holder)
                    waiting.append((holder, is_inside or not isinstance(self._seen.get(holder), CellType)))

    def _values_of(self, key: Key, kind: type | None) -> set[Key]:
        if not names_own(key):
            return {with_values(key, {})}
        if kind is None or not issubclass(kind, nn.Module) or self.uses.stores_any:  # a forward may make others
            return {ANY}
        return {with_values(key, {name: constant
                                  for name, constant in constants(value).items() if name not in self.uses.stores})
                for value in list(self._seen.values()) if issubclass(type(value), kind) and self.is_own(value)}

    def own_names(self, value: Any) -> frozenset[str]:
        """Names that methods of its classes read of an object as their own. For a class, names read by objects of any
        class."""
        if isinstance(value, type):
            return self.uses.own
        return frozenset[str]().union(*(
            self._functions[method][0].own for kind in type(value).__mro__ for method in self._classes.get(kind, ())
            if method in self._functions
        )) if self.is_own(value) else frozenset()

    def names_of(self, value: Any) -> set[str]:
        """The names by which code refers to a container, a tensor, an array, or a variable of a closure."""
        return {name for _, name, _ in self._holders(value) if name is not None}

    def is_own(self, value: Any) -> bool:
        """Whether methods that code may call have the value as their own object. A module with trainable parameters is
        called only in its own block (`pipeline/trained_elsewhere`); its other methods may be called elsewhere."""
        if id(value) in self.found and self.found[id(value)].is_part:
            return True
        if not isinstance(value, nn.Module) or not any(parameter.requires_grad for parameter in value.parameters()):
            return True
        names = {name for base in type(value).__mro__ if not is_foreign(base) for name, method in vars(base).items()
                 if isinstance(method, FunctionType | property | cached_property)} - _NOT_IN_A_FORWARD - {"forward"}
        return id(value) in self._bound or self.uses.reads_any or not names.isdisjoint(
            self.uses.others | self.uses.called) or any(name.startswith("__") for name in names)


def reached_from(name: str, root: object) -> Iterator[Reached]:
    """What the code of `root` reaches, each object once."""
    yield from CodeReach.from_roots([(name, root)]).found.values()


def tensors_in(found: Iterable[Reached]) -> Iterator[tuple[str, Tensor]]:
    """Tensors among these, and buffers of modules, by name."""
    for name, value, _ in found:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{leaf}", buffer) for leaf, buffer in value._buffers.items() if buffer is not None)


def _may_change(value: object) -> bool:
    if isinstance(value, nn.Module) or is_of_user(value):
        return True
    if isinstance(value, type | ModuleType | FunctionType):
        return not is_foreign(value)
    return objects.is_whole(value) and not isinstance(value, tuple) and value is not random._inst  # Python's own


def _only_changes(value: object) -> bool:
    """Whether it is a method such as `append` of a list, whose caller reads nothing."""
    return isinstance(value, BuiltinMethodType) and value.__name__ in CHANGES


def _has_buffers(value: object) -> bool:
    """Whether it is a module with buffers that a forward may change, as torch's BatchNorm does."""
    return isinstance(value, nn.Module) and any(buffer is not None for buffer in value._buffers.values())


_BEHIND: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (_WRAPPERS, lambda value: [inside for inside in attributes(value).values() if container(inside) is not None]),
    (CellType | ContextVar, lambda value: [inside for _, inside in objects.contents(value)]),
    (partial, lambda value: (value.func, *value.args, *value.keywords.values())),
    (MethodType, lambda value: (value.__self__, value.__func__)),
    (BuiltinMethodType | MethodWrapperType, lambda value: (value.__self__,)),
    (_Cached, lambda value: (value.__wrapped__,)))
"""Kinds of objects that contain others without names."""


def _next(path: str, value: Any) -> Iterable[_Link]:
    """Links to the values that a value contains."""
    if is_per_stage(value):
        return [_Link(path, type(value), constructs=False)]
    if isinstance(value, nn.Module):
        return _module_links(path, value)
    if container(value) is not None:
        return _container_links(path, value)
    for kind, inside in _BEHIND:
        if isinstance(value, kind):
            return [_Link(path, one) for one in inside(value)]
    if isinstance(value, FunctionType):
        return _function_links(path, value)
    if isinstance(value, type):
        return _class_links(path, value)
    return _object_links(path, value) if is_of_user(value) else ()


def _module_links(path: str, module: nn.Module) -> Iterator[_Link]:
    own = attributes(module)
    if not is_foreign(type(module)):
        yield from (_Link(f"{path}.{name}", member, name) for name, member in own.items()
                    if name not in objects.OF_EVERY_MODULE)
        yield _Link(path, type(module), constructs=False)
    yield from (_Link(f"{path}.{name}", submodule, name) for name, submodule in own.get("_modules", {}).items())
    for hook in (hook for kind in HOOKS for hook in own.get(kind, {}).values()):
        yield _Link(f"{path}.{hook.__name__ if isinstance(hook, FunctionType) else 'hook'}", hook)


def _container_links(path: str, value: Any) -> Iterator[_Link]:
    inside = objects.elements_with_keys(value)
    if not _HOLD_NOTHING.issuperset(type(item) for _, item in inside):
        yield from (_Link(f"{path}[{key!r}]" if type(key) in (int, str) else f"{path}[{type(key).__name__}]", item)
                    for key, item in inside)
    if isinstance(value, defaultdict):
        yield _Link(path, value.default_factory)
    if is_of_user(value):
        yield from _object_links(path, value)


def _object_links(path: str, value: Any) -> Iterator[_Link]:
    yield from (_Link(f"{path}.{name}", attribute, name) for name, attribute in attributes(value).items())
    yield _Link(path, type(value), constructs=False)


def _function_links(path: str, function: FunctionType) -> Iterator[_Link]:
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if variable == "__class__":  # of super()
            yield from (_Link(path, content, constructs=False) for _, content in objects.contents(cell))
        else:
            yield _Link(f"{path}.{variable}", cell, variable)
    given = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from (_Link(f"{path}.default", one) for one in given)
    if is_foreign(function):
        return
    yield from (_Link(f"{path}.{name}", attribute, name) for name, attribute in vars(function).items())
    variables, names = function.__globals__, _names(code)
    module = sys.modules.get(variables.get("__name__", ""))
    if module is not None and vars(module) is variables:
        yield _Link(module.__name__, module)
    modules = dict[str, ModuleType]()
    for name in _variables(code, "IMPORT_NAME"):  # which the function imports itself
        for full in (name, f"{variables.get('__package__')}.{name}"):
            if isinstance(found := sys.modules.get(full), ModuleType) and not is_foreign(found):
                modules[full] = found
    for name in _variables(code, "_GLOBAL", "_NAME"):
        if name in variables:
            yield _Link(f"{path}.{name}", one := variables[name], name)
            if isinstance(one, ModuleType) and not is_foreign(one):
                modules[f"{path}.{name}"] = one
    for name, module in modules.items():
        yield _Link(name, module)
        yield from (_Link(f"{name}.{other}", vars(module)[other], other) for other in names if other in vars(module))


@lru_cache(maxsize=1 << 14)
def _variables(code: CodeType, *kinds: str) -> tuple[str, ...]:
    """Names of global variables, or modules, in operations of these kinds in a function."""
    return tuple(instruction.argval for each in codes_in(code) for instruction in dis.get_instructions(each)
                 if instruction.opname.endswith(kinds))


@lru_cache(maxsize=1 << 14)
def _names(code: CodeType) -> tuple[str, ...]:
    """Global variables and attributes that a function names, also as texts: getattr(log, "add")(x)."""
    names = [name for each in codes_in(code) for name in each.co_names]
    if not (BY_NAME | {"attrgetter", "methodcaller"}).isdisjoint(names):
        names += [text for each in codes_in(code) for text in each.co_consts
                  if isinstance(text, str) and text.isidentifier()]
    return tuple(names)


@lru_cache(maxsize=1 << 14)
def _stored_on(code: CodeType) -> frozenset[str]:
    """Variables whose attributes a function stores."""
    steps = [list(dis.get_instructions(each)) for each in codes_in(code)]
    return frozenset(before.argval for each in steps for before, at in pairwise(each)
                     if at.opname == "STORE_ATTR" and isinstance(before.argval, str))


def _class_links(path: str, kind: type) -> Iterator[_Link]:
    """Methods and attributes of a class, and what it inherits from."""
    if is_foreign(kind):
        return
    yield from (_Link(path, base, constructs=False) for base in kind.__bases__)
    for name, value in vars(kind).items():
        match value:
            case staticmethod() | classmethod():
                functions: tuple[Any, ...] = (value.__func__,)
            case property():
                functions = value.fget, value.fset, value.fdel
            case cached_property():
                functions = (value.func,)
            case _:
                functions = (value,)
        for function in functions:
            if isinstance(function, FunctionType | _Cached):
                yield _Link(path, function, None, name, None if isinstance(value, staticmethod | classmethod) else kind)
            elif not name.startswith("__"):
                yield _Link(f"{path}.{name}", function, name)


def _constructors_of(path: str, kind: type) -> Iterator[_Link]:
    """Links to what runs when code makes an object of a class. Generated methods, as of dataclasses, store only in the
    object.
    """
    of_kind: type = type(kind)
    of_objects = [(constructor, base) for base in kind.__mro__
                  for constructor in map(vars(base).get, ("__init__", "__post_init__"))]
    others = [getattr(vars(base).get("__new__"), "__func__", None) for base in kind.__mro__]
    others += [vars(base).get("__call__") for base in of_kind.__mro__]
    yield from (_Link(path, one, bound=base) for one, base in (*of_objects, *((one, None) for one in others))
                if isinstance(one, FunctionType) and one.__code__.co_filename != "<string>" and not is_foreign(one))
