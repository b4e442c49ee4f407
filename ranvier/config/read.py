"""Reads a recipe and flags into one `Run`: every value with its origin, and all errors together.

Layers, in rising order: the fields' defaults, the recipe (shipped, a TOML file, or a Python function), flags. A value
from a TOML file must have the field's type; a flag is text, and is parsed as the field's type. An invalid value becomes
a problem and is replaced by that of the layer below, so that one error does not hide the next.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import shlex
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w
from pydantic import TypeAdapter

from ranvier.arguments import alternatives, describe, literal_values, without_bounds
from ranvier.config import aliases, named_code, presets
from ranvier.config.named_object import call_named
from ranvier.config.run import MeshSettings, Run
from ranvier.config.urls import has_user_information, without_user_information
from ranvier.errors import ConfigError
from ranvier.mesh import AXES, Mesh
from ranvier.system.atomic_file import write_atomically, write_problem
from ranvier.system.untrusted_file import is_unicode, json_object, parse_toml, read_bytes, read_toml

_MAX_INT = 1 << 62  # larger than any count or tensor size
MOST_BYTES = 1 << 18
"""Largest size of a recipe or a run.toml."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of the tree. `name` is dotted, with underscores: "batch.global_size"."""

    name: str
    annotation: Any
    default: object
    help: str

    @property
    def flag(self) -> str:
        """The name in flags and messages: "batch.global-size"."""
        return flag(self.name)

    @property
    def expected(self) -> str:
        """Description of valid values."""
        return describe(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether it is a switch: --NAME, --no-NAME, --NAME true or --NAME false."""
        return bool in map(without_bounds, alternatives(self.annotation))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Values by dotted name, and where they come from: "recipe gpt-tiny", "file mine.toml", "flag".

    is_users: whether a user has chosen the values; false for a shipped recipe and a run's own run.toml. code: whether
    values may name Python objects; flags may.
    """

    origin: str
    values: Mapping[str, object]
    problems: tuple[ConfigError, ...] = ()
    is_text: bool = False
    is_users: bool = True
    code: named_code.Permission = "never"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The run, the origins of its values, and the problems of refused values.

    chosen: the settings whose values a user has chosen.
    """

    run: Run
    origins: Mapping[str, str]
    problems: tuple[ConfigError, ...]
    chosen: frozenset[str] = frozenset()


def flag(name: str) -> str:
    """A setting's name in flags and messages, with hyphens."""
    return name.replace("_", "-")


@cache
def settings(tree: type = Run, prefix: str = "") -> Mapping[str, Setting]:
    """Every field of the tree by dotted name, in the order of the source."""
    found: dict[str, Setting] = {}
    hints, helps = get_type_hints(tree, include_extras=True), _docstrings(tree)
    for field in dataclasses.fields(tree):
        name = prefix + field.name
        section = _section(hints[field.name])
        if section is not None:
            found |= settings(section, name + ".")
        else:
            found[name] = Setting(name=name, annotation=hints[field.name], default=getattr(tree(), field.name),
                                  help=helps.get(field.name, ""))
    return types.MappingProxyType(found)


def sections() -> frozenset[str]:
    """Names of all sections: "mesh", "batch", ..."""
    return frozenset(name.rpartition(".")[0] for name in settings()) - {""}


def default_folder(recipe: str) -> Path:
    """runs/RECIPE-DATE-TIME for a recipe's name, file or function; a folder that does not exist yet."""
    name = re.sub("[^A-Za-z0-9_.-]+", "-", Path(recipe).stem if recipe.endswith(".toml") else recipe).strip("-")
    folder = first = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while folder.exists():
        folder, number = first.with_name(f"{first.name}-{number}"), number + 1
    return folder


_parsing = Lock()


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The parsed classes of a module. Finding the source of each class separately would parse the module each time,
    which takes a quarter of a second in every process of a run."""
    with _parsing:  # Python 3.11 counts the depth of all threads' trees together, and raises SystemError
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _docstrings(cls: type) -> dict[str, str]:
    """The text under each field of `cls`."""
    found: dict[str, str] = {}
    for field, text in pairwise(_classes(cls.__module__)[cls.__name__].body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(
                text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            found[field.target.id] = inspect.cleandoc(text.value.value).replace("\n", " ")
    return found


def merge(layers: Sequence[Layer]) -> Merged:
    """Apply `layers` to the defaults; later ones (flags) override earlier ones (the recipe). Never raises: errors are
    in `problems`."""
    values = {name: setting.default for name, setting in settings().items()}
    origins = dict.fromkeys(values, "default")
    problems: list[ConfigError] = []
    chosen: set[str] = set()
    places: dict[str, Layer] = {}
    for layer in (part for given in layers for part in _with_preset(_canonical(given))):
        problems += layer.problems
        before = dict(values)
        for name, value in layer.values.items():
            setting = settings().get(name)
            if setting is None:
                problems.append(_unknown_setting_error(name, value, layer.origin))
                continue
            try:
                values[name] = _read(setting, value, layer)
                origins[name], places[name] = layer.origin, layer
                chosen = chosen | {name} if layer.is_users else chosen - {name}
            except ConfigError as problem:
                problems.append(problem)
        for name, other in _overruled_settings(layer, before, values, chosen):
            if origins[other] != "default":
                values[other], origins[other] = settings()[other].default, f"{layer.origin} through {flag(name)}"
                chosen.discard(other)
    for name, layer in places.items():  # at the end: a flag may have replaced an object that a file names
        permission = "allowed" if layer.is_text else layer.code
        if (refused := named_code.problem(name, values[name], layer.origin, permission)) is not None:
            problems.append(refused)
            values[name], origins[name] = settings()[name].default, "default"
            chosen.discard(name)
    try:
        run = _build(Run, values)
    except ConfigError as problem:  # of values that are valid individually
        problems.append(problem)
        run = _build(Run, {**values, "mesh.tile": None})
    return Merged(run=run, origins=origins, problems=tuple(problems), chosen=frozenset(chosen))


def _canonical(layer: Layer) -> Layer:
    """The layer with the canonical name and spelling of each setting (`ranvier.config.aliases`)."""
    values: dict[str, object] = {}
    problems = list(layer.problems)
    for given, value in layer.values.items():
        name, spelled = aliases.canonical(given, value)
        if name != given and name in layer.values:
            problems.append(ConfigError(f"is another name of {flag(name)}, which is given as well, in {layer.origin}",
                                        code="setting-given-twice", where=flag(given), value=value,
                                        remedy=f"Leave out {flag(given)}."))
            continue
        values[name] = spelled
    return replace(layer, values=values, problems=tuple(problems))


def _with_preset(layer: Layer) -> tuple[Layer, ...]:
    """The layers of the preset that `layer` names, if any, and of `layer` itself."""
    name = layer.values.get("model.preset")
    if name in (None, "none"):
        return (layer,)
    try:
        values = presets.settings_of(name)
    except ConfigError as problem:
        rest = {other: value for other, value in layer.values.items() if other != "model.preset"}
        return (replace(layer, values=rest, problems=(*layer.problems, problem)),)
    return Layer(origin=f"preset {name}", values=values, is_users=False), layer


def _overruled_settings(layer: Layer, before: Mapping[str, object], values: Mapping[str, object],
                        chosen: Collection[str]) -> Iterator[tuple[str, str]]:
    """(setting, other): the value of a setting in `layer` overrides the value of the other in the layers below. Steps
    override epochs; a limit on one corpus or data set is not meant for another; pretrained weights have their own sizes
    instead of a recipe's; the stages, limits and threads in a run's own run.toml belong to its mesh, unless a user has
    chosen them."""
    for shape, resolved in _RESOLVED:
        reshaped = next((name for name in shape if name in layer.values and values[name] != before[name]), "")
        for other in resolved if reshaped else ():
            if other not in layer.values and other not in chosen:
                yield reshaped, other
    for name, other in (("train.steps", "train.epochs"), ("data.corpus", "data.max_bytes"),
                        ("data.train", "data.train_samples"), ("data.train", "data.eval_samples"),
                        ("data.eval", "data.eval_samples")):
        new = name == "train.steps" or values[name] != before[name]
        if name in layer.values and other not in layer.values and new:
            yield name, other
    pretrained = values["model.pretrained"]
    if pretrained is not None and pretrained != before["model.pretrained"] and "model.preset" not in layer.values:
        for other in ("model.preset", *(f"model.{size}" for size in presets.OF_WEIGHTS)):
            if other not in layer.values and before[other] != settings()[other].default:
                yield "model.pretrained", other


_RESOLVED = (
    (("mesh.pipe", "mesh.row", "mesh.col", "pipeline.stages_per_rank"),
     ("pipeline.boundaries", "pipeline.in_flight", "pipeline.deferred", "pipeline.defer_last")),
    (("mesh.data", "mesh.pipe", "mesh.row", "mesh.col"), ("launch.threads",)))
"""Settings, and the settings that were resolved for them."""


def _build(tree: type, values: Mapping[str, object], prefix: str = "") -> Any:
    hints = get_type_hints(tree, include_extras=True)
    made = tree(**{name: values[prefix + name] if (section := _section(hint)) is None else
                   _build(section, values, f"{prefix}{name}.") for name, hint in hints.items()})
    return made.with_sizes() if isinstance(made, MeshSettings) and not made.open_axes else made


def _section(hint: Any) -> type | None:
    """The dataclass whose fields are settings, if `hint` is one; of several (a section with and without auto), the
    first."""
    return next((option for option in alternatives(hint) if isinstance(option, type) and is_dataclass(option)), None)


def flatten(tree: Any, prefix: str = "") -> dict[str, object]:
    """A dataclass tree as values by dotted name."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if isinstance(value, Mesh):
            found |= {f"{prefix}{field.name}.{name}": part for name, part in value.document().items()
                      if name in (*AXES, "tile")}
        else:
            found |= flatten(value, f"{prefix}{field.name}.") if is_dataclass(value) else {prefix + field.name: value}
    return found


# --- reading one value -----------------------------------------------------------------------------------------------


def _read(setting: Setting, value: object, layer: Layer) -> object:
    """`value` converted to the setting's type. ConfigError when it is invalid."""
    adapter = _adapter(setting.name)
    if has_user_information(value):
        raise ConfigError("has user information in a URL, which would be in run.toml and on the console",
                          code="password-in-url", where=setting.flag, value=without_user_information(value),
                          remedy="Leave name, password or token out of it, and set the environment variables of the "
                                 "service, such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or HF_TOKEN.")
    try:
        if layer.is_text:
            read = adapter.validate_python(_from_text(setting.annotation, str(value)))
        else:
            # Strict validation of JSON accepts a list for a tuple and a string for a path, but no string for a number.
            read = adapter.validate_json(json.dumps(value, default=os.fspath), strict=True)
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"must be {setting.expected}", code="malformed-value", where=setting.flag, value=value,
                          remedy=_remedy(setting, layer.origin, value)) from None
    if isinstance(read, Path) and (read := Path(os.path.expanduser(read))).parts and read.parts[0][0] == "~":
        raise ConfigError("is in the home folder of a user who does not exist", code="unknown-home", where=setting.flag,
                          value=value, remedy=f"Correct --{setting.flag}: your own home folder is just ~.")
    if isinstance(read, Path) and (value == "" or not _can_be(read)):  # such as an unset variable of the shell
        raise ConfigError("cannot be a file name", code="invalid-file-name", where=setting.flag, value=value,
                          remedy=_remedy(setting, layer.origin, value))
    for part in read if isinstance(read, tuple) else (read,):
        if isinstance(part, (str, Path)) and not is_unicode(os.fspath(part)):
            raise ConfigError("cannot be written as text", code="value-not-text", where=setting.flag, value=value,
                              remedy=_remedy(setting, layer.origin, setting.default))
        bound = _MAX_INT if isinstance(part, int) else math.inf
        if isinstance(part, (int, float)) and not abs(part) < bound:  # NaN is not less than anything
            raise ConfigError("is too large for any setting", code="value-too-large", where=setting.flag,
                              value=value, remedy=_remedy(setting, layer.origin, value))
    return read


