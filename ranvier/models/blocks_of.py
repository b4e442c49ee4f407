"""Any module as blocks, cut at the calls of named submodules.

    forward:  x = stem(x) -> x = layer1(x) -> x = layer2(x) -> fc(pool(x).flatten(1))      cut=["layer1", "layer2"]
    blocks:   "stem"         "layer1"         "layer2": layer2, pool, flatten, fc

The module's forward is traced with torch.fx, once in training and once in evaluation mode. Only code around the cuts is
traced; modules without a cut inside are called unchanged, with any control flow. Values that a later block uses are
carried: tensors by the name of their operation, other values as empty tensors that encode them as shape, device or
dtype, with their kind and structure in the name. Parameters and submodules stay the module's own, under its names.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from ranvier.arguments import check_arguments, fits
from ranvier.block import CONTAINERS, KEPT_IN_FP32, State, contents_besides_modules, keep_names
from ranvier.errors import ModelError
from ranvier.models.forward_trace import Trace, refuse_changes, trace_forward
from ranvier.models.from_transformers import transformer_blocks
from ranvier.originals.read_attributes import ReadAttributes
from ranvier.originals.stand_in_tensors import StandIns
from ranvier.sent_values import name_of, pack, unpack


def blocks_of(module: nn.Module, cut: Sequence[str] | Literal["auto"] = "auto", *, inputs: Sequence[str] | None = None,
              output: Callable[[Any], State] | None = None) -> dict[str, nn.Module]:
    """The blocks of a module whose forward calls submodules one after the other, with any operations and skip
    connections between them, in the form that `Engine` takes, for data and pipeline parallelism.

        engine = ranvier.Engine(ranvier.blocks_of(resnet, cut=["layer2", "layer3"]), world, loss=loss, optimizer=...)

    Parameters stay the module's own. A submodule without a cut inside is called unchanged. The code around the cuts is
    traced in both modes, and must not depend on values of tensors. `ranvier.testing.check_blocks` compares blocks with
    the module.

    Args:
        module: on one device. Blocks train in the modes that its modules are in.
        cut: names of submodules, as in `named_modules`; a block begins where each is called. A name may be a pattern:
            "transformer.h.*". By default every child with parameters, and those of lists and sequences; for a Hugging
            Face model its list of layers, as in `from_transformers`.
        inputs: names of forward's arguments that microbatches have; the others take their defaults. By default all
            arguments without a default. A microbatch's inputs are one tensor, or a dict with these names.
        output: extracts the carried state for the loss from the value that forward returns. By default a tensor, a
            dict of tensors, or the only tensor of a tuple.

    Raises a ModelError that names the line of code or the submodule for a module that cannot be cut.
    """
    check_arguments(blocks_of, locals(), but=("module", "cut", "inputs"))
    if not isinstance(module, nn.Module):
        raise ModelError("is not an nn.Module", code="cut-not-module", where="module", value=type(module).__name__,
                         remedy="Pass the module whose forward is to be cut.")
    if hasattr(module, "config") and hasattr(module, "main_input_name"):
        if cut != "auto" or inputs is not None:
            raise ModelError("is a Hugging Face model, which is cut at its own list of layers",
                             code="cut-hugging-face-model", where=type(module).__name__,
                             remedy="Leave cut and inputs out.")
        return transformer_blocks(module, output=output)
    names = _cuts(module, cut)
    arguments = _inputs(module, inputs)
    with refuse_changes(module):
        traces = {mode: trace_forward(module, names, arguments, output or carried_output, mode, strict=cut != "auto")
                  for mode in (True, False)}
    return _blocks(module, traces)


def carried_output(output: Any) -> Any:
    """The tensor, or dict of tensors, in a module's output; None values are left out."""
    if isinstance(output, dict):
        return {name: value for name, value in output.items() if value is not None}
    if type(output) in (tuple, list):
        kept = [value for value in output if value is not None]
        if len(kept) == 1:
            return kept[0]
        raise ModelError(f"returns {len(output)} values, and the loss takes one tensor or a dict of tensors",
                         code="forward-returns-several", where="forward",
                         remedy="Pass output=f, for example output=lambda found: found[0].")
    return output


