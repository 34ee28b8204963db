"""Measure a machine with all ranks, for a `Machine`.

All ranks do the same work at the same time, because they share the machine. A timing is that of the slowest rank. The
repetitions of different cases alternate, and a figure is the median of its repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .._comm.collectives import Transport
from .._comm.mesh import MeshInfo, mesh_info
from .._comm.transports import TransportCache
from .._policies import Options
from ..errors import ShardConfigValueError
from . import host
from .link_fit import LinkFit, fit_link, sent
from .machine import Link, Machine
from .ranks import Place, Progress, check_ranks, joined

ON_RANK = f"{__name__}:measure_rank"
UNSTEADY = 0.25  # a figure is unreliable if the interquartile range of its repetitions is a larger part of the median
PARAMETERS = 4  # number of parameters in a measured gather, if the transport gathers large parameters separately
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORST = 3  # number of unreliable figures that a warning names
DOUBTFUL = 0.5  # a link is unreliable if the relative error of its formula is larger
MOST_RUNS = 200  # limit of runs of short work in one timing
INTRA, INTER = "inside a node", "between nodes"
GATHER, REDUCTION = "gather", "reduction"
PRODUCT, OPERATOR, COPY = "matrix product", "launch of an operator", "copy"
MEMORY, HOST_MEMORY = "addition in memory", "addition in the host's memory"
_ITEM_BYTES = 4  # bytes of a float32 value; collectives are measured in float32
_KIB, _MIB = 1 << 10, 1 << 20
_FIRST_ROWS = 8  # rows of the first matrix product on a device of unknown speed


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: number of repetitions of each timing.
        seconds: short work is repeated within a timing as often as fits into this time.
        longest: limit of the seconds of a matrix product. On slow devices it gets fewer rows.
        sizes: bytes of the collectives, summed over ranks, in ascending order.
        matrices: rows, inputs and outputs of a linear layer, on a CPU and on an accelerator.
        memory: bytes of each of the three tensors of an addition, on a CPU and on an accelerator.
    """

    rounds: int = 7
    seconds: float = 0.02
    longest: float = 1.0
    sizes: tuple[int, ...] = (8 * _KIB, 64 * _KIB, 512 * _KIB, 2 * _MIB, 8 * _MIB, 24 * _MIB, 64 * _MIB)
    matrices: tuple[tuple[int, int, int], tuple[int, int, int]] = ((2048, 1024, 4096), (8192, 4096, 4096))
    memory: tuple[int, int] = (128 * _MIB, 512 * _MIB)


QUICK = Settings(
    rounds=3,
    seconds=0.002,
    longest=0.05,
    sizes=(8 * _KIB, 256 * _KIB, 2 * _MIB),
    matrices=((256, 256, 1024), (2048, 1024, 4096)),
    memory=(16 * _MIB, 64 * _MIB),
)


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    Attributes:
        name: its name.
        amount: bytes moved, or operations.
        seconds: the median of the repetitions, each on the slowest rank.
        spread: the interquartile range of the repetitions, relative to the median.
    """

    name: str
    amount: float
    seconds: float
    spread: float

    @property
    def rate(self) -> float:
        """Bytes or operations per second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Collective:
    """The times of a collective.

    Attributes:
        link: name of the link.
        name: gather or reduction.
        nbytes: bytes of the collective, summed over ranks.
        ranks: number of ranks.
        transport: name of the transport of this library.
        figure: the measured times.
        seconds: the time according to the formula of the fitted link.
    """

    link: str
    name: str
    nbytes: int
    ranks: int
    transport: str
    figure: Figure
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """The measurements of a machine.

    Attributes:
        machine: the machine, for the planner.
        ranks: number of ranks that measured.
        device: type of their devices.
        threads: torch threads of each rank.
        collectives: the times to which the links are fitted.
        figures: the times of compute, memory and copies.
        links: the fit of each link.
        notes: what was not measured, and the values that are used instead.
        warnings: reasons why figures may be unreliable.
    """

    machine: Machine
    ranks: int
    device: str
    threads: int
    collectives: tuple[Collective, ...]
    figures: tuple[Figure, ...]
    links: Mapping[str, LinkFit]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def measure_rank(
    place: Place, kind: str, settings: Settings, name: str | None, timeout: float, progress: Progress
) -> Measurement:
    """Join the other ranks and measure. All ranks return the same values.

    Args:
        place: place of this rank.
        kind: type of its device.
        settings: how much to measure.
        name: name of the machine. Default: that of its device.
        timeout: time limit of a collective, in seconds.
        progress: called with the progress.

    Raises:
        ShardConfigValueError: there is only one rank, nodes have different numbers of ranks, or the environment names
            an unknown transport.
    """
    check_ranks(place.ranks)
    with joined(place, kind, timeout) as device:
        return measure(place, device, settings, name, progress)


