"""CUDA devices on a CPU, with which tests execute the code that runs on GPUs: tensors, streams, events and torch.cuda.

    with FakeCuda(devices=2) as cuda:
        x = torch.ones(3, device="cuda:1")          # host memory; x.is_cuda, x.device == cuda:1
        torch.cuda.synchronize()                    # BareCall: which device?

A tensor is on a device when an operation has put it there: `device=`, `to`, `cuda`, or an operand on the device. With
operands on different devices an operation raises as CUDA would, so a forgotten copy is noticed. Operations run
immediately: streams and events have no order to violate (`benchmarks.gpu.models.streams` models that). Checks:

    bare calls        torch.cuda's functions that would take the current device, called without one
    devices           operands on different devices; a device that this machine does not have
    host reads        `host_reads` counts operations that make the host wait for the device; they raise while
                      `torch.cuda.set_sync_debug_mode("error")` is set, as CUDA's do

Only threads that have entered the mode (`with cuda.thread():`) may create device tensors: another thread that allocates
device memory raises, as torch is built without CUDA here.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode

from ranvier.tensor.columns import plain

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::set_")
_HOST_INDEX = ("aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put")
_CPU_DEVICE, _CPU_TO, _CPU_NUMPY = Tensor.device, Tensor.to, Tensor.numpy
_TO_DLPACK, _FROM_DLPACK = dlpack.to_dlpack, dlpack.from_dlpack


_UNROUNDED = (torch.ops.aten.mm.dtype_out, torch.ops.aten.bmm.dtype_out)
"""Products of split layers, which widen operands on the CPU."""
_WIDE = (torch.ops.aten.mm.dtype, torch.ops.aten.addmm.dtype_out, *_UNROUNDED)
"""Products of half-precision operands with an fp32 result, which CUDA has and the CPU lacks."""


def _wide_product(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    *added, a, b, dtype = args
    if function in _UNROUNDED:
        return kwargs["out"].copy_(a.to(dtype) @ b.to(dtype))
    product = (a @ b).to(dtype)  # rounded as on the CPU, with which tests compare
    return kwargs["out"].copy_(added[0] + product) if added else product


class BareCall(AssertionError):
    """A function of torch.cuda was called without a device: it would take the thread's current one."""


class FakeStream:
    """Like `torch.cuda.Stream`, but its operations run immediately."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        if device is None:
            raise BareCall("torch.cuda.Stream() without a device")
        self.device = torch.device(device)
        self.calls: list[str] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.calls.append("wait_stream")

    def wait_event(self, event: FakeEvent) -> None:
        self.calls.append("wait_event")

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def query(self) -> bool:
        return True


class FakeEvent:
    """Like `torch.cuda.Event`, but reached as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timed, self.at = enable_timing, None

    def record(self, stream: FakeStream | None = None) -> None:
        if stream is None:
            raise BareCall("torch.cuda.Event.record() without a stream")
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self._timed and other._timed and self.at is not None and other.at is not None
        return (other.at - self.at) * 1e-6


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors in operands or results of operations, in a fraction of the time of torch's pytrees."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [leaf for each in tree for leaf in tensors_in(each)] if isinstance(tree, (tuple, list)) else []


