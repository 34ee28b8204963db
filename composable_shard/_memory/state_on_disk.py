"""The state of an optimizer in files, and its way through memory while the optimizer steps.

Parameters whose state lies side by side in a file are a *unit*. A step goes from unit to unit in the order in which
they were made, that of the optimizer's parameters: while one is stepped, the next ones are read, and the one before is
written. Between steps the tensors of the state are mapped from the files, so whoever reads them (a checkpoint, say) has
the state of the last step, page by page, without memory of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .._errors import PoolBudgetError, ShardConfigStateError, ShardConfigTypeError
from .._policies import DiskOffloadPolicy
from .._torch.core import tree_tensors
from .._torch.distributed import dtensor_at, local_tensor
from .disk import BLOCK, THREADS, File, Files, Ring, Run, aligned, finish, trim

_LARGE = 64 << 20  # bytes of a unit, where memory allows it
_LINE = 64  # bytes to which tensors align, as torch's own do
States = MutableMapping[Any, dict[str, Any]]  # an optimizer's `state`
Parts = dict[str, torch.Tensor]
Step = Callable[[Sequence[Any], Sequence[Any]], None]  # parameters, and what is stepped in their place


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


class Place(NamedTuple):
    """Where a tensor of a state lies in its unit.

    Attributes:
        offset: in bytes, from the begin of the unit.
        dtype, size, stride: of the tensor.
        home: its bytes in the file, as memory of its own: whoever copies or pickles the tensor gets no more than these.
    """

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    home: torch.UntypedStorage

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of this kind."""
        return tensor.dtype == self.dtype and tensor.size() == self.size and tensor.stride() == self.stride

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what lies in the file."""
        return self.holds(tensor) and tensor.data_ptr() == self.home.data_ptr()

    def go_home(self, tensor: torch.Tensor) -> None:
        """Let a tensor be what lies in the file."""
        tensor.set_(self.home, 0, self.size, self.stride)

    def go(self, tensor: torch.Tensor, ring: Ring, begin: int) -> None:
        """Let a tensor be what lies in a ring, where the unit has been read to."""
        tensor.set_(ring.storage, (begin + self.offset) // self.dtype.itemsize, self.size, self.stride)

    def copy_to(self, ring: Ring, begin: int, tensor: torch.Tensor) -> None:
        """Copy another tensor of this kind to where this one lies in a ring."""
        own = torch.empty(0, dtype=self.dtype)
        self.go(own, ring, begin)
        own.copy_(tensor)

    def is_in(self, tensor: torch.Tensor, ring: Ring, begin: int) -> bool:
        """Whether a tensor is that."""
        return self.holds(tensor) and tensor.data_ptr() == ring.storage.data_ptr() + begin + self.offset


@dataclass(eq=False)
class Unit:
    """Parameters whose state lies side by side.

    Attributes:
        run: where.
        places: of the tensors of each parameter's state, by their names.
    """

    run: Run
    places: dict[torch.Tensor, dict[str, Place]]

    def holds(self, param: torch.Tensor, parts: Parts) -> bool:
        """Whether there are places for these tensors, and for no others."""
        places = self.places[param]
        return places.keys() == parts.keys() and all(places[name].holds(part) for name, part in parts.items())

    def is_home(self, param: torch.Tensor, parts: Parts) -> bool:
        """Whether these tensors are all that lies in the file for a parameter."""
        places = self.places[param]
        return places.keys() == parts.keys() and all(places[name].is_home(part) for name, part in parts.items())


class _Moves:
    """Units on their way through a ring: as many are read ahead as it has room for, and all are written behind.

    Attributes:
        ring: the memory.
    """

    def __init__(self, ring: Ring, units: deque[Unit], threads: Executor) -> None:
        self.ring = ring
        self._ahead, self._threads = units, threads
        self._reading: deque[tuple[Unit, int, list[Future[None]]]] = deque()
        self._writing: deque[list[Future[None]]] = deque()

    def begin(self) -> int:
        """Where in the ring the next unit lies, which has been read."""
        while self._writing and all(move.done() for move in self._writing[0]):
            self._give_back()
        self._read_ahead()
        while not self._reading:  # all of the memory is yet to be written
            self._give_back()
            self._read_ahead()
        _, begin, moves = self._reading[0]
        finish(moves)
        return begin

    def end(self) -> None:
        """It has been stepped."""
        unit, begin, _ = self._reading.popleft()
        self._writing.append(self.ring.write(begin, unit.run, self._threads))

    def finish(self) -> None:
        """Wait until all are written."""
        while self._writing:
            self._give_back()

    def _read_ahead(self) -> None:
        while self._ahead and (begin := self.ring.lease(self._ahead[0].run.nbytes)) is not None:
            unit = self._ahead.popleft()
            self._reading.append((unit, begin, self.ring.read(begin, unit.run, self._threads)))

    def _give_back(self) -> None:
        finish(self._writing.popleft())
        self.ring.give_back()


class Workspace:
    """The memory that optimizers with one policy use in turns.

    Attributes:
        capacity: its bytes at most.
        most: the most bytes of state that were in memory at once.
    """

    def __init__(self, memory: int) -> None:
        self.capacity = memory & -BLOCK
        self.most = 0
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._ring: Ring | None = None

    def __enter__(self) -> Workspace:
        if self._owner == threading.get_ident():
            raise ShardConfigStateError(
                "an optimizer whose state is on disk steps within the step of another one with the same policy; give "
                "them policies with different directories or memory"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ring is not None:
            self.note(self._ring.most)
            self._ring.clear()
        self._owner = None
        self._lock.release()

    def ring(self, wanted: int) -> Ring:
        """A ring for moves of so many bytes in all."""
        capacity = min(wanted, self.capacity)
        if self._ring is None or self._ring.capacity < capacity:
            self._ring = None  # its memory is free before there is more
            self._ring = Ring(capacity)
        return self._ring

    def release(self) -> None:
        """Give the memory of the ring to the system until it is used again."""
        if self._ring is not None:
            self._ring.release()

    def note(self, nbytes: int) -> None:
        """Count bytes that are in memory."""
        self.most = max(self.most, nbytes)


_workspaces: weakref.WeakValueDictionary[tuple[str, int, int], Workspace] = weakref.WeakValueDictionary()


def workspace_of(policy: DiskOffloadPolicy) -> Workspace:
    """The memory of a policy. Threads that play ranks have memory of their own: one may wait for another in a step."""
    key = str(policy.directory), policy.memory, threading.get_ident()
    return _workspaces.setdefault(key, Workspace(policy.memory))


class StateOnDisk:
    """The state of one optimizer.

    Attributes:
        loads_on_host: whether a load is to leave state on the host, and not where its parameter is.

    Args:
        policy: where it goes, and through how much memory.
        name_of: names a parameter in messages.

    Raises:
        OffloadError: the directory cannot be written in.
    """

    loads_on_host = False

    def __init__(self, policy: DiskOffloadPolicy, name_of: Callable[[torch.Tensor], str]) -> None:
        self.workspace = workspace_of(policy)
        self.files = Files(policy.directory)  # type: ignore[arg-type]  # a Path since the policy was made
        self._name_of = name_of
        self._large = most_in_a_unit(self.workspace.capacity)
        self._units: dict[torch.Tensor, Unit | None] = {}  # of each parameter; None where its state has nothing to move
        self._ratio = 0.0  # at most, of a state's bytes to its parameter's

    # ---- a step

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters.

        Args:
            states: of the optimizer.
            params: to step, in their order.
            step: steps some of them, with their state in memory.
        """
        self.keep_all(states, params)
        sections, unknown = self._sections(states, params)
        with self.workspace, ThreadPoolExecutor(THREADS, "composable_shard.offload") as threads:
            changed = self._step_sections(states, sections, step, threads)
            self._step_unknown(states, unknown, params, step)
        self.keep_all(states, changed)

    def _sections(
        self, states: States, params: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[Unit | None, list[torch.Tensor]]], list[torch.Tensor]]:
        """Parameters by unit, None where nothing is on disk, and those that have no state yet.

        The order is that in which parameters got their state. It is the same on all ranks, though their units are not:
        so steps that communicate meet.
        """
        unknown = [p for p in params if p not in self._units or (self._units[p] is not None and not states.get(p))]
        stepped = {*params}.difference(unknown)
        sections: list[tuple[Unit | None, list[torch.Tensor]]] = []
        by_unit: dict[Unit, list[torch.Tensor]] = {}
        for param, unit in self._units.items():
            if param in stepped:
                _section_of(unit, sections, by_unit).append(param)
        return sections, unknown

    def _step_sections(
        self,
        states: States,
        sections: Iterable[tuple[Unit | None, list[torch.Tensor]]],
        step: Step,
        threads: Executor,
    ) -> list[torch.Tensor]:
        """Step parameters that have state; gives those whose state has another form now."""
        units = deque(unit for unit, _ in sections if unit is not None)
        moves = _Moves(self.workspace.ring(sum(unit.run.nbytes for unit in units)), units, threads) if units else None
        changed = []
        for unit, params in sections:
            if unit is None or moves is None:
                step(params, params)
                changed += params
            else:
                changed += self._step_unit(states, unit, params, (moves.ring, moves.begin()), step)
                moves.end()
        if moves is not None:
            moves.finish()
        return changed

    def _step_unit(
        self,
        states: States,
        unit: Unit,
        params: Sequence[torch.Tensor],
        at: tuple[Ring, int],
        step: Step,
    ) -> list[torch.Tensor]:
        ring, begin = at
        for param in params:
            parts = self._parts(states[param])
            for name, place in unit.places[param].items():
                place.go(parts[name], ring, begin)
        step(params, params)
        changed = []
        for param in params:
            state = states[param]
            parts = self._parts(state)
            if not unit.holds(param, parts):
                _move_out(state, ring)
                changed.append(param)
                continue
            for name, place in unit.places[param].items():
                if place.is_in(parts[name], ring, begin):
                    place.go_home(parts[name])
                else:  # the step has made another tensor
                    place.copy_to(ring, begin, parts[name])
                    _replace(state, name, place)
        return changed

    def _step_unknown(
        self,
        states: States,
        unknown: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        step: Step,
    ) -> None:
        """Step parameters that have no state yet, one by one, and put what they get on disk."""
        if not unknown:
            return
        self.workspace.release()
        waiting: list[torch.Tensor] = []
        held = 0
        for param in unknown:
            if waiting and held + self._ratio * _nbytes(local_part(param)) > self._large:
                self._keep(states, waiting)
                waiting, held = [], 0
                trim()
            step([param], [param])
            held += self._measure(param, self._checked(param, states.get(param, {})), params)
            waiting.append(param)
            self.workspace.note(held)
        self._keep(states, waiting)
        trim()

    def _measure(self, param: torch.Tensor, parts: Parts, params: Iterable[torch.Tensor]) -> int:
        """Bytes of a parameter's state.

        Raises:
            PoolBudgetError: they do not fit into memory.
        """
        nbytes = sum(aligned(_nbytes(part), _LINE) for part in parts.values())
        own = _nbytes(local_part(param))
        if own:
            self._ratio = max(self._ratio, nbytes / own)
        if aligned(nbytes) > self.workspace.capacity:
            largest = max((_nbytes(local_part(each)) for each in params), default=own)
            least = aligned(max(nbytes, int(self._ratio * largest)))
            raise PoolBudgetError(
                f"DiskOffloadPolicy.memory: the state of {self._name_of(param)} has {nbytes:,} bytes and must be in "
                f"memory as a whole while it is stepped; memory={least} is the least that works for this optimizer",
                self._name_of(param),
                least,
            )
        return nbytes

    # ---- what is on disk

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Put on disk what is not: state that was loaded, or that somebody has put in the place of the one there.

        Raises:
            PoolBudgetError: the state of a parameter does not fit into memory.
            ShardConfigTypeError: a state holds tensors that cannot be on disk.
            OffloadError: the disk is full, or fails.
        """
        loose = [param for param in params if states.get(param) and not self._is_kept(param, states[param])]
        waiting: list[torch.Tensor] = []
        held = 0
        for param in loose:
            nbytes = self._measure(param, self._checked(param, states[param]), params)
            if waiting and held + nbytes > self._large:
                self._keep(states, waiting)
                waiting, held = [], 0
            waiting.append(param)
            held += nbytes
        self._keep(states, waiting)
        self.files.settle()

    @staticmethod
    def options(group: Mapping[str, Any]) -> dict[str, Any]:
        """What a step takes otherwise than the options of a param group say: nothing."""
        return {}

    def blank(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Of a state that a parameter could have, one whose tensors are on disk, with no values yet."""
        states: States = {param: dict(state)}
        self._measure(param, self._checked(param, state), [param])
        self._keep(states, [param])
        return states[param]

    def _is_kept(self, param: torch.Tensor, state: dict[str, Any]) -> bool:
        if param not in self._units:
            return False
        unit, parts = self._units[param], self._parts(state)
        return not parts if unit is None else unit.is_home(param, parts)

    def _keep(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Put the state of parameters on disk: where it was before if it is of the same kind, else into a new unit."""
        all_parts = {param: self._parts(states.get(param, {})) for param in params}
        known = {param: self._units.get(param) for param in params}
        new = []
        for param, parts in all_parts.items():
            unit = known[param]
            if unit is None or not unit.holds(param, parts):
                new.append(param)
        unit = self._new_unit({param: all_parts[param] for param in new})
        self._units.update(dict.fromkeys(new, unit))
        for param, parts in all_parts.items():
            unit = self._units[param]
            if unit is not None:
                self._put(states[param], unit, param, parts)

    def _new_unit(self, all_parts: Mapping[torch.Tensor, Parts]) -> Unit | None:
        if not any(all_parts.values()):
            return None
        offsets, end = [], 0
        for parts in all_parts.values():
            for part in parts.values():
                offsets.append(end)
                end += aligned(_nbytes(part), _LINE)
        file, begin = self.files.reserve(aligned(end))
        offset = iter(offsets)
        return Unit(
            Run(file, begin, aligned(end)),
            {
                param: {name: _place(part, file, begin, next(offset)) for name, part in parts.items()}
                for param, parts in all_parts.items()
            },
        )

    def _put(self, state: dict[str, Any], unit: Unit, param: torch.Tensor, parts: Parts) -> None:
        """Write the tensors of a state that are not there into their places, and map them from there."""
        file, begin = unit.run.file, unit.run.offset
        for name, place in unit.places[param].items():
            if not place.is_home(parts[name]):
                file.put(_bytes_of(parts[name]), begin + place.offset)
                _replace(state, name, place)

    def _parts(self, state: Mapping[str, Any]) -> Parts:
        """The tensors of a state that are on disk, or are to be there: of this rank, without those of one number."""
        return {name: local_part(value) for name, value in state.items() if _moves(value)}

    def _checked(self, param: torch.Tensor, state: dict[str, Any]) -> Parts:
        """The same, after whatever cannot be on disk was refused; what has gaps is copied."""
        for name, value in state.items():
            tensors = [value] if isinstance(value, torch.Tensor) else tree_tensors(value)
            for tensor in filter(_moves, tensors):
                self._check(f"state {name!r} of {self._name_of(param)}", value, local_part(tensor))
            if _moves(value) and not _is_dense(local_part(value)):
                state[name] = _like(value, local_part(value).contiguous())
        return self._parts(state)

    def _check(self, where: str, value: Any, local: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise ShardConfigTypeError(
                f"{where} is a {type(value).__name__} of tensors; only tensors by name can be on disk, so leave "
                f"DiskOffloadPolicy out for this optimizer"
            )
        if type(local) is not torch.Tensor:
            raise ShardConfigTypeError(f"{where} is a {type(local).__name__}; only plain tensors can be on disk")
        if local.device.type != "cpu":
            raise ShardConfigTypeError(
                f"{where} is on {local.device}; an optimizer with state on disk steps on the CPU, so shard with "
                "fully_shard(..., offload_policy=DiskOffloadPolicy(...)), which keeps shards there"
            )


def most_in_a_unit(memory: int) -> int:
    """Bytes of state that a unit has at most, where a policy allows so much memory; a parameter may have more."""
    return max(BLOCK, min(_LARGE, memory // 4 & -BLOCK))


def bytes_on_disk(state: Mapping[str, Any]) -> int:
    """Bytes of a parameter's state that are read and written in a step."""
    return sum(aligned(_nbytes(local_part(value)), _LINE) for value in state.values() if _moves(value))


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and local_part(value).numel() > 0


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every byte between the first and the last belongs to one element."""
    dims = sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor on the CPU."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor like `value`, of which this rank has `local`."""
    return dtensor_at(local, value.device_mesh, value.placements, value) if isinstance(value, DTensor) else local


def _place(part: torch.Tensor, file: File, begin: int, offset: int) -> Place:
    """The place of a tensor, so far behind the begin of its unit in a file."""
    home = file.part(begin + offset, _nbytes(part))
    return Place(offset, part.dtype, part.size(), part.stride(), home)


def _replace(state: dict[str, Any], name: str, place: Place) -> None:
    """Put a tensor of our own, which lies in the file, where a step or a load has put another one.

    The other one stays as it is: it may be somebody's, a gradient say.
    """
    own = torch.empty(0, dtype=place.dtype)
    place.go_home(own)
    state[name] = _like(state[name], own)


def _move_out(state: dict[str, Any], ring: Ring) -> None:
    """Copy what lies in a ring, whose memory is about to be another's."""
    for name, value in state.items():
        if _moves(value) and local_part(value).untyped_storage().data_ptr() == ring.storage.data_ptr():
            state[name] = _like(value, local_part(value).clone())


def _section_of(
    unit: Unit | None, sections: list[tuple[Unit | None, list[torch.Tensor]]], by_unit: dict[Unit, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """The parameters of a unit, which are one section; of those without one, each run of them is."""
    if unit is None:
        if not sections or sections[-1][0] is not None:
            sections.append((None, []))
        return sections[-1][1]
    if unit not in by_unit:
        by_unit[unit] = []
        sections.append((unit, by_unit[unit]))
    return by_unit[unit]