def measure(
    place: Place, device: torch.device, settings: Settings, name: str | None, progress: Progress
) -> Measurement:
    """`measure_rank` within the default process group, whose CPU backend must be gloo."""
    _check_nodes(place)
    memory = int(-_slowest([-_memory(device, place.local_ranks)])[0])
    timing = _Timing(device, settings, progress)
    collectives, links = _measured_links(place, device, timing)
    figures = timing.of("compute and memory", [*_products(device, timing), *_others(device, settings, memory)])
    figures += timing.of("copies to the host and back", _copies(device, settings))
    return Measurement(
        _machine(name or _name(device), memory, place.local_ranks, links, figures, device),
        place.ranks,
        device.type,
        torch.get_num_threads(),
        collectives,
        tuple(figures),
        links,
        tuple(_notes(links, device)),
        tuple(_warnings(place, links, [*(each.figure for each in collectives), *figures])),
    )


def _machine(
    name: str,
    memory: int,
    local_ranks: int,
    links: Mapping[str, LinkFit],
    figures: Sequence[Figure],
    device: torch.device,
) -> Machine:
    by_name = {figure.name: figure for figure in figures}
    some = next(iter(links.values()))  # replaces the other link if that was not measured
    by_link = {INTRA: some, INTER: some, **links}
    bandwidth, launch = by_name[MEMORY].rate, by_name[OPERATOR].seconds
    copies = [figure for figure in figures if figure.name.startswith(COPY)]
    return Machine(
        name=name,
        memory=memory,
        flops={dtype: by_name[_product(dtype)].rate for dtype in DTYPES if _product(dtype) in by_name},
        memory_bandwidth=bandwidth,
        launch=launch,
        intra_node=by_link[INTRA].link,
        inter_node=by_link[INTER].link,
        devices_per_node=local_ranks,
        host_link=_fit(copies).link if copies else Link(bandwidth, launch),
        host_memory_bandwidth=by_name[HOST_MEMORY].rate if copies else bandwidth,
        backend="gloo" if device.type == "cpu" else "nccl",  # the backends that the planner supports
    )


def _check_nodes(place: Place) -> None:
    most, less, misplaced = _slowest(
        [place.local_ranks, -place.local_ranks, place.rank % place.local_ranks != place.local_rank]
    )
    if most != -less or place.ranks % place.local_ranks or misplaced:
        raise ShardConfigValueError(
            f"ranks: LOCAL_RANK and LOCAL_WORLD_SIZE are inconsistent with {place.ranks} ranks, {place.local_ranks} of "
            "them on this node; start the same number on each node, numbered node by node, as torchrun does"
        )