def _can_be(path: Path) -> bool:
    """Whether a file may have this name on current systems."""
    try:
        parts = [os.fsencode(part) for part in path.parts]
    except UnicodeEncodeError:
        return False
    return all(len(part) < 256 and b"\0" not in part for part in parts) and sum(map(len, parts)) < 4000


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(settings()[name].annotation)


def _from_text(annotation: Any, text: str) -> object:
    """A flag's text in the shape of its type: tuples are comma-separated (empty text is an empty tuple), "none" is
    None, booleans are true or false."""
    choices = alternatives(annotation)
    if types.NoneType in choices and text == "none":
        return None
    if any(get_origin(option) is Literal and text in get_args(option) for option in map(without_bounds, choices)):
        return text
    if any(get_origin(without_bounds(option)) is tuple for option in choices):
        return tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if bool in map(without_bounds, choices):
        return {"true": True, "false": False}.get(text, text)
    return text


def _remedy(setting: Setting, origin: str, value: object) -> str:
    near = difflib.get_close_matches(str(value).lower(), literal_values(setting.annotation), n=1)
    meant = _FORMATS_ELSEWHERE.get(str(value).lower()) if setting.name == "precision" else _number_of(setting, value)
    shown = meant or near[0] if meant or near else as_text(setting.default) or ",".join(
        literal_values(setting.annotation)[:1])
    if not shown:
        return f"Correct it, or leave out --{setting.flag}."
    place = "" if origin == "flag" else f"Change it in {origin}, or set"
    return f"{place or 'Set'} --{setting.flag} {shown}{'' if meant else ', for example'}."


