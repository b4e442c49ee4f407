"""A cluster: devices, nodes, and the links between them; and the time that each takes for its work.

    node     devices that share a host and its memory, and a network link out of the node (one for all of them)
    device   computes at a share of its peak, moves bytes to and from its own memory, and starts an operation
    link     seconds of a message = latency + bytes / bandwidth, for each direction separately

A kernel takes the longer of its computing time and its transfer time (the roofline), plus its launches. So large
products come near the peak, thin ones are bound by their weights' bytes, and tiny ones by the number of kernels; every
constant has a physical meaning and can be measured (`ranvier doctor --measure`). On a device with several
multiprocessors a product is computed in tiles, one on each multiprocessor at a time: the last wave takes as long as a
full one (wave quantization), and starting a tile has a cost, which matters if its sums are short. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from ranvier.cost.kernels import Kernel, map_distinct, whole_waves_flops

_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Precision = Literal["fp16", "bf16", "fp32", "fp64"]
Format = Literal["fp16", "bf16", "fp32", "fp64", "fp8"]


def _no_bool(value: object) -> object:
    if isinstance(value, bool):  # which Python treats as 0 or 1
        raise ValueError("should be a number")
    return value


_Number = BeforeValidator(_no_bool)
# No real value is outside these bounds, and no value inside them gives a time that is 0, infinite or NaN.
Count = Annotated[int, Ge(1), Le(10**18), _Number]
Size = Annotated[float, Ge(1), Le(1e24), _Number]
Share = Annotated[float, Ge(1e-6), Le(1), _Number]
Seconds = Annotated[float, Ge(0), Le(1e6), _Number]
Watts = Annotated[float, Ge(0.001), Le(1e9), _Number]
Dollars = Annotated[float, Ge(0), Le(1e9), _Number]
Cores = Annotated[float, Ge(0.01), Le(1e9), _Number]


@dataclass(frozen=True, kw_only=True, config=_config)
class Link:
    """A link between two places, with equal rates in both directions at the same time."""

    bandwidth: Size
    """Nominal bytes per second, one way."""
    share: Share = 1.0
    """Part of the bandwidth that long messages reach."""
    latency_seconds: Seconds = 0.0
    """Seconds of a message of no bytes."""
    single: Size | None = None
    """Largest bytes per second of one long message, if that is less than the link's, for example through the host's
    memory."""

    def rate(self, together: float = 1.0) -> float:
        """Bytes per second of each of `together` simultaneous long messages."""
        each = self.bandwidth * self.share / max(1.0, together)
        return each if self.single is None else min(each, self.single)

    def seconds(self, size: float, together: float = 1.0) -> float:
        """Seconds of one message of `size` bytes, if `together` of them share the link."""
        return self.latency_seconds + size / self.rate(together)


@dataclass(frozen=True, kw_only=True, config=_config)
class Rate:
    """Compute rates of a device in one number format."""

    peak_flops: Size
    """Nominal floating-point operations per second (dense)."""
    share: Share = 0.7
    """Efficiency of large products whose tiles fill all waves: achieved FLOP/s over the peak."""
    attention_share: Share | None = None
    """The same for attention's forward without scores in memory (flash); none: as for products."""
    attention_backward_share: Share | None = None
    """The same for its backward, with 2.5 times the operations; none: as in the forward."""

    def attention(self, *, backward: bool) -> float:
        """FLOP/s of attention."""
        forward = self.attention_share or self.share
        return self.peak_flops * (self.attention_backward_share or forward if backward else forward)


