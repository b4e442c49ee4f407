"""Forwards and losses under torch.autocast, as an engine's setting.

    parameters, gradients, optimizer states     fp32
    products                                    bfloat16, of operands that torch casts; results are sent in bfloat16
    norms, losses and what torch lists          fp32

Each microbatch's forward on a stage is inside one autocast, as a loop in plain PyTorch has it, so that a weight is cast
once a microbatch. Backward and update are outside. Recomputation runs a segment again under autocast, and a deferred
product multiplies the operands that autograd would have (`ranvier.tensor.deferred_linear`). Layers that rows and
columns split cast the operands of their products themselves, weights before they are gathered (`TensorMesh.autocast`).

Autocast around a call of the engine is refused: it would include backward and update, and torch would continue to use
casts of weights that the update has changed. Also refused are no_grad and inference_mode around a call that trains, in
which a plain loop fails at its backward; a cache of parametrizations, whose graph the first microbatch's backward
frees; and an accelerator as the default device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.utils import parametrize

from ranvier.errors import ConfigError


def check_autocast(autocast: torch.dtype | None, *, dtype: torch.dtype, float8: bool) -> None:
    """Raise ConfigError if an engine with these settings cannot compute under `autocast`."""
    if autocast is None:
        return
    where = "Engine(autocast=...)"
    if autocast is not torch.bfloat16:
        what = ("needs the loss scaling of dtype=torch.float16" if autocast is torch.float16
                else "is not a half-precision format")
        raise ConfigError(what, code="autocast-format", where=where, value=autocast,
                          remedy="Give torch.bfloat16, or dtype=torch.float16.")
    if dtype is not torch.float32:
        raise ConfigError("casts the operands of fp32 products, and parameters have another format",
                          code="autocast-with-dtype", where=where, value=dtype, remedy="Leave out dtype= or autocast=.")
    if float8:
        raise ConfigError("casts the operands of products, and so does float8", code="autocast-with-float8",
                          where=where, value=autocast, remedy="Leave out float8= or autocast=.")


def casting(autocast: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch casts to `autocast`, if it is set."""
    return nullcontext() if autocast is None else torch.autocast(device.type, autocast)


def refuse_default_device() -> None:
    """Raise ConfigError if tensors that name no device are made on an accelerator: what ranks exchange about batches
    and settings would be there, and the host would wait for it, or read it too early."""
    device = torch.get_default_device()
    if device.type not in ("cpu", "meta"):
        raise ConfigError("is the default device around a call of the engine, which keeps its own numbers on the host",
                          code="default-device-around-engine", where="torch.set_default_device", value=str(device),
                          remedy="Leave it out: the engine moves blocks and batches to its device. Blocks may be made "
                                 f"under `with torch.device({str(device)!r}):`, which ends before the engine is built.")


def refuse_outer_modes(device: torch.device, *, training: bool) -> None:
    """Raise ConfigError if the caller has enabled autocast or a default device, or, for a call that trains, has
    disabled gradients or enabled a cache of parametrizations."""
    refuse_default_device()
    if training and (torch.is_inference_mode_enabled() or not torch.is_grad_enabled()):
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise ConfigError("is active around a call that trains, and disables gradients", code="no-grad-around-engine",
                          where=f"{mode}()", value=True,
                          remedy="Call train_batch and forward_backward outside of it; evaluate and predict need no "
                                 "gradients, whatever is around them.")
    if training and parametrize._cache_enabled:
        raise ConfigError("is active around a call that trains, and each microbatch has its own backward, which frees "
                          "the graph of the cached tensors", code="parametrizations-cached-around-engine",
                          where="torch.nn.utils.parametrize.cached()", value=True,
                          remedy="Leave it out, or use it within a block's forward.")
    if torch.is_autocast_enabled(device.type):
        raise ConfigError("is active around a call of the engine, so it would also include backward and update",
                          code="autocast-around-engine", where=f"torch.autocast({device.type!r})",
                          value=torch.get_autocast_dtype(device.type),
                          remedy="Leave it out and give Engine(autocast=torch.bfloat16), or switch it on within a "
                                 "block's forward.")