_FORMATS_ELSEWHERE = types.MappingProxyType({
    **dict.fromkeys(("float16", "half", "16", "16-mixed"), "fp16"), **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("float32", "float", "32", "tf32"), "fp32"), **dict.fromkeys(("float64", "double", "64"), "fp64")})
"""Other programs' names of number formats."""
_UNITS = types.MappingProxyType({"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30})


def _number_of(setting: Setting, value: object) -> str | None:
    """The integer that a number with a unit stands for, such as 8M, or 4MiB for bytes; for times, such as 5min, in
    seconds. None if the setting takes no such number."""
    number = {int, float} & set(map(without_bounds, alternatives(setting.annotation)))
    found = re.fullmatch(r"(\d{1,9})\s*([A-Za-z]+)", str(value)) if number else None
    if found is None:
        return None
    unit = found[2]
    if setting.name.endswith("_seconds"):
        factor = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}.get(unit)
    else:  # m may be minutes
        factor = None if unit == "m" else _UNITS.get(
            unit.lower().removesuffix("b") if setting.name.endswith("_bytes") else unit.lower())
    try:
        _adapter(setting.name).validate_python(meant := int(found[1]) * (factor or 0))
    except ValueError:
        return None
    return str(meant) if factor else None


def as_text(value: object) -> str:
    """A value in the form of a flag."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)


def _unknown_setting_error(name: str, value: object, origin: str) -> ConfigError:
    name = name or '""'
    if isinstance(value, Mapping) and (near := difflib.get_close_matches(name, sections(), n=1)):
        return ConfigError(f"is not a section, in {origin}", code="unknown-section", where=name,
                           remedy=f"Did you mean [{near[0]}]?")
    if (elsewhere := name_elsewhere(name)) is not None:
        return ConfigError(f"is not a setting, in {origin}", code="unknown-setting", where=name, value=value,
                           remedy=f"Did you mean {elsewhere}?")
    names = {**{known: known for known in settings()}, **{known.rpartition(".")[2]: known for known in settings()}}
    near = difflib.get_close_matches(name.replace("-", "_"), names, n=1) or difflib.get_close_matches(
        name.replace("-", "_").rpartition(".")[2], names, n=1)
    remedy = f"Did you mean {names[near[0]]}?" if near else "`ranvier train --help-all` lists all settings."
    return ConfigError(f"is not a setting, in {origin}", code="unknown-setting", where=name, value=value, remedy=remedy)


@cache
def _elsewhere() -> Mapping[str, str]:
    """Names of settings in other programs -> ours."""
    names = parse_toml((resources.files("ranvier") / "config" / "names_elsewhere.toml").read_text(encoding="utf-8"))
    return {other: ours for ours, others in names.items() for other in others}


_RECIPES_ELSEWHERE = types.MappingProxyType({"nanogpt": "gpt-tiny", "nanochat": "gpt-tiny", "gpt2": "gpt2-small",
                                             "gpt-2": "gpt2-small", "llama": "llama-tiny", "bert": "bert-sentiment"})


def name_elsewhere(name: str) -> str | None:
    """Our setting for another program's name, or the last part of it: "train.lr", "batch-size"."""
    return _elsewhere().get(name.replace("-", "_").rpartition(".")[2])


# --- recipes ---------------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """The shipped recipes."""
    folder = resources.files("ranvier") / "config" / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(recipe: str, *, keep_folder: bool = False, allow_code: bool = False) -> tuple[str, Layer]:
    """A recipe's short name, for folders and headings, and its layer.

    `recipe` is the name of a shipped recipe or a preset, a folder in Hugging Face format, the folder of a run, which
    resumes, or of an import, from which a new run starts, a TOML file, or module:function, whose function takes no
    arguments and returns a `Run` or a dict like a TOML file's. keep_folder: a run's own run.toml means that run, and
    not a new one with its settings. allow_code: a TOML file may name Python objects.
    ConfigError when it is none of these or cannot be read.
    """
    if recipe in recipe_names():
        text = (resources.files("ranvier") / "config" / "recipes" / f"{recipe}.toml").read_bytes()
        return recipe, replace(_parse(text, f"recipe {recipe}"), is_users=False, code="allowed")
    if recipe in presets.PRESETS:
        return recipe, Layer(origin=f"preset {recipe}", is_users=False,
                             values={"model.preset": recipe, **presets.PRETRAINING})
    path = Path(recipe)
    if (path / "config.json").is_file():
        return path.absolute().name, Layer(origin=f"folder {recipe}", is_users=False,
                                           values={"model.pretrained": recipe, **presets.FINE_TUNING,
                                                   "model.sequence": _sequence_of(path)})
    if (path / "run.toml").is_file():
        layer = load(str(path / "run.toml"), keep_folder=True, allow_code=allow_code)[1]
        is_imported = "run_dir" not in layer.values  # its run.toml names no run folder
        start = {"resume": recipe} if is_imported else {"run_dir": recipe, "resume": "auto"}
        return path.absolute().name, replace(layer, is_users=False, values={**layer.values, **start})
    if (path / "adapter_config.json").is_file():
        raise ConfigError("is a folder of adapters, without the model that they belong to", code="recipe-is-adapters",
                          where="recipe", value=recipe,
                          remedy=f"Name the model's folder, and `--lora.adapters {shlex.quote(recipe)}`.")
    if path.suffix == ".toml":
        try:
            layer = _parse(read_bytes(path, MOST_BYTES), f"file {recipe}")
            is_own = _is_own(path, layer)  # named after its folder, which is not the folder of the new run
            values = {name: value for name, value in layer.values.items()
                      if keep_folder or not is_own or name != "run_dir"}
            return path.absolute().parent.name if is_own else path.stem, replace(
                layer, values=values, is_users=not is_own, code="allowed" if allow_code else "on request")
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", code="recipe-unreadable",
                              where="recipe", value=recipe,
                              remedy="Name a TOML file that exists and is readable.") from error
    if ":" in recipe:
        return recipe.partition(":")[2], _call(recipe)
    near = [_RECIPES_ELSEWHERE[recipe.lower()]] if recipe.lower() in _RECIPES_ELSEWHERE else difflib.get_close_matches(
        recipe, [*recipe_names(), *presets.PRESETS], n=1, cutoff=0.4)
    remedy = (f"{f'Did you mean {near[0]}? ' if near else ''}Recipes are: {', '.join(recipe_names())}; docs/models.md "
              "lists the presets.")
    if path.suffix == ".py":
        remedy = (f"Run a program of your own with `python {recipe}`. A function in it that returns a recipe is named "
                  f"{path.stem}:FUNCTION.")
    elif path.is_file() and (path.parent / "config.json").is_file():
        remedy = f"Name the folder of the model, {path.parent}."
    elif _may_be_model(path):
        remedy += (f" A model of the Hugging Face hub or a GGUF file is given to a recipe, with `--model.pretrained "
                   f"{recipe}`, or first converted, by `ranvier import {recipe} FOLDER`.")
    raise ConfigError("is neither a recipe, a preset, a run's folder, a folder with config.json, a .toml file nor "
                      "module:function", code="unknown-recipe", where="recipe", value=recipe, remedy=remedy)