# --- where to cut ----------------------------------------------------------------------------------------------------


def _cuts(module: nn.Module, cut: Sequence[str] | Literal["auto"]) -> list[str]:
    """Names of submodules."""
    if isinstance(cut, str) and cut == "auto":
        return list(_parts(module, ""))
    if not fits(cut, Sequence[str]):
        raise ModelError('must be a list of names of submodules, or "auto"', code="cut-form", where="cut", value=cut,
                         remedy=f'Pass cut=["{cut}"].' if isinstance(cut, str) else 'Pass cut=["layer2"], or no cut.')
    paths = [name for name, _ in module.named_modules() if name]
    aliases = {name: submodule for name, submodule in module.named_modules(remove_duplicate=False)}
    found: list[str] = []
    for pattern in cut:
        matching = [name for name in paths if name.count(".") == pattern.count(".")
                    and fnmatch.fnmatchcase(name, pattern)]
        if not matching and pattern in aliases and pattern:
            matching = [name for name in paths if module.get_submodule(name) is aliases[pattern]]
        if not matching:
            close = difflib.get_close_matches(pattern, paths, 3, 0.4)
            raise ModelError("is not the name of a submodule", code="cut-unknown-submodule", where="cut", value=pattern,
                             remedy=f"Name one of {', '.join(close or paths[:8])}.")
        for name in matching:
            one = module.get_submodule(name)
            if isinstance(one, CONTAINERS) and type(one).forward is nn.Module.forward:
                raise ModelError("is a list, which is never called", code="cut-at-list", where="cut", value=name,
                                 remedy=f'Name its elements: "{name}.*".')
        found += matching
    return list(dict.fromkeys(found))


def _parts(module: nn.Module, prefix: str) -> Iterator[str]:
    """Children with parameters; plain lists and sequences are replaced by their children."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not contents_besides_modules(child):
            yield from _parts(child, f"{path}.")
        elif any(True for _ in child.parameters()):
            yield path


def _inputs(module: nn.Module, inputs: Sequence[str] | None) -> list[str]:
    """Names of the arguments of forward that microbatches have."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, parameter in parameters.items()
             if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    needed = [name for name in named if parameters[name].default is inspect.Parameter.empty]
    where = f"forward of {type(module).__name__}"
    if inputs is None:
        if len(needed) == 0:
            wraps = [name for name, submodule in module.named_children()] if not named else []
            raise ModelError("has no argument without a default", code="forward-without-inputs", where=where,
                             remedy=f"Pass the module that it wraps, model.{wraps[0]}." if len(wraps) == 1 else
                             "Pass inputs= with the names of the arguments that microbatches have.")
        return needed
    if not fits(inputs, Sequence[str]):
        raise ModelError("must be a list of names", code="inputs-form", where="inputs", value=inputs,
                         remedy=f'Pass inputs=["{inputs}"].')
    for name in inputs:
        if name not in named and not takes_any:
            raise ModelError("is not an argument of forward", code="unknown-input", where="inputs", value=name,
                             remedy=f"It has {', '.join(named)}.")
    for name in needed:
        if name not in inputs:
            raise ModelError("needs an argument that is not among inputs", code="input-left-out", where=where,
                             value=name, remedy=f'Add "{name}" to inputs.')
    return list(inputs)