def _memory(device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank can allocate on its device."""
    if device.type == "cpu":
        return host.available_memory() // local_ranks
    free, _ = torch.get_device_module(device.type).mem_get_info(device)
    return int(free)


def _name(device: torch.device) -> str:
    return (
        host.processor_name() if device.type == "cpu" else torch.get_device_module(device.type).get_device_name(device)
    )


# --------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class _Case:
    """Work to measure: its name, the bytes or operations of one run, and whether to use the clock of the host."""

    name: str
    amount: float
    work: Callable[[], object]
    on_host: bool = False


class _Timing:
    """Measures on all ranks at the same time."""

    def __init__(self, device: torch.device, settings: Settings, progress: Progress) -> None:
        self.device = device
        self.settings = settings
        self._progress = progress

    def of(self, what: str, cases: Sequence[_Case]) -> list[Figure]:
        """Measure some cases. Their repetitions alternate."""
        rounds = self.settings.rounds
        total = (rounds + 1) * len(cases)
        counts = []
        for done, case in enumerate(cases):
            self._progress(what, done, total)
            counts.append(max(1, min(MOST_RUNS, int(self.settings.seconds / self.slowest(case)))))
        own: list[float] = []
        for done in range(len(cases), total):
            self._progress(what, done, total)
            own.append(self._once(cases[done % len(cases)], counts[done % len(cases)]))
        if cases:
            self._progress(what, total, total)
        slowest = _slowest(own)
        return [_figure(case, slowest[index :: len(cases)]) for index, case in enumerate(cases)]

    def slowest(self, case: _Case) -> float:
        """Seconds of the second run on the slowest rank. The first run is slower."""
        self._once(case, 1)
        return _slowest([self._once(case, 1)])[0]

    def _once(self, case: _Case, count: int) -> float:
        """Seconds of one run on this rank: the mean of `count` runs in a row."""
        on_host = case.on_host or self.device.type == "cpu"
        self._start_together()
        clock = _seconds_of_host if on_host else partial(_seconds_of_stream, self.device)
        return clock(case.work, count) / count

    def _start_together(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))  # a CPU tensor, so this blocks until all ranks are here


def _seconds_of_host(work: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - begin


def _seconds_of_stream(device: torch.device, work: Callable[[], object], count: int) -> float:
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _slowest(own: Sequence[float]) -> list[float]:
    """The element-wise maximum of the values of all ranks."""
    values = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def _figure(case: _Case, seconds: Sequence[float]) -> Figure:
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return Figure(case.name, case.amount, median, (third - first) / median)


# -------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True)
class _Move:
    """A collective to measure; see `Collective`."""

    link: str
    name: str
    nbytes: int
    ranks: int
    transport: str
    case: _Case


def _measured_links(
    place: Place, device: torch.device, timing: _Timing
) -> tuple[tuple[Collective, ...], dict[str, LinkFit]]:
    """Measure gathers and reductions of all sizes on each link, and fit the links."""
    largest = timing.settings.sizes[-1]
    buffers = _Buffers(*(torch.zeros(largest // _ITEM_BYTES, device=device) for _ in range(3)))
    axes = _axes(place, device)
    moves = [
        move
        for link, info in axes.items()
        for nbytes in timing.settings.sizes
        for move in _moves(link, info, nbytes, buffers)
    ]
    measured = list(zip(moves, timing.of("collectives", [move.case for move in moves]), strict=True))
    links = {link: _fit([figure for move, figure in measured if move.link == link]) for link in axes}
    return tuple(_collective(move, figure, links[move.link].link) for move, figure in measured), links


def _collective(move: _Move, figure: Figure, link: Link) -> Collective:
    seconds = link.latency + figure.amount / link.bandwidth
    return Collective(move.link, move.name, move.nbytes, move.ranks, move.transport, figure, seconds)


def _fit(figures: Sequence[Figure]) -> LinkFit:
    return fit_link([figure.amount for figure in figures], [figure.seconds for figure in figures])


def _axes(place: Place, device: torch.device) -> dict[str, MeshInfo]:
    """By link, the mesh to measure: the ranks of a node, and the ranks of all nodes with the same local rank."""
    local, nodes = place.local_ranks, place.ranks // place.local_ranks
    if local == 1 or nodes == 1:
        return {INTRA if nodes == 1 else INTER: mesh_info(init_device_mesh(device.type, (place.ranks,)))}
    mesh = init_device_mesh(device.type, (nodes, local), mesh_dim_names=("node", "local"))
    return {INTRA: mesh_info(mesh["local"]), INTER: mesh_info(mesh["node"])}


@dataclass(frozen=True)
class _Buffers:
    """Device memory that the collectives of all sizes share."""

    wholes: Tensor
    pieces: Tensor
    scratch: Tensor


def _moves(link: str, info: MeshInfo, nbytes: int, buffers: _Buffers) -> Iterator[_Move]:
    """A gather and a reduction like those of a parameter group of `nbytes`."""
    ranks = info.shard_size
    piece = max(1, nbytes // _ITEM_BYTES // ranks // PARAMETERS) * PARAMETERS
    whole = piece * ranks
    made = TransportCache().of(info, Options(), [piece * _ITEM_BYTES])
    assert made.gather is not None
    assert made.reduce is not None
    out, bucket, scratch = buffers.pieces[:piece], buffers.wholes[:whole], buffers.scratch[:whole]
    works = {
        GATHER: (made.gather, _gather(made.gather, bucket, out)),
        REDUCTION: (made.reduce, _reduction(made.reduce, out, bucket, scratch)),
    }
    for name, (transport, work) in works.items():
        case = _Case(f"{name} of {nbytes >> 10:,} KiB {link}", sent(bucket.nbytes, ranks), work)
        yield _Move(link, name, nbytes, ranks, transport.route.name, case)


def _gather(transport: Transport, whole: Tensor, piece: Tensor) -> Callable[[], object]:
    alone_from = transport.route.gather_from
    alone = alone_from is not None and piece.nbytes // PARAMETERS >= alone_from
    parts = PARAMETERS if alone else 1
    wholes, pieces = list(whole.chunk(parts)), list(piece.chunk(parts))
    return lambda: transport.all_gather(wholes, pieces).wait()


def _reduction(transport: Transport, out: Tensor, bucket: Tensor, scratch: Tensor) -> Callable[[], object]:
    extra = scratch if transport.route.sums else None
    return lambda: transport.reduce_scatter(out, bucket, extra, transport.averages).wait()


# --------------------------------------------------------------------------------------------- compute, memory


def _products(device: torch.device, timing: _Timing) -> list[_Case]:
    """The matrix products of a linear layer in forward and backward, in each dtype that the device supports."""
    lacking = _slowest([not _multiplies(dtype, device) for dtype in DTYPES.values()])
    names = [name for name, lacks in zip(DTYPES, lacking, strict=True) if not lacks]
    return [_layer(name, device, _rows(name, device, timing), timing.settings) for name in names]


def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    square = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        square @ square
    except RuntimeError:
        return False
    return True


def _rows(name: str, device: torch.device, timing: _Timing) -> int:
    """The number of rows of the linear layer, limited by the time that it may take."""
    most, _, _ = _shape(device, timing.settings)
    rows = min(_FIRST_ROWS, most)
    while rows < most and timing.slowest(_layer(name, device, rows, timing.settings)) <= timing.settings.longest / 2:
        rows *= 2
    return min(rows, most)


def _layer(name: str, device: torch.device, rows: int, settings: Settings) -> _Case:
    _, inputs, outputs = _shape(device, settings)
    dtype = DTYPES[name]
    x, weight, gradient = (
        torch.randn(shape, device=device).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )

    def work() -> None:
        x @ weight.T
        gradient @ weight
        gradient.T @ x

    return _Case(_product(name), 6 * rows * inputs * outputs, work)


def _shape(device: torch.device, settings: Settings) -> tuple[int, int, int]:
    return settings.matrices[device.type != "cpu"]


def _product(dtype: str) -> str:
    return f"{PRODUCT} in {dtype}"


def _others(device: torch.device, settings: Settings, memory: int) -> list[_Case]:
    small = torch.zeros(8, device=device, requires_grad=True)
    return [
        _addition(MEMORY, device, min(settings.memory[device.type != "cpu"], memory // 8)),
        _Case(OPERATOR, 1, lambda: small.mul(small), on_host=True),
    ]


def _addition(name: str, device: torch.device, nbytes: int) -> _Case:
    """An addition of two tensors into a third one, `nbytes` each, which should be larger than caches."""
    one, other, total = (torch.ones(nbytes // _ITEM_BYTES, device=device) for _ in range(3))
    return _Case(name, 3 * one.nbytes, lambda: torch.add(one, other, out=total), on_host=device.type == "cpu")


def _copies(device: torch.device, settings: Settings) -> list[_Case]:
    """Copies between an accelerator and pinned memory, and an addition in host memory. Empty on a CPU."""
    if device.type == "cpu":
        return []
    cases = [_addition(HOST_MEMORY, torch.device("cpu"), settings.memory[0])]
    for nbytes in settings.sizes:
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        on_host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        for way, to, source in (("to the device", on_device, on_host), ("to the host", on_host, on_device)):
            name = f"{COPY} of {nbytes >> 10:,} KiB {way}"
            cases.append(_Case(name, nbytes, partial(to.copy_, source, non_blocking=True)))
    return cases


# ----------------------------------------------------------------------------------------------------- messages


def _notes(links: Collection[str], device: torch.device) -> Iterator[str]:
    if INTER not in links:
        yield "inter_node was not measured because all ranks are on one node; the value of intra_node is used"
    if INTRA not in links:
        yield "intra_node was not measured because each node has one rank; the value of inter_node is used"
    if device.type == "cpu":
        yield "host_link was not measured because the ranks compute on CPUs; the bandwidth of their memory is used"


def _warnings(place: Place, links: Mapping[str, LinkFit], figures: Sequence[Figure]) -> Iterator[str]:
    cores, threads = host.cores(), torch.get_num_threads()
    if place.local_ranks * threads > cores:
        yield f"{place.local_ranks} ranks with {threads} threads each share {cores} cores, so they slow each other down"
    unsteady = sorted((figure for figure in figures if figure.spread > UNSTEADY), key=lambda figure: -figure.spread)
    if unsteady:
        most = ", ".join(f"{figure.name} ({figure.spread:.0%})" for figure in unsteady[:WORST])
        yield (
            f"{len(unsteady)} of {len(figures)} figures vary by more than {UNSTEADY:.0%} between repetitions, so other "
            f"work may share this machine; the most variable: {most}"
        )
    for link, fit in links.items():
        if fit.error > DOUBTFUL:
            yield f"{link}: the times do not follow latency + bytes / bandwidth: errors of up to {fit.error:.0%}"
