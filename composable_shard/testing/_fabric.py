"""`fabric`: a world in one process whose collectives take modelled times. See its docstring for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, _GeneratorContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .._comm.lanes import Lane, cpu_lanes
from .._engine.stopwatch import use_clock
from .._errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._torch.core import has_side_effect
from .._torch.distributed import store_of_one_process
from ._alike import move_alike
from ._clocks import Clock, Collective, RealClock, StreamClock, VirtualClock
from ._collectives import Call, Work
from ._cuda import CudaLinks
from ._lanes import StreamedLane
from ._links import Link, Network, Timeline, network
from ._process_group import GroupKey, register
from ._torch import cpu_streams, forget_meshes

BACKEND = "fabric"
CLOCKS: dict[str, Callable[[], Clock]] = {"real": RealClock, "virtual": VirtualClock, "streams": StreamClock}


class Fabric:
    """A simulated network: its clock, and what has happened on it.

    *Data.* Other ranks are taken to hold what this one holds: they send copies of its data. So a gather gives its piece
    N times, a sum N times the value, a mean the value, an all-to-all copies of what it sends to itself, and the result
    is exact for ranks that are all alike. What another rank would have sent as the root of a broadcast is what the
    tensor holds; of a scatter or a message it is zeros, for nothing is known of it.

    *Left out*: the host's time to launch, other traffic, congestion, protocols and algorithms that change with the
    size, what communication takes of compute (cores, memory bandwidth), stragglers. On CUDA tensors (with
    ``clock="real"`` alone) each link is a stream that sleeps so long; events then know only when the host called.

    Attributes:
        network: ranks and links.
        events: the collectives since it was entered or last reset, in the order of issue.
    """

    def __init__(self, of: Network, clock: Clock) -> None:
        self.network = of
        self.events: list[Collective] = []
        self._clock = clock
        self._origin_s = clock.now()
        self._timelines: dict[str, Timeline] = {}
        self.cuda = CudaLinks()

    @property
    def exposed_s(self) -> float:
        """Seconds that compute waited for collectives."""
        return sum(event.exposed_s for event in self.events)

    @property
    def aside_s(self) -> float:
        """Seconds of this machine that the simulation itself took, for which its clock stood still."""
        return self._clock.aside_s

    def now(self) -> float:
        """Seconds since the fabric was entered or last reset; with streams, on the current one."""
        return self._clock.now() - self._origin_s

    def compute(self, seconds: float) -> None:
        """Compute for so long: the real clock lets the time pass, the others move on.

        Raises:
            ShardConfigValueError: `seconds` is negative or no number.
        """
        if not seconds >= 0:
            raise ShardConfigValueError(f"seconds: compute takes zero or more, got {seconds}")
        self._clock.compute(seconds)

    def reset(self) -> None:
        """Forget the events and begin again at time 0; with streams, when all of them are done."""
        self._clock.level()
        self.events = []
        self._origin_s = self._clock.now()

    def log(self) -> str:
        """The events as text, a line each; times in microseconds."""
        columns = ("kind", "group", "ranks", "link", "bytes", "issue", "start", "finish", "wait", "exposed")
        rows = [columns, *map(_row, self.events)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = {0, 1, 3}
        lines = []
        for row in rows:
            cells = [c.ljust(w) if i in texts else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def issue(self, kind: str, group: str, ranks: int, nbytes: int, link: Link) -> tuple[Collective, float]:
        """Put a collective on a link; returns its event and the clock's time when it will be over."""
        now, seconds = self._clock.now(), link.seconds(kind, nbytes, ranks)
        start, finish = now, now
        if ranks > 1:
            start, finish = self._timelines.setdefault(link.name, Timeline()).put(now, seconds)
        at = self._origin_s
        event = Collective(kind, group, ranks, nbytes, link.name, now - at, start - at, finish - at)
        self.events.append(event)
        return event, finish

    def wait(self, event: Collective, finish_s: float) -> None:
        """Wait for a collective."""
        if event.first_wait_s is None:
            event.first_wait_s = self._clock.now() - self._origin_s
        self._clock.wait(finish_s, event)

    def done(self, finish_s: float) -> bool:
        """Whether the clock has reached that time."""
        return self._clock.now() >= finish_s

    @property
    def clock(self) -> Clock:
        """What the process groups stop while they move data."""
        return self._clock