# --- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Computation of a block in one mode.

    run: (block, values of `takes`) -> values of `gives`, or the module's output. takes, gives: names of values. keeps:
    names of values that are passed on unchanged.
    """

    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    keeps: frozenset[str]


class _Block(nn.Module):
    """One block: submodules under their names in the whole module, and the traced code between them."""

    def __init__(self, name: str, inputs: Mapping[str, str], place: Literal["first", "between", "last", "only"]
                 ) -> None:
        """inputs: argument of the module's forward -> the name of its value: torch.fx renames arguments that are called
        like Python's builtins, such as `input`."""
        super().__init__()
        self._name, self._inputs, self._place = name, dict(inputs), place
        self._parts: dict[bool, _Part] = {}
        self._has_modes = False
        """Whether the traced code differs between training and evaluation."""
        self.stand_ins = StandIns()
        self.read_attributes = ReadAttributes()

    def follow_modules(self, module: nn.Module) -> None:
        """Make the block, and its replacements of the modules around its submodules, follow the modules' modes and
        tensors."""
        self.stands_for = type(module)
        self.stand_ins = StandIns((original, submodule) for path, submodule in self.named_modules()
                                  if (original := module.get_submodule(path)) is not submodule)
        self._around = [path for path, submodule in self.named_modules() if path
                        and submodule is not module.get_submodule(path)]

    def forward(self, state: State) -> State:
        if self._has_modes:
            self._check_modes()
        part = self._parts[self.training]
        if self._place in ("first", "only"):
            values = self._named_inputs(state)
            taken = [values[name] for name in part.takes]
            state = {name: value for name, value in values.items() if name in part.keeps}
        else:
            assert isinstance(state, dict), "the previous block returns a dict"
            taken = [unpack(name, state, self._name) for name in part.takes]
            state = {name: value for name, value in state.items() if name_of(name) in part.keeps}
        before = [] if torch.compiler.is_compiling() else [  # a run on shapes alone has checked this
            (name, value, value._version) for name, value in zip(part.takes, taken, strict=True)
            if isinstance(value, Tensor) and not value.is_inference()]
        try:
            given = part.run(self, *taken)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error) and self._place in ("between", "last"):
                raise self._in_place_error("its input") from error
            raise
        if self._place in ("last", "only"):
            result: State = given
            return result
        if self._place != "first":
            for name, value, version in before:
                if value._version != version:
                    raise self._in_place_error(name)
        for name, value in zip(part.gives, given, strict=True):
            state |= pack(name, value, [*taken, *given])
        return state

    def _check_modes(self) -> None:
        """Raise a ModelError for modules around that are in another mode than the traced code."""
        for path in self._around:
            if self.get_submodule(path).training != self.training:
                raise ModelError("is in another mode than the module around it, and code around the cuts depends on "
                                 "the mode", code="submodule-in-other-mode", where=f"submodule {path}",
                                 value=f"training={not self.training}",
                                 remedy="Put both in one mode, or cut so that the submodule is called as a whole.")

    def _in_place_error(self, what: str) -> ModelError:
        return ModelError(f"changes {what} in place, which the previous block may still use",
                          code="block-changes-input", where=f"block {self._name}",
                          remedy="Write the operation out of place (inplace=False, x = x + y), or cut after it.")

    def _named_inputs(self, state: State) -> dict[str, Tensor]:
        if isinstance(state, Tensor):
            if len(self._inputs) > 1:
                raise ModelError(f"takes {', '.join(self._inputs)}, and was given one tensor",
                                 code="block-given-one-tensor", where=f"block {self._name}",
                                 remedy="Give microbatches a dict with these names.")
            return dict.fromkeys(self._inputs.values(), state)
        for name in self._inputs:
            if name not in state:
                raise ModelError("is missing", code="input-missing", where=f"input {name} of block {self._name}",
                                 value=list(state), remedy=f"Give microbatches a dict with {', '.join(self._inputs)}.")
        return {value: state[name] for name, value in self._inputs.items()}