def _may_be_model(path: Path) -> bool:
    """Whether this may name a model to fetch or convert: OWNER/NAME, without a folder OWNER, or a GGUF file."""
    return path.suffix.lower() == ".gguf" or (
        len(path.parts) == 2 and not path.is_absolute() and not path.parent.is_dir())


def _sequence_of(folder: Path) -> int:
    """The training sequence for a folder: a preset's, or fewer tokens if the folder has fewer positions."""
    document = json_object(folder / "config.json", MOST_BYTES)  # the reader of the sizes reports its problems
    positions = document.get("max_position_embeddings", document.get("n_positions"))
    return min(positions, presets.SEQUENCE) if type(positions) is int and positions > 0 else presets.SEQUENCE


def _is_own(path: Path, layer: Layer) -> bool:
    """Whether a file is a run's own run.toml."""
    folder = layer.values.get("run_dir")
    return isinstance(folder, str) and (Path(folder) / "run.toml").absolute() == path.absolute()


def _parse(text: bytes, origin: str) -> Layer:
    try:
        return from_dict(parse_toml(text.decode()), origin)
    except ValueError as error:
        raise ConfigError(f"is not valid TOML: {error}", code="recipe-not-toml", where=origin,
                          remedy="Correct the file.") from error


def from_dict(tree: Mapping[str, object], origin: str) -> Layer:
    """A nested mapping, like a TOML file's, as a layer."""
    values: dict[str, object] = {}
    problems: list[ConfigError] = []
    for key, value in tree.items():
        if key in sections() and isinstance(value, Mapping):
            values |= {f"{key}.{inner}": inner_value for inner, inner_value in value.items()}
        elif key in sections():
            problems.append(ConfigError("is a section, not a setting", code="section-as-setting", where=key,
                                        value=value, remedy=f"Write [{key}] and its settings below it in {origin}."))
        else:
            values[str(key)] = value
    return Layer(origin=origin, values=values, problems=tuple(problems))


