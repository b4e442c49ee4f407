"""`--model.attention-kernel`: the kernel of scaled dot product attention that a run prefers on CUDA.

auto measures the forward and backward of each kernel that the device has, once at the start and on the run's own
shapes, and takes the kernel whose slowest rank is fastest. All ranks use the same kernel, so that replicas compute the
same. The other kernels stay enabled for attention that the preferred one cannot compute, such as a mask with flash.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ranvier.comm.protocol import Group
from ranvier.config.named_object import is_object_name
from ranvier.config.resolve import ResolvedRun
from ranvier.config.task_form import form_of
from ranvier.errors import ConfigError
from ranvier.models import families
from ranvier.precision import DTYPES
from ranvier.system.memory_tracker import forget_trials

Kernel = Literal["auto", "flash", "cudnn", "efficient", "math"]
KERNELS: Mapping[Kernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
_REPEATS = 5


def kernel_seconds(run: ResolvedRun, device: torch.device) -> dict[Kernel, float]:
    """Seconds of one forward and backward of attention, by kernel; kernels that cannot compute it are omitted.

    {} for a user's own model family, whose shapes are not known.
    """
    model = run.model
    if is_object_name(model.family) or is_object_name(run.data.task):
        return {}
    shape = (run.row_microbatch_size, max(1, model.heads // run.mesh.feature_parts), families.tokens_of(run),
             model.head_dim or model.hidden // model.heads)
    values = torch.linspace(-1, 1, math.prod(shape), device=device).to(DTYPES[run.precision])  # draws no random numbers
    q, k, v = (values.roll(number).view(shape).requires_grad_() for number in range(3))
    is_causal = form_of(run.data).writes_text
    found: dict[Kernel, float] = {}
    for name, backend in KERNELS.items():
        def step(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            torch.autograd.grad(y, (q, k, v), y.detach())

        try:
            found[name] = _seconds(step, device)
        except RuntimeError:  # no such kernel for this device, number format or width; or math has no room for scores
            continue
    return found


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    step()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _REPEATS


def choose_kernel(run: ResolvedRun, ranks: Group, device: torch.device) -> tuple[Kernel, str]:
    """The kernel that all ranks prefer, and a description of the choice. Collective.

    "auto" if there is nothing to choose: on a CPU, and for a user's own model. ConfigError if a rank does not have the
    requested kernel.
    """
    asked = run.model.attention_kernel
    own_seconds = kernel_seconds(run, device) if device.type == "cuda" else {}
    forget_trials(device)  # math's scores may have filled it
    everyone = ranks.gather_objects(own_seconds)
    if not all(everyone):
        return "auto", ""
    slowest = {name: max(seconds[name] for seconds in everyone)
               for name in KERNELS if all(name in seconds for seconds in everyone)}
    if asked != "auto" and asked not in slowest:
        rank = next(rank for rank, seconds in enumerate(everyone) if asked not in seconds)
        raise ConfigError(f"cannot compute this run's attention on the device of rank {rank}",
                          code="attention-kernel-not-usable", where="model.attention-kernel", value=asked,
                          remedy=f"Use auto, or one of {', '.join(slowest)}.")
    kernel = asked if asked != "auto" else min(slowest, key=lambda name: slowest[name])
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in sorted(
        slowest.items(), key=lambda pair: pair[1]))
    return kernel, f"{kernel} (forward and backward of a microbatch: {times})"


@contextmanager
def preferred_kernel(name: Kernel) -> Iterator[None]:
    """Context in which attention uses this kernel wherever the kernel can compute it; auto: as PyTorch chooses."""
    if name == "auto":
        yield
        return
    first = KERNELS[name]
    with sdpa_kernel([first, *(kernel for kernel in KERNELS.values() if kernel is not first)], set_priority=True):
        yield
