"""`fabric`: a world in one process, in which collectives have a modeled duration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, _GeneratorContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .._comm.lanes import Lane, cpu_lanes
from .._engine.stopwatch import use_clock
from .._torch.core import has_side_effect
from .._torch.distributed import store_of_one_process
from ..errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigUnsupportedError, ShardConfigValueError
from ._alike import move_alike
from ._clocks import Clock, Collective, RealClock, StreamClock, VirtualClock
from ._collectives import Call, Work
from ._lanes import StreamedLane
from ._links import Link, Network, Timeline, network
from ._process_group import GroupKey, register
from ._torch import cpu_streams, forget_meshes

BACKEND = "fabric"
CLOCKS: dict[str, Callable[[], Clock]] = {"real": RealClock, "virtual": VirtualClock, "streams": StreamClock}


class Fabric:
    """A simulated network with a clock and a log of its collectives.

    *Data.* All other ranks are assumed to hold the same data as this one, and the results are exact if they do:

    - a gather gives N copies of this rank's piece
    - a sum gives N times the value, and a mean the value
    - an all-to-all gives N copies of the piece that this rank sends to itself
    - a broadcast from another rank leaves the tensor as it is
    - a scatter from another rank and a received message give zeros, because their data is unknown

    *Not modeled*: the host's time to launch, other traffic, congestion, protocols and algorithms that depend on the
    size, cores and memory bandwidth that communication takes from compute, stragglers. Tensors must be on the CPU.

    Attributes:
        network: ranks and links.
        events: the collectives since the fabric was entered or last reset, in the order of issue.
    """

    def __init__(self, of: Network, clock: Clock) -> None:
        self.network = of
        self.events: list[Collective] = []
        self._clock = clock
        self._origin_s = clock.now()
        self._timelines: dict[str, Timeline] = {}

    @property
    def exposed_s(self) -> float:
        """Seconds that compute waited for collectives: the exposed communication."""
        return sum(event.exposed_s for event in self.events)

    @property
    def aside_s(self) -> float:
        """Seconds of real time that the simulation itself took. The clock is stopped during this time."""
        return self._clock.aside_s

    def now(self) -> float:
        """Seconds since the fabric was entered or last reset; with ``clock="streams"``, of the current stream."""
        return self._clock.now() - self._origin_s

    def compute(self, seconds: float) -> None:
        """Simulate compute of `seconds`. The real clock sleeps, the others advance.

        Raises:
            ShardConfigValueError: `seconds` is negative or NaN.
        """
        if not seconds >= 0:
            raise ShardConfigValueError(f"seconds: expected zero or more, got {seconds}")
        self._clock.compute(seconds)

    def reset(self) -> None:
        """Delete the events and restart at time 0. With ``clock="streams"``, time 0 is when all streams are done."""
        self._clock.level()
        self.events = []
        self._origin_s = self._clock.now()

    def log(self) -> str:
        """The events as text, one per line. Times are in microseconds."""
        columns = ("kind", "group", "ranks", "link", "bytes", "issue", "start", "finish", "wait", "exposed")
        rows = [columns, *map(_row, self.events)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = {0, 1, 3}
        lines = []
        for row in rows:
            cells = [c.ljust(w) if i in texts else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _issue(self, kind: str, group: str, ranks: int, nbytes: int, link: Link) -> tuple[Collective, float]:
        """Queue a collective on a link. Returns its event and the time of the clock when it will be done."""
        now, seconds = self._clock.now(), link.seconds(kind, nbytes, ranks)
        start, finish = now, now
        if ranks > 1:
            start, finish = self._timelines.setdefault(link.name, Timeline()).put(now, seconds)
        at = self._origin_s
        event = Collective(kind, group, ranks, nbytes, link.name, now - at, start - at, finish - at)
        self.events.append(event)
        return event, finish

    def _wait(self, event: Collective, finish_s: float) -> None:
        """Wait for the collective of an event."""
        if event.first_wait_s is None:
            event.first_wait_s = self._clock.now() - self._origin_s
        self._clock.wait(finish_s, event)


class LinkOfAlikeRanks:
    """Implements the collectives of a group of a fabric (see `Medium`) with one link and identical ranks.

    The data is copied at the call, while the clock is stopped. The handle is done at the modeled time.
    """

    backend = BACKEND

    def __init__(self, fabric: Fabric, link: Link) -> None:
        self._fabric = fabric
        self._link = link

    def launch(self, key: GroupKey, group_rank: int, call: Call) -> Work:
        """Queue a collective on the link as rank `group_rank` of a group."""
        issued, link, fabric = call.issued, self._link, self._fabric
        ranks = len(issued.members)
        nbytes = _bytes_of_the_whole(call, ranks)
        if any(tensor.is_cuda for tensor in (*call.inputs, *call.outputs)):
            raise ShardConfigUnsupportedError("fabric: the tensors of collectives must be on the CPU, not on a GPU")
        event, finish = fabric._issue(issued.kind, issued.group, ranks, nbytes, link)
        with fabric._clock.stopped():
            move_alike(call, group_rank, ranks)
        return Work(lambda: fabric._wait(event, finish), lambda: fabric._clock.now() >= finish, call.outputs)

    def send(self, key: GroupKey, group_rank: int, to: int, tag: int, call: Call) -> Work:
        """Send a message: it occupies the link, and its data is dropped."""
        return self.launch(key, group_rank, call)

    def receive(self, key: GroupKey, group_rank: int, sources: Sequence[int], tag: int, call: Call) -> Work:
        """Receive a message: it occupies the link, and its data is zeros."""
        return self.launch(key, group_rank, call)


def _bytes_of_the_whole(call: Call, ranks: int) -> int:
    kind = call.issued.kind
    tensors = call.outputs if kind in ("all_gather", "scatter", "recv") else call.inputs
    return sum(tensor.nbytes for tensor in tensors) * (ranks if kind in ("gather", "scatter") else 1)


def _row(event: Collective) -> tuple[str, ...]:
    times = event.issue_s, event.start_s, event.finish_s, event.first_wait_s, event.exposed_s
    shown = ["-" if at is None else f"{1e6 * at:.3f}" for at in times]
    return event.kind, event.group, str(event.ranks), event.link, f"{event.nbytes:,}", *shown


_current: list[Fabric] = []


def current_fabric() -> Fabric:
    """The active fabric.

    Raises:
        ShardConfigStateError: no fabric is active.
    """
    if not _current:
        raise ShardConfigStateError(
            "no fabric is active; run this in the block of `with composable_shard.testing.fabric(...):`"
        )
    return _current[-1]


def fabric(
    world_size: int,
    *,
    latency_s: float,
    bandwidth_Bps: float,  # noqa: N803 - a unit
    rank: int = 0,
    ranks_per_node: int | None = None,
    inter_latency_s: float | None = None,
    inter_bandwidth_Bps: float | None = None,  # noqa: N803
    clock: str = "real",
) -> _GeneratorContextManager[Fabric]:
    """Make this process one rank of a simulated network, in which collectives have a modeled duration.

    Use it to try a schedule on a laptop: it shows which communication overlaps with compute and which is exposed.
    `fabric` is a context manager and a decorator, and gives a `Fabric`. It initializes `torch.distributed`. At the end,
    also after an exception, it destroys the process group and clears torch's caches of its meshes.

        with testing.fabric(8, latency_s=20e-6, bandwidth_Bps=25e9, clock="virtual") as net:
            model = build_sharded_model(init_device_mesh("cpu", (8,)))
            train_a_step(model)
            print(net.log(), net.exposed_s)

    *Times.* A collective of `bytes` (of the full tensor) among N ranks takes

        t = latency + (N - 1) / N * bytes / bandwidth    all-gather, reduce-scatter, all-to-all, gather, scatter
        t = 2 * (latency + (N - 1) / N * bytes / bandwidth)    all-reduce
        t = latency + bytes / bandwidth    broadcast, reduction to one rank, message
        t = latency    barrier

    A coalesced collective takes as long as one with all its bytes. In a group of one rank nothing takes time. A link
    runs one collective at a time, in the order of issue: s_i = max(issue_i, f_(i-1)), f_i = s_i + t_i. With
    `ranks_per_node` there are two independent links, one for groups inside a node and one for groups that span nodes.

    *Clocks.*

    - `"real"`: a wait sleeps until the modeled time, so communication overlaps with real compute. The clock is stopped
      while the fabric copies data and when a sleep ends late; `Fabric.aside_s` is the sum of these times.
    - `"virtual"`: only waits and declared compute (`Fabric.compute`, `Busy`) advance the clock. It is exact, and a run
      takes no time.
    - `"streams"`: like `"virtual"`, with the semantics of an accelerator. `torch.cpu.Stream` and `torch.cpu.Event` have
      times, a wait delays the current stream, and the host takes no time. torch's FSDP2 overlaps on the CPU only with
      this clock; this library's engine overlaps with all three.

    See `Fabric` for the data of the other ranks and for what is not modeled.

    Args:
        world_size: number of ranks.
        latency_s: latency of a collective, in seconds.
        bandwidth_Bps: bytes per second that a rank sends while it receives the same number.
        rank: the rank of this process.
        ranks_per_node: number of ranks of a node; must divide the world size.
        inter_latency_s: latency in groups that span nodes; required with `ranks_per_node`.
        inter_bandwidth_Bps: bandwidth in groups that span nodes; required with `ranks_per_node`.
        clock: `"real"`, `"virtual"` or `"streams"`.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument is invalid; the message names it.
        ShardConfigStateError: on entering, if a default process group exists already.
    """
    of = network(world_size, latency_s, bandwidth_Bps, ranks_per_node, inter_latency_s, inter_bandwidth_Bps)
    _check_rank(rank, world_size, clock)
    return _entered(of, rank, CLOCKS[clock])


def _check_rank(rank: int, world_size: int, clock: str) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ShardConfigTypeError(f"rank: expected an integer, got {type(rank).__name__} {rank!r}")
    if not 0 <= rank < world_size:
        raise ShardConfigValueError(f"rank: must be 0 to {world_size - 1}, got {rank}")
    if clock not in CLOCKS:
        raise ShardConfigValueError(f"clock: must be {', '.join(map(repr, CLOCKS))}, got {clock!r}")


@contextmanager
def _entered(of: Network, rank: int, clock: Callable[[], Clock]) -> Iterator[Fabric]:
    if dist.is_initialized():
        raise ShardConfigStateError(
            f"fabric: a default process group of {dist.get_world_size()} ranks ({dist.get_backend()}) exists already; "
            "destroy it first (torch.distributed.destroy_process_group), or run this in a separate process"
        )
    register(BACKEND, _link_here)
    made = Fabric(of, clock())
    with ExitStack() as stack:
        if isinstance(clocked := made._clock, StreamClock):
            stack.enter_context(cpu_streams(clocked.stream, clocked.event, clocked.default))
            stack.enter_context(cpu_lanes(_lanes_on(clocked)))
        _current.append(made)
        stack.callback(_current.pop)
        stack.callback(use_clock, use_clock(made._clock.now))
        stack.callback(forget_meshes)
        dist.init_process_group(BACKEND, store=store_of_one_process(), rank=rank, world_size=of.world_size)
        stack.callback(_destroy)
        yield made


def _lanes_on(clock: StreamClock) -> Callable[[], Lane]:
    return lambda: StreamedLane(clock)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _link_here(members: tuple[int, ...]) -> LinkOfAlikeRanks:
    """The link for the collectives of a new group."""
    fabric = current_fabric()
    return LinkOfAlikeRanks(fabric, fabric.network.link_of(list(members)))


class Busy(torch.nn.Module):
    """An identity module that takes time in the fabric, in eager and compiled code. It replaces omitted compute.

    Put it inside the module, after the operations whose time it models. Its backward then runs before theirs, so their
    gradients are ready after its time has passed.

    Args:
        forward_s: seconds of the forward.
        backward_s: seconds of the backward; by default twice `forward_s`.
    """

    def __init__(self, forward_s: float, backward_s: float | None = None) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = 2 * forward_s if backward_s is None else backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.composable_shard_testing.busy(x, self.forward_s, self.backward_s)
        return output

    def extra_repr(self) -> str:
        return f"forward_s={self.forward_s:g}, backward_s={self.backward_s:g}"


# It is an operator so that a compiled graph runs it at its place in the graph, on each run.
_library = torch.library.Library("composable_shard_testing", "DEF")  # type: ignore[no-untyped-call]
_library.define("busy(Tensor x, float forward_s, float backward_s) -> Tensor")  # type: ignore[no-untyped-call]


def _forward(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    current_fabric().compute(forward_s)
    return x.clone()  # torch warns about modules that return views


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.backward_s = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.composable_shard_testing.busy(grad, ctx.backward_s, 0.0), None, None


_library.impl("busy", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_busy = torch.ops.composable_shard_testing.busy.default
torch.library.register_fake(_busy, lambda x, *seconds: torch.empty_like(x), lib=_library)
torch.library.register_autograd(_busy, _backward, setup_context=_remember, lib=_library)
has_side_effect(_busy)