class _Mode(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False avoids torch's wrapper of each operation, whose first call imports the compiler."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cuda.run(function, args, dict(kwargs or {}))


class FakeCuda:
    """The devices of this machine. name: the model of each device."""

    def __init__(self, devices: int = 2, name: str = "NVIDIA H200", memory_bytes: int = 1 << 34) -> None:
        self.count, self.name, self.memory_bytes = devices, name, memory_bytes
        self.host_reads: Counter[str] = Counter()
        self.pinned_bytes = 0
        self._sync_mode = "default"
        self.calls: Counter[tuple[str, int]] = Counter()
        """(function of torch.cuda, device) -> how often it was called."""
        self._places: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._local, self._lock = threading.local(), threading.RLock()
        self._live = self._peak = 0
        self._context = contextlib.ExitStack()

    # ------------------------------------------------------------------ tensors

    def place(self, tensor: Tensor) -> int | None:
        """The number of the tensor's device; None on the host."""
        tensor = plain(tensor)  # a ColumnTensor's storage is in its plain tensor
        if tensor.is_sparse or tensor.is_meta:
            return None
        return self._places.get(weakref.ref(tensor.untyped_storage()))

    def _put(self, tensor: Tensor, index: int, *, is_new: bool = True) -> None:
        if not 0 <= index < self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        storage = tensor.untyped_storage()
        with self._lock:
            if weakref.ref(storage) in self._places:
                return
            size = storage.nbytes() if is_new else 0
            self._live += size
            self._peak = max(self._peak, self._live)

            def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
                with self._lock:
                    self._places.pop(reference, None)
                    self._live -= size

            self._places[weakref.ref(storage, freed)] = index

    def shared(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor, as shared with another library."""
        made: Tensor = _FROM_DLPACK(_TO_DLPACK(tensor))
        index = self.place(tensor)
        if index is not None:
            self._put(made, index, is_new=False)
        return made

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of the dispatcher."""
        name = function._schema.name
        tensors = tensors_in((args, kwargs))
        places = [self.place(tensor) for tensor in tensors]
        known = {place for place in places if place is not None}
        target: int | None = next(iter(known), None)
        given = kwargs.get("device")
        if given is not None:
            device = torch.device(given)
            target = None
            if device.type == "cuda":
                target = self.current if device.index is None else device.index
                kwargs["device"] = torch.device("cpu")
            elif name == "aten::_to_copy" and self._is_autograds_cast():
                target = places[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            target = None
        self._check(name, tensors, places)
        if name == "aten::_local_scalar_dense" and known:
            self._host_read(name)
        if name in ("aten::copy_", "aten::_to_copy"):
            self._copied(name, args, kwargs, places, target)
        inputs = {id(tensor.untyped_storage()) for tensor in tensors if not tensor.is_sparse and not tensor.is_meta}
        result = _wide_product(function, args, kwargs) if function in _WIDE else function(*args, **kwargs)
        if target is not None:
            for leaf in tensors_in(result):
                if not leaf.is_meta and id(leaf.untyped_storage()) not in inputs:
                    self._put(leaf, target)
        return result

    def _is_autograds_cast(self) -> bool:
        """Whether autograd casts a gradient to the number format and the device that C++ sees, which is the host."""
        return torch._C._current_graph_task_id() != -1 and not getattr(self._local, "moves", False)

    def _check(self, name: str, tensors: list[Tensor], places: list[int | None]) -> None:
        mixed = {place for tensor, place in zip(tensors, places, strict=True) if tensor.dim() and not tensor.is_meta}
        if len(mixed) > 1 and name not in _COPIES and name not in _HOST_INDEX:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but they are on {mixed}")

    def _copied(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], places: list[int | None],
                target: int | None) -> None:
        non_blocking = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
        ends = places[:2] if name == "aten::copy_" else [target, places[0]]
        if len(set(ends)) == 2 and None in ends and not non_blocking:
            self._host_read(f"{name} {'to' if ends[0] is None else 'from'} host")

    def _host_read(self, name: str) -> None:
        self.host_reads[name] += 1
        if self._sync_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        if self._sync_mode == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {name}", stacklevel=2)

    def _set_sync_mode(self, mode: str) -> None:
        self._sync_mode = mode

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`; torch sees host memory everywhere, and would copy too often or not at all."""
        given, place = list(args), self.place(tensor)
        device = kwargs.pop("device", None)
        if device is None and given and isinstance(given[0], (str, int, torch.device)):
            device = given.pop(0)
        elif given and isinstance(given[0], Tensor):
            other = given.pop(0)
            device, kwargs["dtype"] = other.device, other.dtype
        if device is None:
            return _CPU_TO(tensor, *given, **kwargs)
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        wanted = None
        if device.type == "cuda":
            wanted = self.current if device.index is None else device.index
            device = torch.device("cuda", wanted)  # C++ would ask the driver for the current one
        if device.type != "meta" and wanted == place:
            return _CPU_TO(tensor, *given, **kwargs)
        if given:
            kwargs["dtype"] = given.pop(0)
        if given:
            kwargs["non_blocking"] = bool(given.pop(0))
        if given:
            kwargs["copy"] = bool(given.pop(0))
        kwargs["copy"] = True
        self._local.moves = True
        try:
            return _CPU_TO(tensor, device, **kwargs)
        finally:
            self._local.moves = False

    # ------------------------------------------------------------------ torch.cuda

    @property
    def current(self) -> int:
        return getattr(self._local, "device", 0)

    def _index(self, what: str, device: object) -> int:
        if device is None:
            raise BareCall(f"torch.cuda.{what}() without a device")
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None:
            raise BareCall(f"torch.cuda.{what}({device!r}) names no number")
        assert 0 <= index < self.count, f"invalid device ordinal {index}"
        self.calls[what, index] += 1
        return index

    def _set_device(self, device: object) -> None:
        self._local.device = self._index("set_device", device)

    def _stream_of(self, device: object = None) -> FakeStream:
        index = self._index("current_stream", device)
        streams = vars(self._local).setdefault("streams", {})
        if index not in streams:
            streams[index] = self.new_stream(torch.device("cuda", index))
        return streams[index]

    def new_stream(self, device: torch.device) -> FakeStream:
        """The stream of a thread on a device."""
        return FakeStream(device)

    @contextlib.contextmanager
    def _on_stream(self, stream: FakeStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        streams = vars(self._local).setdefault("streams", {})
        before, streams[stream.device.index] = streams.get(stream.device.index), stream
        try:
            yield
        finally:
            if before is None:
                streams.pop(stream.device.index)
            else:
                streams[stream.device.index] = before

    def _reset_peak(self, device: object = None) -> None:
        self._index("reset_peak_memory_stats", device)
        self._peak = self._live

    def _functions(self) -> dict[str, Any]:
        def of(name: str, value: Any) -> Any:
            def function(device: object = None) -> Any:
                index = self._index(name, device)
                return value(index) if callable(value) else value
            return function

        properties = SimpleNamespace(name=self.name, total_memory=self.memory_bytes, major=9, minor=0,
                                     multi_processor_count=132)
        return {
            "is_available": lambda: self.count > 0, "device_count": lambda: self.count, "is_initialized": lambda: True,
            "_lazy_init": lambda: None, "current_device": lambda: self.current, "set_device": self._set_device,
            "synchronize": of("synchronize", None), "current_stream": self._stream_of,
            "is_current_stream_capturing": lambda: False,
            "default_stream": self._stream_of, "Stream": FakeStream, "Event": FakeEvent, "stream": self._on_stream,
            "mem_get_info": of("mem_get_info", lambda index: (self.memory_bytes - self._live, self.memory_bytes)),
            "memory_allocated": of("memory_allocated", lambda index: self._live),
            "max_memory_allocated": of("max_memory_allocated", lambda index: self._peak),
            "memory_reserved": of("memory_reserved", lambda index: self._live),
            "max_memory_reserved": of("max_memory_reserved", lambda index: self._peak),
            "memory_stats": of("memory_stats", lambda index: {
                "allocated_bytes.all.peak": self._peak, "reserved_bytes.all.peak": self._peak}),
            "reset_peak_memory_stats": self._reset_peak, "empty_cache": lambda: None,
            "host_memory_stats": lambda: {"allocated_bytes.peak": self.pinned_bytes},
            "get_device_name": of("get_device_name", self.name),
            "get_device_properties": of("get_device_properties", lambda index: SimpleNamespace(
                **vars(properties), uuid=f"GPU-{index}")),
            "get_device_capability": of("get_device_capability", (9, 0)),
            "get_rng_state": of("get_rng_state", lambda index: torch.zeros(16, dtype=torch.uint8)),
            "set_rng_state": lambda state, device=None: self._index("set_rng_state", device),
            "set_sync_debug_mode": self._set_sync_mode,
        }

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """Let this thread create tensors on the devices."""
        with _Mode(self):
            yield

    def __enter__(self) -> FakeCuda:
        def device_of(tensor: Tensor) -> torch.device:
            index = self.place(tensor)
            return _CPU_DEVICE.__get__(tensor) if index is None else torch.device("cuda", index)

        def numpy(tensor: Tensor, *, force: bool = False) -> Any:
            if self.place(tensor) is not None and not force:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return _CPU_NUMPY(tensor, force=force)

        group = torch.optim.Optimizer._group_tensors_by_device_and_dtype

        def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
            """torch's fused optimizers group tensors by the device that C++ sees."""
            return {(groups[0][0].device, dtype): (groups, indices)
                    for (_, dtype), (groups, indices) in group(lists, *args, **kwargs).items()}

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Tensor, "numpy", numpy, create=True))
            stack.enter_context(mock.patch.object(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype",
                                                  staticmethod(grouped)))
            for name, function in self._functions().items():
                stack.enter_context(mock.patch.object(torch.cuda, name, function, create=True))
            for user in ("ranvier.pipeline.parts", "ranvier.tensor.keyed_dropout", "ranvier.tensor.split.loss"):
                # no compiler for these devices, even if torch is built for CUDA and has one
                stack.enter_context(mock.patch(f"{user}.has_triton", lambda: False))
            stack.enter_context(mock.patch.object(torch.cuda, "default_generators", tuple(
                torch.Generator() for _ in range(self.count))))
            stack.enter_context(mock.patch.object(dlpack, "to_dlpack", lambda tensor: tensor))
            stack.enter_context(mock.patch.object(dlpack, "from_dlpack", self.shared))
            stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 28, 9)))
            # What Python code asks of tensors; operations themselves use host memory.
            stack.enter_context(mock.patch.object(Tensor, "device", property(device_of), create=True))
            stack.enter_context(mock.patch.object(Tensor, "is_cuda", property(
                lambda tensor: self.place(tensor) is not None), create=True))
            stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None, create=True))
            stack.enter_context(mock.patch.object(
                Tensor, "to", lambda tensor, *args, **kwargs: self._to(tensor, *args, **kwargs), create=True))
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor.clone(), create=True))
            stack.enter_context(mock.patch.object(Tensor, "cpu", lambda tensor: tensor.to("cpu"), create=True))
            stack.enter_context(mock.patch.object(Tensor, "cuda", lambda tensor, device: tensor.to(device),
                                                  create=True))
            stack.enter_context(self.thread())
            self._context = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