@dataclass(frozen=True, kw_only=True, config=_config)
class Device:
    """The device of one rank."""

    name: str
    memory_bytes: Count
    rates: dict[Format, Rate]
    """Rates by number format; fp8 is that of products of linear layers in float8."""
    memory_bandwidth: Size
    """Nominal bytes per second between the device and its own memory."""
    memory_share: Share = 0.8
    """Part of the memory bandwidth that operations on large tensors reach."""
    reduction_share: Share | None = None
    """Part of it that norms and sums over a dim reach; none: memory_share."""
    update_bandwidth: Size | None = None
    """Bytes per second that the optimizer reaches; none: memory_bandwidth x memory_share."""
    operation_seconds: Seconds = 5e-6
    """Seconds between two kernels: of a launch on a GPU (`Kernel.launches`), of an operation on a CPU. The host is
    ahead of the device, so its own time does not count."""
    multiprocessors: Count | None = None
    """Number of tiles of a product that are computed at the same time; none if products are not computed in waves of
    tiles."""
    tile: Count = 128
    """Rows, and columns, of a tile."""
    tile_start: Annotated[float, Ge(0), Le(1e6), _Number] = 0.0
    """Cost of starting a tile, in elements of its sums: a tile of a product [m, k] [k, n] takes time in proportion to
    k + tile_start."""
    message_multiprocessors: Annotated[int, Ge(0), Le(10**6), _Number] = 0
    """Number of multiprocessors that copy a collective's messages instead of computing."""
    reserved_bytes: Annotated[int, Ge(0), Le(10**18), _Number] = 0
    """Device memory taken by driver, context and libraries. Memory that the allocator holds beyond tensors is counted
    separately (`device_overhead.usable_bytes`)."""
    cores: Cores | None = None
    """Number of cores that the ranks of one node share, if the device is a CPU. A rank computes with one core per
    thread; `rates` and `memory_bandwidth` are those of one core. None if each rank has its own device."""

    watts: Watts | None = None
    """Nominal power under load (thermal design power), without the rest of its node; for kilowatt hours."""
    crowded_share: Share = 1.0
    """Part of the cores' rates that is left if more ranks than cores share them, and take turns."""
    turn_seconds: Seconds = 0.0
    """Extra seconds of a collective of the tensor mesh on shared cores: it waits for members that are not running."""

    @property
    def message_share(self) -> float:
        """Part of the device's compute rate that is lost while messages of a collective are sent."""
        return min(1.0, self.message_multiprocessors / self.multiprocessors) if self.multiprocessors else 0.0

    def kernel_seconds(self, kernel: Kernel, precision: Precision, threads: float = 1.0) -> float:
        """Seconds of one kernel. threads: cores that a rank computes with."""
        rate = self.rates[precision]
        share = self.reduction_share or self.memory_share if kernel.is_reduction else self.memory_share
        moving = kernel.moved_bytes / (self.memory_bandwidth * share * threads)
        match kernel.kind:
            case "product":
                if kernel.float8:
                    rate = self.rates.get("fp8", rate)
                flops = kernel.flops if self.multiprocessors is None else whole_waves_flops(
                    kernel.shape, self.multiprocessors, self.tile, self.tile_start)
                computing = flops / (rate.peak_flops * rate.share * threads)
            case "attention":
                computing = kernel.flops / (rate.attention(backward=kernel.is_backward) * threads)
                if kernel.is_backward and self.multiprocessors is not None:
                    computing += self.attention_backward_overhead_seconds(kernel.writes[0].bytes)
            case _:
                computing = 0.0
        launches = 1 if self.multiprocessors is None else kernel.launches
        return max(computing, moving) + launches * self.operation_seconds

    def attention_backward_overhead_seconds(self, query_bytes: float) -> float:
        """Seconds of the two passes of flash attention's backward besides its products (Dao, 2023): sums of dY y, and
        the cast of the gradient of the queries, which is accumulated in fp32."""
        return (2 / (self.reduction_share or self.memory_share) + 3 / self.memory_share
                ) * query_bytes / self.memory_bandwidth

    def seconds(self, kernels: Sequence[Kernel], precision: Precision, threads: float = 1.0) -> float:
        """Seconds of these kernels, one after the other."""
        return sum(map_distinct(kernels, lambda kernel: self.kernel_seconds(kernel, precision, threads)))

    def update_seconds(self, moved_bytes: float) -> float:
        """Seconds of an optimizer update, which does little but move bytes."""
        return moved_bytes / (self.update_bandwidth or self.memory_bandwidth * self.memory_share)


@dataclass(frozen=True, kw_only=True, config=_config)
class Host:
    """The host of a node, for all its devices together."""

    memory_bytes: Count
    memory_bandwidth: Size = 100e9
    """Bytes per second, for an optimizer that runs on the host."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Cluster:
    """A set of identical nodes."""

    name: str
    nodes: Count
    devices_per_node: Count
    device: Device
    host: Host
    inside: Link
    """Between two devices of a node; each pair has its own link."""
    between: Link
    """Between nodes: the link out of and into one node, shared by all its devices."""
    host_link: Link
    """Between a device and its host's memory."""
    collective_seconds: Seconds = 0.0
    """Seconds for starting a collective on all members, in addition to its messages."""
    chunk_seconds: Seconds = 0.0
    """Seconds for a chunk of gradients in addition to its all-reduce: the host prepares it and queues its updates."""
    price_per_hour: Dollars | None = None
    """Dollars per device and hour, with its share of the node; none: unknown, as in the shipped files."""
    source: str = ""
    """Source of the figures."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node