def _call(recipe: str) -> Layer:
    made = call_named(recipe, "recipe", "recipe-function-raised")
    if isinstance(made, Run):
        defaults = {name: setting.default for name, setting in settings().items()}
        return Layer(origin=f"function {recipe}", code="allowed", values={
            name: value for name, value in flatten(made).items() if value != defaults[name]})
    if isinstance(made, Mapping):
        return replace(from_dict(made, f"function {recipe}"), code="allowed")
    raise ConfigError("must return a ranvier.Run or a dict", code="recipe-function-result", where="recipe",
                      value=type(made).__name__,
                      remedy=f"Change what {recipe} returns. Your own module is trained by your own program, "
                             "as in docs/own-model.md, or as a family (docs/extending.md).")


# --- run.toml --------------------------------------------------------------------------------------------------------


def document(run: Run, names: Collection[str] | None = None) -> dict[str, Any]:
    """Values of `run`, all or those of the named settings, in types of TOML and JSON, by section. Settings that are
    None are left out."""
    document: dict[str, Any] = {}
    for name, value in flatten(run).items():
        if names is not None and name not in names:
            continue
        section, _, key = name.rpartition(".")
        place = document.setdefault(section, {}) if section else document
        if value is not None:
            place[key] = os.fspath(value) if isinstance(value, Path) else value
    return document


