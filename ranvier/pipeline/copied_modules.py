"""A user's modules on rows and columns, where the engine trains copies with this rank's part of each layer.

    model.eval()                                          copies follow their modes
    model[0].dropout.p = 0.2; model[0].register_forward_hook(f)
    model[0].weight.requires_grad_(False); model[0].weight.data.mul_(0.5)

Other changes have no effect on the copies: a warning names the first one. On other meshes the user's modules themselves
are trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from weakref import ref

import torch
from torch import Tensor, nn

from ranvier.block import HOOKS
from ranvier.originals.object_contents import OF_EVERY_MODULE
from ranvier.pipeline.held_parameters import BATCHES_BY_VALUE, changed_norms, with_norms
from ranvier.tensor.splittable import Splittable

LOSS = "loss"
"""The name of a loss that is a module."""
_GLOBAL_HOOKS = tuple(getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS)
_PLAIN = frozenset({type(None), bool, int, float, complex, str})


class CopiedModules:
    """Follows changes of the user's modules. modules: these, by block, and the loss. blocks: (number in the model,
    name, module) of this rank's copies. parameters: those of the copies, by name. part: (parameter name, full value) ->
    this rank's part.

    Modules are not kept in memory here: a program may drop its model."""

    def __init__(self, modules: Mapping[str, nn.Module], blocks: Iterable[tuple[int, str, nn.Module]],
                 parameters: Mapping[str, nn.Parameter], part: Callable[[str, Tensor], Tensor]) -> None:
        self._copies = {name: ref(module) for _, name, module in blocks if name in modules}
        self._modules = [(name, path, ref(submodule)) for name, module in modules.items()
                         if name in self._copies or name == LOSS for path, submodule in module.named_modules()]
        self._parameters, self._part = parameters, part
        self._batches, self._has_warned, self._has_warned_of_hooks = 0, False, False
        self._modes = self._modes_now()
        self._marks = self._marks_now()
        self._whole = {f"{block}.{name}": (ref(parameter), _version(parameter)) for block in self._copies
                       for name, parameter in modules[block].named_parameters() if f"{block}.{name}" in parameters}
        self._norms = with_norms(self._parameters_now().values())

    def _modes_now(self) -> list[bool | None]:
        return [None if (one := module()) is None else one.training for _, _, module in self._modules]

    def _marks_now(self) -> list[dict[str, object]]:
        return [{} if (one := module()) is None else _marks(one) for _, _, module in self._modules]

    def _parameters_now(self) -> dict[str, nn.Parameter]:
        return {name: held for name, (parameter, _) in self._whole.items() if (held := parameter()) is not None}

    def begin(self) -> None:
        """Begin a training batch: follow changes of modes, and warn of other changes."""
        if (modes := self._modes_now()) != self._modes:
            self._modes = modes
            self._follow_modes()
        if any(_GLOBAL_HOOKS) and not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            warnings.warn("a hook of all modules (torch.nn.modules.module.register_module_forward_hook) gets the "
                          "modules that replace a model's layers on rows and columns, which have other classes: one "
                          "that checks for nn.Linear has no effect. Register hooks on modules of engine.blocks",
                          stacklevel=6)
        if self._has_warned:
            return
        self._batches += 1
        if (what := self._find_change() or self._find_write()) is not None:
            self._has_warned = True
            warnings.warn(f"{what} was changed in the model after the engine was built, which trains copies of its "
                          "modules on rows and columns: the change has no effect. Change engine.blocks, and values in "
                          "engine.named_parameters(), on all ranks, or build a new engine", stacklevel=6)

    def _follow_modes(self) -> None:
        for (block, path, module), mode in zip(self._modules, self._modes, strict=True):  # parents first
            copied, original = self._copies[block]() if block in self._copies else None, module()
            one = None if copied is None else _submodule(copied, path)
            if one is not None and mode is not None:
                for part in one.modules() if isinstance(original, Splittable) else (one,):
                    part.training = mode

    def _find_change(self) -> str | None:
        """Name of an attribute, submodule, hook or parameter that was replaced, or was frozen or unfrozen."""
        for (block, path, module), known in zip(self._modules, self._marks, strict=True):
            if (one := module()) is None or (now := _marks(one)) == known:
                continue
            name = next(name for name in (*now, *known) if now.get(name, _Nothing) != known.get(name, _Nothing))
            return ".".join(filter(None, (block, path, name)))
        return None

    def _find_write(self) -> str | None:
        """Name of a parameter whose values differ from the engine's; values of `Engine.full_state_dict` are no
        change."""
        by_value = set(changed_norms(self._norms)) if self._batches <= BATCHES_BY_VALUE else set[Tensor]()
        for name, held in self._parameters_now().items():
            if (now := _version(held)) == self._whole[name][1] and held not in by_value:
                continue
            self._whole[name] = ref(held), now
            copied = self._parameters[name].detach()
            if held.numel() and not held.is_meta:
                part = self._part(name, held.detach())
                if part.shape == copied.shape and not torch.equal(part.to(copied), copied):
                    return name
        if by_value:
            self._norms = with_norms(self._parameters_now().values())
        return None


class _Nothing:
    """Stands for a missing value."""


def _marks(module: nn.Module) -> dict[str, object]:
    """Values that change with each change of a module, except those of its mode, and in-place changes of tensors."""
    own = vars(module)
    found: dict[str, object] = {name: value if type(value) in _PLAIN else id(value) for name, value in own.items()
                                if name not in OF_EVERY_MODULE}
    for kind in HOOKS:
        if hooks := [number for number, hook in own[kind].items() if not type(hook).__module__.startswith("ranvier.")]:
            found[kind.strip("_")] = hooks
    for name, member in (*own["_modules"].items(), *own["_buffers"].items()):
        found[name] = id(member)
    for name, parameter in own["_parameters"].items():
        found[name] = parameter is not None and (id(parameter), parameter.requires_grad,
                                                 len(parameter._backward_hooks or ()))
    return found


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split(".") if path else ():
        found = module._modules.get(name)
        if found is None:
            return None
        module = found
    return module