class _PartialModule(nn.Module):
    """Replaces a module with a cut inside: has the parts of it that a block needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.stands_for = type(module)
        for name in KEPT_IN_FP32:
            setattr(self, name, getattr(module, name, None))


def _blocks(module: nn.Module, traces: Mapping[bool, Trace]) -> dict[str, nn.Module]:
    """The blocks of both modes' traces."""
    starts = traces[True].starts
    if starts != traces[False].starts:
        raise ModelError("are called in a different order in evaluation than in training", code="cut-order-by-mode",
                         where="cut", value=traces[False].starts, remedy="Cut where both modes run.")
    inputs = {str(node.target): node.name for node in traces[True].graph.nodes if node.op == "placeholder"}
    has_modes = len({trace.graph.python_code("self").src for trace in traces.values()}) > 1
    blocks: dict[str, _Block] = {}
    for number, name in enumerate(starts):
        place: Any = "only" if len(starts) == 1 else "first" if number == 0 else \
            "last" if number == len(starts) - 1 else "between"
        block = blocks[name] = _Block(name, inputs, place)
        for mode, trace in traces.items():
            block._parts[mode] = _part(module, block, trace.graph, number, place in ("last", "only"))
        block._has_modes = has_modes
    placed = {id(tensor) for block in blocks.values() for tensor in (*block.parameters(), *block.buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in placed:  # unused by forward, but still part of the module's state
            _put(module, blocks[starts[-1]], name)
    read = ReadAttributes(traces[True].reads | traces[False].reads)
    for block in blocks.values():
        block.follow_modules(module)
        block.read_attributes = read
    keep_names(module, blocks.values())
    return dict(blocks)


def _part(module: nn.Module, block: nn.Module, graph: fx.Graph, number: int, is_last: bool) -> _Part:
    """Block `number` of a graph, whose modules and parameters are put into `block`."""
    def block_of(node: fx.Node) -> int:
        return -1 if node.op == "placeholder" else int(node.meta["block"])

    own = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    takes: list[str] = []
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    mine = [node for node in nodes if block_of(node) == number and node.op != "output"]
    output = next(node for node in nodes if node.op == "output")
    wanted = dict.fromkeys(source for node in [*mine, *([output] if is_last else [])]
                           for source in node.all_input_nodes)
    for node in wanted:
        if node.op != "get_attr" and block_of(node) < number:
            copies[node] = own.placeholder(node.name)
            takes.append(node.name)
    own_nodes = {*mine, *(node for node in wanted if node.op == "get_attr")}
    for node in graph.nodes:  # in order: a module's call may change its buffers
        if node in own_nodes:
            copies[node] = own.node_copy(node, copies.__getitem__)
    later = {source for node in nodes if block_of(node) > number or node is output for source in node.all_input_nodes
             if source.op != "get_attr"}
    gives = [node for node in mine if node in later]
    if is_last:
        own.output(fx.map_arg(output.args[0], copies.__getitem__))
    else:
        own.output(tuple(copies[node] for node in gives))
    compiled = fx.GraphModule(module, own)
    for node in own.nodes:
        if node.op in ("get_attr", "call_module"):
            _put(module, block, node.target)
    return _Part(run=type(compiled).forward, takes=tuple(takes), gives=tuple(node.name for node in gives),
                 keeps=frozenset(node.name for node in later if block_of(node) < number))


def _put(module: nn.Module, block: nn.Module, path: str) -> None:
    """Give `block` the submodule, parameter or tensor of `module` at `path`, under the same path."""
    *parents, name = path.split(".")
    source = module
    for parent in parents:
        source = getattr(source, parent)
        if parent not in block._modules:
            block.add_module(parent, _PartialModule(source))
        block = getattr(block, parent)
    if block is source:
        return  # inside a submodule that the block has
    value = getattr(source, name)
    if isinstance(value, nn.Module):
        block.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        block.register_parameter(name, value)
    elif name not in block._buffers:
        kept = name in source._buffers and name not in source._non_persistent_buffers_set
        block.register_buffer(name, value, persistent=kept)
