"""Finds accesses to the same bytes that no event orders: a happens-before checker of the library's streams, on a CPU.

    with race.simulated(world_size=4) as machine, race.Watch() as watch:
        ...                             # build a sharded model and train it, on machine.compute
    race.show("my model", watch)

An accelerator runs its streams side by side, and what was given to one is ordered behind what was given to another by
events alone. Where an event is missing the result is wrong now and then. Here everything runs at once and in the order
of the program, so results are always right; what is looked at is whether the streams would have had to keep that order:

- every stream has a vector clock, and an event carries the clock of the stream on which it was recorded;
- a dispatch mode tells which bytes each operator reads and writes, on the stream that is current;
- lanes are those of `composable_shard.testing`, with streams of their own, and the process group runs its collectives
  on one more stream, as NCCL's does. It is rank 0, and the other ranks have the same data.

Two accesses to a byte, one of which writes, are a race if the clock of the later one's stream does not know the earlier
one. It counts in any timing, so one run is enough; but only for what ran, in the order in which it ran.

What it does not know: the streams that autograd gives to the nodes of backward on a card (here they are those of
whoever calls it), what an allocator does for streams (memory that one stream has freed and another is given counts as
shared), operators of compiled graphs, and `StreamLane` itself. Votes among ranks stay open, for the others cast none.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import composable_shard
from _noop import NoopGroup
from composable_shard._comm.lanes import cpu_lanes
from composable_shard.testing._lanes import StreamedLane
from composable_shard.testing._torch import cpu_streams

NAME = "race"
PAGE = 4096  # bytes; accesses are looked up by page
MOST_RANGES = 256  # a tensor in more pieces counts as one with everything between them
FRAMES = 30

HERE = Path(__file__).resolve()
SHOWN_FRAMES = 5
SHOWN_RACES = 8

Frames = tuple[tuple[str, int, str], ...]


class Stream:
    """A queue of operators. `clock` says how many of each stream come before whatever it is given next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Counter[Stream] = Counter()

    def wait_event(self, event: Event) -> None:
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock[stream], count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits: what is given to other streams afterwards still needs an event here."""


class Event:
    """A place in the order of a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or current()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """As of a stream."""


def current() -> Stream:
    """The stream of whatever runs now."""
    stream: Any = torch.cpu.current_stream()
    assert isinstance(stream, Stream), "not within `simulated`"
    return stream


class Machine:
    """The streams of a device: that of compute, that of collectives, and those which are asked for, in that order."""

    def __init__(self) -> None:
        self.compute = Stream("compute")
        self.network = Stream("network")
        self._names = iter(("gathers", "reductions"))  # the order in which an engine makes its lanes
        self._made = 0

    def stream(self, name: str | int | None = None, **_priority: Any) -> Stream:
        self._made += 1
        return Stream(name if isinstance(name, str) else next(self._names, f"stream {self._made}"))

    def event(self) -> Event:
        return Event()

    def lane(self) -> StreamedLane:
        return StreamedLane(self)  # type: ignore[arg-type]


