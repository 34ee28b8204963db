"""`races`, and `Checked`, which it returns."""

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
from ..._torch.capturing import simulated
from ..._torch.distributed import store_of_one_process
from ...errors import RaceError, ShardConfigValueError
from .._process_group import register
from .._spmd import Axes, check_no_group, check_world
from .._torch import forget_meshes, streams_of_torch
from .captures import Captures
from .memory import Memory
from .names import Names
from .network import BACKEND, Network
from .nodes import Nodes
from .operators import Launches, Watch, stack_here
from .report import Race, Races, place_of, text_of
from .streams import Event, Stream, Streams

_NAMES = ("gathers", "reductions")  # names of an engine's lanes, in the order in which it creates them


class Checked:
    """Result of `races`.

    Attributes:
        mesh: a mesh of all ranks of the simulated world, with the requested axes.
        stream_of_compute: the default stream.
    """

    def __init__(
        self, mesh: DeviceMesh, streams: Streams, launches: Launches, races: Races, captures: Captures
    ) -> None:
        self.mesh = mesh
        self._captures = captures
        self.stream_of_compute = streams.compute
        self._launches, self._races = launches, races

    @property
    def races(self) -> tuple[Race, ...]:
        """The races so far: one for each pair of operators, streams and source lines."""
        return self._races.all()

    @property
    def operators(self) -> int:
        """The number of operators and collectives that were checked."""
        return self._launches.count

    def stream(self, name: str) -> Stream:
        """Create a stream like `torch.Stream`, with a name for reports.

        Raises:
            ShardConfigValueError: the name is empty.
        """
        if not name:
            raise ShardConfigValueError("name: expected a name for the stream, got ''; or call torch.Stream()")
        return Stream(name=name)

    def on_host(self, *tensors: torch.Tensor) -> None:
        """Treat these tensors as (pinned) host memory.

        An operator whose tensors are all in host memory runs on the host immediately, and its outputs are in host
        memory too. If a stream reads or writes such a tensor, the host has to wait for the stream
        (`Event.synchronize`) before it uses the tensor.
        """
        self._launches.keep_on_host(tensors)

    def report(self) -> str:
        """The races as text; empty if there are none."""
        return text_of(self.races) if self.races else ""

    def check(self) -> None:
        """Raise an error if there are races.

        Raises:
            RaceError: there are races. The message is the report.
        """
        if self.races:
            raise RaceError(self.report())


@contextmanager
def races(world: int = 4, *, mesh: Axes | None = None, check: bool = True) -> Iterator[Checked]:
    """Find races on a CPU: accesses to the same memory from different streams that no event orders.

    On an accelerator, streams run concurrently. Work on one stream runs after earlier work on another stream only if it
    waits for an event. If an event is missing, results are occasionally wrong. Under `races`, all operators run in the
    order of the program, and each access is checked: do the events force this order? The answer does not depend on
    timing, so one run is enough. It is valid only for the operators that ran, in the order in which they ran:

        def test_my_hook_has_no_race():
            with testing.races(world=4) as checked:
                model = cs.fully_shard(Layer(), mesh=checked.mesh)
                side = checked.stream("mine")
                with side:
                    ...
                model(x).sum().backward()

    In the block, this process is rank 0 of a simulated world. The other ranks are assumed to hold the same data. The
    block has the streams of an accelerator:

    - the compute stream
    - two streams for each sharded model, and two more for the outer axis of a 2D mesh
    - a stream for each process group, like NCCL's
    - streams that the program creates by `torch.Stream`, `torch.cuda.Stream` or `torch.cpu.Stream`

    `torch.Event`, `torch.cuda.Event` and `torch.cpu.Event` order them. `torch.accelerator` and `torch.cuda` return and
    change the current stream. Backward runs each node on the stream of its forward, with the waits that autograd adds.
    Freed memory is returned to the stream on which it was allocated.

    Not checked: compiled graphs, operators in threads that the program starts, and C++ code that bypasses torch's
    dispatcher. `Tensor.item` and copies to the CPU do not count as a wait of the host, although they are one on an
    accelerator.

    Args:
        world: number of ranks, at least 1.
        mesh: names and sizes of the axes of `checked.mesh`; one axis ``shard`` if None.
        check: whether the end of the block raises an error if there are races.

    Raises:
        RaceError: at the end of the block, if there are races and no other error.
        ShardConfigTypeError, ShardConfigValueError: the arguments do not describe a world.
        ShardConfigStateError: this process has a default process group already.
    """
    axes = check_world(world, mesh)
    check_no_group("races")
    with ExitStack() as stack:
        checked = _entered(stack, world, axes)
        yield checked
    if check:
        checked.check()


def _entered(stack: ExitStack, world: int, axes: dict[str, int]) -> Checked:
    streams, names = Streams(), Names()
    made = Races(names.at)
    stack.callback(streams.leave)
    memory = Memory(made.add)
    stack.callback(memory.clear)
    nodes = Nodes(streams, memory.record)
    launches = Launches(streams, nodes, memory)
    stack.enter_context(streams_of_torch(Stream, Event, streams, memory.record, launches.resize))
    captures = Captures(streams, _here, launches.lies_on_host)
    stack.enter_context(simulated(captures))
    stack.enter_context(cpu_lanes(_lanes(streams, names)))
    stack.enter_context(_world(Network(streams, launches), world))
    of_mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    stack.enter_context(Watch(launches))
    return Checked(of_mesh, streams, launches, made, captures)


def _here() -> str:
    place = place_of(stack_here())
    return ", ".join(filter(None, [place.library, place.user]))


def _lanes(streams: Streams, names: Names) -> Callable[[], Lane]:
    """A function that creates lanes like those on an accelerator, with named streams."""
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
def _world(network: Network, world: int) -> Iterator[None]:
    """Make this process rank 0, whose process groups communicate over `network`."""
    register(BACKEND, lambda _members: _networks[-1])
    _networks.append(network)
    hook, chosen = sys.excepthook, os.environ.get(VARIABLE)
    os.environ.setdefault(VARIABLE, "direct")  # the default with NCCL
    try:
        dist.init_process_group(BACKEND, store=store_of_one_process(), rank=0, world_size=world)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        _networks.pop()
        sys.excepthook = hook  # init_process_group installs a hook that prints the rank before every line
        if chosen is None:
            os.environ.pop(VARIABLE, None)