class LinkOfAlikeRanks:
    """What carries the collectives of a group in a fabric (see `Medium`): one link, and ranks that hold all the same.

    The data is moved at once, while the clock stands still; the handle is done when the model says so.
    """

    backend = BACKEND

    def __init__(self, fabric: Fabric, link: Link) -> None:
        self._fabric = fabric
        self._link = link

    def launch(self, key: GroupKey, group_rank: int, call: Call) -> Work:
        """Put a collective on the link as the rank `group_rank` of a group."""
        issued, link, fabric = call.issued, self._link, self._fabric
        ranks = len(issued.members)
        nbytes = _bytes_of_the_whole(call, ranks)
        event, finish = fabric.issue(issued.kind, issued.group, ranks, nbytes, link)
        tensors = [*call.inputs, *call.outputs]
        with fabric.clock.stopped():
            if any(tensor.is_cuda for tensor in tensors):
                seconds = link.seconds(issued.kind, nbytes, ranks)
                landed = fabric.cuda.run(link.name, seconds, tensors, lambda: move_alike(call, group_rank, ranks))
                return Work(landed.wait, landed.query, call.outputs)
            move_alike(call, group_rank, ranks)
        return Work(lambda: fabric.wait(event, finish), lambda: fabric.done(finish), call.outputs)

    def send(self, key: GroupKey, group_rank: int, to: int, tag: int, call: Call) -> Work:
        """A message takes the link, and nobody reads it."""
        return self.launch(key, group_rank, call)

    def receive(self, key: GroupKey, group_rank: int, sources: Sequence[int], tag: int, call: Call) -> Work:
        """A message takes the link, and nothing is known of it."""
        return self.launch(key, group_rank, call)

    def misfit(self, kind: str, whole: torch.Tensor, piece: torch.Tensor, ranks: int) -> str:
        """What to say of a whole tensor that is not made of such a piece of each rank."""
        return f"fabric: {whole.numel()} elements are not {piece.numel()} for each of {ranks} ranks"


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
    """The fabric in whose context this runs.

    Raises:
        ShardConfigStateError: there is none.
    """
    if not _current:
        raise ShardConfigStateError("no fabric: enter one, `with composable_shard.testing.fabric(...):`")
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
    """A world of `world_size` ranks in this process, which is one of them; collectives take modelled times.

    For trying a schedule before renting a cluster: what an engine hides of its communication, and what not, shows on a
    laptop. A context manager and a decorator; it gives a `Fabric`. Inside it `torch.distributed` is initialised; at its
    end, also after an exception, the process group is destroyed and what torch remembers of its meshes forgotten.

        with testing.fabric(8, latency_s=20e-6, bandwidth_Bps=25e9, clock="virtual") as net:
            model = build_sharded_model(init_device_mesh("cpu", (8,)))
            train_a_step(model)
            print(net.log(), net.exposed_s)

    *Times.* An all-gather or reduce-scatter of `bytes` (of the whole) among N ranks takes

        t = latency + (N - 1) / N * bytes / bandwidth

    an all-reduce twice that; all-to-all, gather and scatter as much; a broadcast, a reduction to one rank and a message
    latency + bytes / bandwidth; a barrier the latency; a coalesced collective as much as one of all its bytes; and in a
    group of one rank nothing takes time. A link does one thing at a time, in the order of issue:
    s_i = max(issue_i, f_(i-1)), f_i = s_i + t_i. With `ranks_per_node` there are two links that do not disturb each
    other: groups inside a node share one, groups that span nodes the other.

    *Clocks.* `"real"`: waiting sleeps until the modelled time, so communication overlaps with real compute. The clock
    stands still while the fabric copies data, and for what a sleep lasts too long: wall time is longer than the
    fabric's by that (`Fabric.aside_s`). `"virtual"`: only waits and declared compute (`Fabric.compute`, `Busy`) move
    the clock: exact and over in no time. `"streams"`: the same with the semantics of an accelerator: `torch.cpu.Stream`
    and `torch.cpu.Event` keep times, a wait holds the current stream up and the host takes no time at all. torch's
    FSDP2 overlaps on the CPU only so; this library's engine does on all three.

    What other ranks hold, and what the model leaves out, the docstring of `Fabric` says.

    Args:
        world_size: ranks.
        latency_s: seconds of a collective beside what its bytes take.
        bandwidth_Bps: bytes per second that a rank sends while it receives as many.
        rank: which of them this process is.
        ranks_per_node: ranks of a node; it divides the world.
        inter_latency_s: the same of groups that span nodes; needed beside `ranks_per_node`.
        inter_bandwidth_Bps: likewise.
        clock: `"real"`, `"virtual"` or `"streams"`.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument that cannot be, by its name.
        ShardConfigStateError: on entering: there is a default process group already.
    """
    of = network(world_size, latency_s, bandwidth_Bps, ranks_per_node, inter_latency_s, inter_bandwidth_Bps)
    _check_rank(rank, world_size, clock)
    return _entered(of, rank, CLOCKS[clock])


