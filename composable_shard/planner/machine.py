"""A machine for the planner: how fast a device computes and copies, and how fast its links are. Frozen data.

All values are *sustained* rates, which programs reach, not those of data sheets. `measure-links` writes measured values
as JSON. `KNOWN` contains values of data sheets, multiplied by the fraction that is reached.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ShardConfigTypeError, ShardConfigValueError

JSON_VERSION = 1
_GB = 10**9
_GIB = 2**30


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Attributes:
        bandwidth: bytes per second that a rank sends while it receives the same amount.
        latency: seconds of a collective without data.
    """

    bandwidth: float
    latency: float = 2e-5

    def __post_init__(self) -> None:
        _require("Link.bandwidth", self.bandwidth, above=0)
        _require("Link.latency", self.latency)


@dataclass(frozen=True)
class Machine:
    """A type of device, and the links between the devices.

    Attributes:
        name: name of the machine.
        memory: bytes of device memory that tensors can use.
        flops: operations per second of matrix products, by dtype ("float32", "bfloat16", "float16", "float8", "mxfp8").
            Formats of linear layers that the device does not support are missing.
        memory_bandwidth: bytes per second that a device reads and writes in its memory.
        launch: seconds that the host needs to launch one operator of an eager step.
        intra_node: the link between devices of a node.
        inter_node: the link of a device to devices of other nodes.
        devices_per_node: number of devices that share the intra-node link.
        host_link: the link between a device and host memory.
        host_memory_bandwidth: bytes per second that the processors of a host read and write for one device. It limits
            optimizer steps on offloaded parameters.
        host_memory: bytes of host memory per device; None if unknown, and then assumed to be sufficient.
        disk_bandwidth: bytes per second that a disk of the host reads and writes in total, for one device.
        backend: the backend of process groups, which determines how parameters are sent: "nccl", "gloo", or "fake",
            whose collectives do nothing.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    launch: float
    intra_node: Link
    inter_node: Link
    devices_per_node: int = 8
    host_link: Link = field(default_factory=lambda: Link(25 * _GB, 1e-5))
    host_memory_bandwidth: float = 20.0 * _GB
    host_memory: int | None = None
    disk_bandwidth: float = 2.0 * _GB
    backend: str = "nccl"

    def __post_init__(self) -> None:
        for name in ("memory", "memory_bandwidth", "devices_per_node", "host_memory_bandwidth", "disk_bandwidth"):
            _require(f"Machine.{name}", getattr(self, name), above=0)
        if self.host_memory is not None:
            _require("Machine.host_memory", self.host_memory, above=0)
        _require("Machine.launch", self.launch)
        if self.backend not in ("nccl", "gloo", "fake"):
            raise ShardConfigValueError(f"Machine.backend={self.backend!r}: expected 'nccl', 'gloo' or 'fake'")
        if "float32" not in self.flops:
            raise ShardConfigValueError("Machine.flops: 'float32' is missing; give its operations per second")
        for dtype, flops in self.flops.items():
            _require(f"Machine.flops[{dtype!r}]", flops, above=0)

    @property
    def streams(self) -> bool:
        """Whether streams wait for communication instead of the host, as on an accelerator."""
        return self.backend == "nccl"

    def flops_of(self, dtype: str) -> float:
        """Operations per second in a dtype. An unknown dtype gets the value of float32."""
        return self.flops.get(dtype, self.flops["float32"])

    def to_json(self) -> str:
        """The machine as JSON, for `from_json`."""
        content = {"machine": JSON_VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read a machine that `to_json` wrote.

        Raises:
            ShardConfigValueError: the text is not a machine, has another version, or has other fields.
        """
        try:
            content = json.loads(text)
            if content.pop("machine") != JSON_VERSION:
                raise ValueError(f"this library reads version {JSON_VERSION}")
            links: dict[str, Any] = {
                name: Link(**content.pop(name)) for name in ("intra_node", "inter_node", "host_link")
            }
            return cls(**content, **links)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ShardConfigValueError(
                f"this is not a machine that `composable-shard measure-links --json FILE` wrote: {error}"
            ) from None


def _require(name: str, value: Any, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ShardConfigTypeError(f"{name}: {value!r} is not a number")
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise ShardConfigValueError(f"{name}={value!r}: expected a finite number{' above 0' if above == 0 else ''}")


# Fraction of the data sheet's value that is reached: by well-sized operators (matrix products, memory) and by large
# collectives (links). https://github.com/stas00/ml-engineering (compute/accelerator/benchmarks) lists measurements.
_REACHED_FLOPS, _REACHED_MEMORY, _REACHED_LINK = 0.60, 0.85, 0.80


def _accelerator(
    name: str,
    memory: float,
    bfloat16: float,
    float32: float,
    bandwidth: float,
    link: float,
    outside: float,
    **formats: float,
) -> Machine:
    """Make a machine from data sheet values: GiB, dense TFLOP/s, TB/s, and GB/s per direction of both links.

    `formats` are the dense TFLOP/s of formats in 8 bits.
    """
    flops = {"bfloat16": bfloat16, "float16": bfloat16, "float32": float32, **formats}
    return Machine(
        name=name,
        memory=int(memory * _GIB),
        flops={dtype: _REACHED_FLOPS * each * 1e12 for dtype, each in flops.items()},
        memory_bandwidth=_REACHED_MEMORY * bandwidth * 1e12,
        launch=5e-6,
        intra_node=Link(_REACHED_LINK * link * _GB),
        inter_node=Link(_REACHED_LINK * outside * _GB, 1e-5),
    )


KNOWN = {
    "h100": _accelerator("H100 SXM 80 GB, NVLink, 400 Gb/s", 78.5, 989, 495, 3.35, 450, 50, float8=1979),
    "h100-96gb": _accelerator("H100 SXM 96 GB HBM2e, NVLink, 400 Gb/s", 94.5, 884, 442, 2.4, 450, 50, float8=1768),
    "h200": _accelerator("H200 SXM 141 GB, NVLink, 400 Gb/s", 139.0, 989, 495, 4.8, 450, 50, float8=1979),
    "b200": _accelerator("B200 SXM 180 GB, NVLink, 400 Gb/s", 178.0, 2250, 1125, 7.7, 900, 50, float8=4500, mxfp8=4500),
    "a100-80gb": _accelerator("A100 SXM 80 GB, NVLink, 200 Gb/s", 78.5, 312, 156, 2.04, 300, 25),
    "a100-40gb": _accelerator("A100 SXM 40 GB, NVLink, 200 Gb/s", 39.0, 312, 156, 1.56, 300, 25),
    "l40s": _accelerator("L40S 48 GB, PCIe 4.0, 100 Gb/s", 44.0, 362, 183, 0.864, 25, 12.5, float8=733),
    "rtx4090": _accelerator("RTX 4090 24 GB, PCIe 4.0, 25 Gb/s", 23.0, 165, 82, 1.01, 25, 3.1, float8=330),
}
"""Machines by the name of their accelerator, as `composable-shard advise` accepts them.

The values are derived from data sheets: operations per second without sparsity on tensor cores (TF32 for float32),
NVLink or PCIe within a node, and one network adapter per device between nodes. Memory excludes the context of the
driver. To measure the links of your own machine, use `composable-shard measure-links`.
"""
