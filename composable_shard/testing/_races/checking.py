"""`races`, and what it gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..._comm.lanes import Lane, StreamLane, cpu_lanes
from ..._comm.transports import VARIABLE
from ..._errors import RaceError, ShardConfigValueError
from ..._torch.distributed import store_of_one_process
from .._process_group import register
from .._spmd import Axes, check_no_group, check_world
from .._torch import forget_meshes, streams_of_torch
from .memory import Memory
from .names import Names
from .network import BACKEND, Network
from .nodes import Nodes
from .operators import Launches, Watch
from .report import Race, Races, text_of
from .streams import Event, Stream, Streams

_NAMES = ("gathers", "reductions")  # of an engine's lanes, in the order in which it makes them


class Checked:
    """What a block of `races` has done.

    Attributes:
        mesh: over all ranks of the simulated world, with the axes that were asked for.
        stream_of_compute: the default stream.
    """

    def __init__(self, mesh: DeviceMesh, streams: Streams, launches: Launches, races: Races) -> None:
        self.mesh = mesh
        self.stream_of_compute = streams.compute
        self._launches, self._races = launches, races

    @property
    def races(self) -> tuple[Race, ...]:
        """The races so far: one for each pair of operators, streams and places."""
        return self._races.all()

    @property
    def operators(self) -> int:
        """How many operators and collectives were looked at."""
        return self._launches.count

    def stream(self, name: str) -> Stream:
        """A new stream with a name, for reports; else it is as one of `torch.Stream`.

        Raises:
            ShardConfigValueError: the name is empty.
        """
        if not name:
            raise ShardConfigValueError("name: a stream of testing.races needs one, got ''; or call torch.Stream()")
        return Stream(name=name)

    def on_host(self, *tensors: torch.Tensor) -> None:
        """These lie in (pinned) memory of the host.

        What works on such tensors alone runs at once, in the order of the host, and gives more of them. A stream that
        reads or writes one has to be waited for by the host (`Event.synchronize`) before the host uses it.
        """
        self._launches.keep_on_host(tensors)

    def report(self) -> str:
        """The races in words; empty if there are none."""
        return text_of(self.races) if self.races else ""

    def check(self) -> None:
        """Raises RaceError, with all races in words, if there are any."""
        if self.races:
            raise RaceError(self.report())


@contextmanager
def races(world: int = 4, rank: int = 0, *, mesh: Axes | None = None, check: bool = True) -> Iterator[Checked]:
    """Find accesses to the same memory that no event orders, on a CPU, in whatever runs within.

    On an accelerator streams run side by side. What is launched on one comes after what was launched on another only if
    an event says so; where one is missing, results are wrong now and then. Here everything runs in the order of the
    program, and what is looked at is whether the streams would have had to keep that order. It counts in any timing, so
    one step shows it; but only for what ran, in the order in which it ran:

        def test_my_hook_has_no_race():
            with testing.races(world=4) as checked:
                model = cs.fully_shard(Layer(), mesh=checked.mesh)
                side = checked.stream("mine")
                with side:
                    ...
                model(x).sum().backward()

    Within, this process is one rank of a world whose ranks all hold the same. There are the streams of an accelerator:
    that of compute, two of each sharded model, one of each process group, as NCCL's, and those that the program makes
    by `torch.Stream`, `torch.cuda.Stream` or `torch.cpu.Stream`, with `torch.Event` and its kin between them;
    `torch.accelerator` and `torch.cuda` tell and change the current one. Backward runs each node on the stream of its
    forward, with the waits that autograd adds. Memory that is freed goes back to the stream on which it was allocated.

    What it does not know: compiled graphs, operators that threads of the program run, and C++ code that makes no call
    of torch's dispatcher. `Tensor.item` and copies to the CPU count as no wait of the host, though on an accelerator
    they are one.

    Args:
        world: number of ranks, at least 1.
        rank: the one to be.
        mesh: names and sizes of the axes of `checked.mesh`; one axis ``shard`` if None.
        check: whether the end of the block raises the races that were not looked at by then.

    Raises:
        RaceError: at the end of the block, if it has races and ends without another error.
        ShardConfigTypeError, ShardConfigValueError: the arguments make no world, or it has no such rank.
        ShardConfigStateError: this process has a default process group already.
    """
    axes = check_world(world, mesh)
    if not 0 <= rank < world:
        raise ShardConfigValueError(f"rank: a world of {world} has ranks 0 to {world - 1}, got {rank}")
    check_no_group("races")
    with ExitStack() as stack:
        checked = _entered(stack, world, rank, axes)
        yield checked
    if check:
        checked.check()


def _entered(stack: ExitStack, world: int, rank: int, axes: dict[str, int]) -> Checked:
    streams, names = Streams(), Names()
    made = Races(names.at)
    stack.callback(streams.leave)
    memory = Memory(made.add)
    stack.callback(memory.clear)
    nodes = Nodes(streams, memory.record)
    launches = Launches(streams, nodes, memory)
    stack.enter_context(streams_of_torch(Stream, Event, streams, memory.record, launches.resize))
    stack.enter_context(cpu_lanes(_lanes(streams, names)))
    stack.enter_context(_world(Network(streams, launches), world, rank))
    of_mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    stack.enter_context(Watch(launches))
    return Checked(of_mesh, streams, launches, made)


def _lanes(streams: Streams, names: Names) -> Callable[[], Lane]:
    """Makes lanes as on an accelerator, whose streams have names."""
    made = 0

    def make() -> Lane:
        nonlocal made
        names.note_engine()
        streams.name_next(_NAMES[made % len(_NAMES)])
        made += 1
        return StreamLane(torch.device("cpu"))

    return make


_networks: list[Network] = []


@contextmanager
def _world(network: Network, world: int, rank: int) -> Iterator[None]:
    """Within, this process is a rank whose process groups communicate over `network`."""
    register(BACKEND, lambda _members: _networks[-1])
    _networks.append(network)
    hook, chosen = sys.excepthook, os.environ.get(VARIABLE)
    os.environ.setdefault(VARIABLE, "direct")  # as on NCCL, where it is the first choice
    try:
        dist.init_process_group(BACKEND, store=store_of_one_process(), rank=rank, world_size=world)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        _networks.pop()
        sys.excepthook = hook  # torch puts the rank before every line
        if chosen is None:
            os.environ.pop(VARIABLE, None)