def _check_rank(rank: int, world_size: int, clock: str) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ShardConfigTypeError(f"rank: expected a rank, got {type(rank).__name__} {rank!r}")
    if not 0 <= rank < world_size:
        raise ShardConfigValueError(f"rank: must be 0 to {world_size - 1}, got {rank}")
    if clock not in CLOCKS:
        raise ShardConfigValueError(f"clock: must be {', '.join(map(repr, CLOCKS))}, got {clock!r}")


@contextmanager
def _entered(of: Network, rank: int, clock: Callable[[], Clock]) -> Iterator[Fabric]:
    if dist.is_initialized():
        raise ShardConfigStateError(
            f"fabric: a default process group of {dist.get_world_size()} ranks ({dist.get_backend()}) exists already; "
            "destroy it first (torch.distributed.destroy_process_group), or run this in a process of its own"
        )
    register(BACKEND, _link_here)
    made = Fabric(of, clock())
    with ExitStack() as stack:
        if isinstance(made.clock, StreamClock):
            clocked = made.clock
            stack.enter_context(cpu_streams(clocked.stream, clocked.event, clocked.default))
            stack.enter_context(cpu_lanes(_lanes_on(clocked)))
        _current.append(made)
        stack.callback(_current.pop)
        stack.callback(use_clock, use_clock(made.clock.now))
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
    """What carries a new group's collectives."""
    fabric = current_fabric()
    return LinkOfAlikeRanks(fabric, fabric.network.link_of(list(members)))


class Busy(torch.nn.Module):
    """The identity on a tensor that takes time in the fabric, compiled too: a stand-in for compute that is not there.

    Put it after the operations whose time it stands for, inside the module: its backward then comes before theirs, so
    that their gradients are there when it is over.

    Args:
        forward_s: seconds of the forward.
        backward_s: seconds of the backward, if there is one; twice the forward's by default.
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


# An operator, so that a compiled graph computes where it stands in it, and each time that the graph runs.
_library = torch.library.Library("composable_shard_testing", "DEF")  # type: ignore[no-untyped-call]
_library.define("busy(Tensor x, float forward_s, float backward_s) -> Tensor")  # type: ignore[no-untyped-call]


def _forward(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    current_fabric().compute(forward_s)
    return x.clone()  # torch warns of modules that return views


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.backward_s = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.composable_shard_testing.busy(grad, ctx.backward_s, 0.0), None, None


_library.impl("busy", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_busy = torch.ops.composable_shard_testing.busy.default
torch.library.register_fake(_busy, lambda x, *seconds: torch.empty_like(x), lib=_library)
torch.library.register_autograd(_busy, _backward, setup_context=_remember, lib=_library)
has_side_effect(_busy)