class Work:
    """The handle of a collective: who waits for it lets the current stream wait."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self, *_timeout: Any) -> bool:
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return True


class RaceGroup(NoopGroup):
    """Rank 0 of a group of ranks that are alike; its collectives run on the machine's stream for them."""

    def __init__(self, rank: int, size: int, machine: Machine) -> None:
        super().__init__(rank, size)
        self._machine = machine

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def _run(self, collective: Callable[[], object]) -> Work:
        network = self._machine.network
        network.wait_stream(current())
        with torch.cpu.stream(network), torch.no_grad():  # type: ignore[arg-type]
            collective()
        return Work(network.record_event())

    def allgather_into_tensor_coalesced(
        self, wholes: Sequence[Tensor], pieces: Sequence[Tensor], options: Any = None
    ) -> Work:
        def gather() -> None:
            for whole, piece in zip(wholes, pieces, strict=True):
                for place in whole.view(self.size(), -1):
                    if place.data_ptr() != piece.data_ptr():
                        place.copy_(piece.reshape(-1))

        return self._run(gather)

    def _allgather_base(self, whole: Tensor, piece: Tensor, options: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([whole], [piece])

    def allgather(self, places: Sequence[Sequence[Tensor]], pieces: Sequence[Tensor], options: Any = None) -> Work:
        def gather() -> None:
            for row, piece in zip(places, pieces, strict=True):
                for place in row:
                    place.copy_(piece)

        return self._run(gather)

    def _reduce_scatter_base(self, out: Tensor, bucket: Tensor, options: Any = None) -> Work:
        rows = bucket.view(self.size(), -1)
        return self._run(lambda: torch.mean(rows, 0, out=out.view(-1)))  # reads what all ranks are sent

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        return self._run(lambda: [tensor.mul_(1) for tensor in tensors])

    # The same by the names that newer versions of torch call.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base


_machines: list[Machine] = []


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RaceGroup:
    return RaceGroup(rank, size, _machines[-1])


@contextmanager
def simulated(world_size: int) -> Iterator[Machine]:
    """Within, this process is rank 0 of a world on a machine with streams, and the current stream is its compute."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    machine = Machine()
    _machines.append(machine)
    try:
        with mock.patch.object(sys, "excepthook"):  # each would write its rank before every line of an error
            dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=world_size)
        try:
            with cpu_lanes(machine.lane), cpu_streams(machine.stream, Event, machine.compute):
                yield machine
        finally:
            dist.destroy_process_group()
    finally:
        _machines.pop()


@contextmanager
def transport(name: str) -> Iterator[None]:
    """Within, engines are made with that transport."""
    with mock.patch.dict(os.environ, COMPOSABLE_SHARD_TRANSPORT=name):
        yield


class Access(NamedTuple):
    """What an operator did with the bytes from `low` up to `high`; `count` is its place in the order of its stream."""

    low: int
    high: int
    stream: Stream
    count: int
    writes: bool
    operator: str
    frames: Frames

    def __str__(self) -> str:
        return f"{self.stream.name}: {self.operator} {'writes' if self.writes else 'reads'}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that nothing orders, `first` and `then` in the order of the program.

    Attributes:
        shape: of the tensor of `then`.
    """

    first: Access
    then: Access
    shape: tuple[int, ...]


class Watch(TorchDispatchMode):
    """Within, remembers who has read and written which bytes, and finds races.

    Attributes:
        operators: number of operators that were seen, views apart.
        skipped: operators whose tensors have no bytes to look at, with the error that says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.skipped: Counter[str] = Counter()
        self._pages: dict[int, list[Access]] = {}
        self._races: dict[tuple[object, ...], Race] = {}

    @property
    def races(self) -> list[Race]:
        """One for each pair of streams and operators."""
        return [*self._races.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        writes, reads = _arguments(func, args, kwargs)
        outputs = _locals(result)
        known = {_storage(tensor) for tensor in (*writes, *reads)}
        made = [tensor for tensor in outputs if _storage(tensor) not in known]
        if outputs and not writes and not made:
            return result  # a view
        stream = current()
        stream.clock[stream] += 1
        self.operators += 1
        operator = func.__name__
        if "empty" in operator:
            return result  # memory that nobody has looked at yet
        frames = _frames()
        try:
            for tensor in reads:
                self._touch(tensor, False, stream, operator, frames)
            for tensor in (*writes, *made):
                self._touch(tensor, True, stream, operator, frames)
        except (RuntimeError, NotImplementedError) as error:
            self.skipped[f"{operator}: {error}"] += 1
        return result

    def give_back(self) -> None:
        """Count all memory that was seen as written by the current stream, as if it had been freed and used anew."""
        stream, frames = current(), _frames()
        stream.clock[stream] += 1
        for found in self._pages.values():
            for access in found:
                if stream.clock[access.stream] < access.count:
                    anew = access._replace(
                        stream=stream, writes=True, operator="memory that was given back", frames=frames
                    )
                    self._add(access, anew, (access.high - access.low,))

    def _touch(self, tensor: Tensor, writes: bool, stream: Stream, operator: str, frames: Frames) -> None:
        for low, high in ranges(tensor):
            access = Access(low, high, stream, stream.clock[stream], writes, operator, frames)
            for page in range(low // PAGE, (high - 1) // PAGE + 1):
                self._pages[page] = [
                    before for before in self._pages.get(page, ()) if self._stays(before, access, tensor)
                ]
                within = access._replace(low=max(low, page * PAGE), high=min(high, (page + 1) * PAGE))
                self._pages[page].append(within)

    def _stays(self, before: Access, now: Access, tensor: Tensor) -> bool:
        """Whether an earlier access still tells something when this one is known; notes it if the two are a race."""
        if before.high <= now.low or now.high <= before.low:
            return True
        ordered = now.stream.clock[before.stream] >= before.count
        if not ordered and (now.writes or before.writes):
            self._add(before, now, tuple(tensor.shape))
        if not (now.low <= before.low and before.high <= now.high):
            return True
        if now.writes:
            return not ordered
        return before.writes or before.stream is not now.stream

    def _add(self, first: Access, then: Access, shape: tuple[int, ...]) -> None:
        self._races.setdefault((str(first), str(then)), Race(first, then, shape))


def ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor: where each run of them begins and ends."""
    if not tensor.numel():
        return []
    run, gaps = 1, []
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0):
        if not gaps and stride == run:
            run *= length
        else:
            gaps.append((stride, length))
    pieces = 1
    for _, length in gaps:
        pieces *= length
    if pieces > MOST_RANGES:
        run += sum((length - 1) * stride for stride, length in gaps)
        gaps = []
    size, base = tensor.element_size(), tensor.data_ptr()
    places = product(*(range(0, stride * length, stride) for stride, length in gaps))
    return [(base + sum(place) * size, base + (sum(place) + run) * size) for place in places]


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator writes, and those that it reads, by its schema."""
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(_locals(given))
    return writes, reads


def _locals(tree: Any) -> list[Tensor]:
    """The plain tensors of a tree on the CPU; of a DTensor the local one, as the mode does not see what that does."""
    leaves = (getattr(leaf, "_local_tensor", leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.device.type == "cpu" and type(leaf) in (Tensor, torch.nn.Parameter)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _frames() -> Frames:
    """The Python stack that leads to the operator, innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def stack(access: Access) -> str:
    """Where it was, innermost first: the library's frames and those of the program beside this file."""
    roots = (str(Path(composable_shard.__file__).parent), str(HERE.parent))
    own = [
        f"{Path(file).name}:{line}:{name}"
        for file, line, name in access.frames
        if file.startswith(roots) and Path(file) != HERE
    ]
    return " < ".join(own[:SHOWN_FRAMES])


def lines(races: Iterable[Race]) -> Iterator[str]:
    """Races in words, with the stacks of both accesses."""
    found = list(races)
    for race in found[:SHOWN_RACES]:
        yield f"    {race.first}, {race.then}, {race.shape}"
        yield f"        first: {stack(race.first)}"
        yield f"        then:  {stack(race.then)}"
    if len(found) > SHOWN_RACES:
        yield f"    and {len(found) - SHOWN_RACES} more"


def show(label: str, watch: Watch) -> None:
    """Prints what was found."""
    print("\n".join(chain([f"{label}: {watch.operators} operators, {len(watch.races)} races"], lines(watch.races))))