def own_settings(run_dir: Path) -> Mapping[str, object]:
    """The settings in the run.toml of a folder, by dotted name; empty unless this user owns the file."""
    try:
        return from_dict(read_toml(run_dir / "run.toml", MOST_BYTES, own=True), "").values
    except (OSError, ValueError):
        return {}


def origin(run_dir: Path) -> str:
    """The checkpoint elsewhere from which the run of a folder started, by its run.toml; "none" if it started without
    one."""
    try:
        resumed_from = read_toml(run_dir / "run.toml", MOST_BYTES).get("resume")
    except (OSError, ValueError):
        return "none"
    return resumed_from if isinstance(resumed_from, str) and resumed_from else "none"


def check_out(path: Path) -> None:
    """ConfigError if no .toml file can be written to `path` of --out."""
    if (problem := write_problem(path)) is not None:
        raise ConfigError(f"cannot be written: {problem}", code="recipe-not-writable", where="--out", value=str(path),
                          remedy="Name a .toml file in a folder you own.")
    if path.suffix != ".toml":
        raise ConfigError("must end in .toml", code="recipe-not-named-toml",
                          where="--out", value=str(path), remedy=f"Name it {path.with_suffix('.toml')}.")


def write_changes(run: Run, path: Path, origins: Mapping[str, str]) -> None:
    """Write the mesh, the batch, the given settings of the data, and the values of `run` that differ from the defaults,
    as a recipe. origins: as of `Merged`. OSError if it cannot be written."""
    values = flatten(run)
    names = {name for name, setting in settings().items()
             if name.startswith(("mesh.", "batch.")) or values[name] != setting.default
             or (name.startswith("data.") and origins.get(name, "default") != "default")}
    read_back = flatten(merge([Layer(origin="", code="allowed", values={
        name: values[name] for name in names})]).run)
    names |= {name for name, value in values.items() if read_back[name] != value}  # a preset sets another value
    write_atomically(path, tomli_w.dumps(document(run, names)))


def write(run: Run, path: Path) -> None:
    """Write every value of `run` atomically, as a TOML file that is also a recipe. OSError if it cannot be written."""
    write_atomically(path, tomli_w.dumps(document(run)))
