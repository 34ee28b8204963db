"""What the planner knows of a machine: how fast a device computes and copies, and how fast its links are. Frozen data.

All figures are *sustained* ones, which programs reach, not those of data sheets. `measure-links` writes what it has
measured as JSON; `KNOWN` has data sheets' figures times what is reached of them (`_REACHED`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._errors import ShardConfigTypeError, ShardConfigValueError

JSON_VERSION = 1
_GB = 10**9
_GIB = 2**30


@dataclass(frozen=True)
class Link:
    """What connects ranks.

    Attributes:
        bandwidth: bytes per second that a rank sends while it receives as many.
        latency: seconds of a collective of no bytes.
    """

    bandwidth: float
    latency: float = 2e-5

    def __post_init__(self) -> None:
        _require("Link.bandwidth", self.bandwidth, above=0)
        _require("Link.latency", self.latency)


@dataclass(frozen=True)
class Machine:
    """A device of a kind, of which a node has some, and the links between them.

    Attributes:
        name: in words.
        memory: bytes of a device that tensors can have.
        flops: operations per second of matrix products, by dtype ("float32", "bfloat16", "float16", "float8").
        memory_bandwidth: bytes per second that a device reads and writes in its memory.
        launch: seconds of a host to launch one operator of an eager step.
        intra_node: the link between devices of a node.
        inter_node: the link of a device to those of other nodes.
        devices_per_node: how many devices share the faster link.
        host_link: the link of a device to the memory of its host.
        host_memory_bandwidth: bytes per second that the processors of a host read and write for one device, which is
            what an optimizer on offloaded parameters takes.
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

    def __post_init__(self) -> None:
        for name in ("memory", "memory_bandwidth", "devices_per_node", "host_memory_bandwidth"):
            _require(f"Machine.{name}", getattr(self, name), above=0)
        _require("Machine.launch", self.launch)
        if "float32" not in self.flops:
            raise ShardConfigValueError("Machine.flops: give operations per second of 'float32' at least")
        for dtype, flops in self.flops.items():
            _require(f"Machine.flops[{dtype!r}]", flops, above=0)

    def flops_of(self, dtype: str) -> float:
        """Operations per second in a dtype; one that is not known goes as fast as float32."""
        return self.flops.get(dtype, self.flops["float32"])

    def to_json(self) -> str:
        """The machine as JSON, for `from_json`."""
        content = {"machine": JSON_VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine that `to_json` wrote.

        Raises:
            ShardConfigValueError: the text is no machine, one of another version, or has other fields.
        """
        try:
            content = json.loads(text)
            if content.pop("machine") != JSON_VERSION:
                raise ValueError(f"this library reads version {JSON_VERSION}")
            links = {name: Link(**content.pop(name)) for name in ("intra_node", "inter_node", "host_link")}
            return cls(**content, **links)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ShardConfigValueError(
                f"this is no machine that `composable-shard measure-links --json FILE` has written: {error}"
            ) from None


def _require(name: str, value: Any, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ShardConfigTypeError(f"{name}: {value!r} is no number")
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise ShardConfigValueError(f"{name}={value!r}: expected a finite number{' above 0' if above == 0 else ''}")
