"""Optimizer state in files, which a step reads into memory, updates and writes back.

A *unit* is the set of parameters whose state is contiguous in a file. A step processes units in the order in
which their parameters first got state. That is the order of the optimizer's parameters, except for those that got
gradients later than others. While one unit is stepped, the next units are read and the
previous unit is written. Between steps, the tensors of the state are mapped from the files. A reader, such as a
checkpoint, therefore sees the state of the last step, and the system loads it page by page.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .._policies import DiskOffloadPolicy
from .._torch.core import tree_tensors
from .._torch.distributed import dtensor_at, local_part
from ..errors import PoolBudgetError, ShardConfigStateError, ShardConfigTypeError
from .disk import BLOCK, THREADS, File, Files, Ring, Run, aligned, finish, trim

_LARGE = 64 << 20  # bytes of a unit, if memory allows it
_LINE = 64  # alignment of tensors in bytes, as in torch
States = MutableMapping[Any, dict[str, Any]]  # an optimizer's `state`
Parts = dict[str, torch.Tensor]
Step = Callable[[Sequence[Any], Sequence[Any]], None]  # parameters, and the tensors that are stepped instead


class Place(NamedTuple):
    """The location of a state tensor in its unit.

    Attributes:
        offset: offset in the unit in bytes.
        dtype, size, stride: properties of the tensor.
        home: a storage for the tensor's bytes in the file. It contains nothing else, so copying or pickling the tensor
            does not include other tensors.
    """

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    home: torch.UntypedStorage

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this dtype, size and stride."""
        return tensor.dtype == self.dtype and tensor.size() == self.size and tensor.stride() == self.stride

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is mapped from this place in the file."""
        return self.holds(tensor) and tensor.data_ptr() == self.home.data_ptr()

    def go_home(self, tensor: torch.Tensor) -> None:
        """Map a tensor from the file."""
        tensor.set_(self.home, 0, self.size, self.stride)

    def go(self, tensor: torch.Tensor, ring: Ring, begin: int) -> None:
        """Make a tensor use the ring's memory, into which the unit has been read at `begin`."""
        tensor.set_(ring.storage, (begin + self.offset) // self.dtype.itemsize, self.size, self.stride)

    def copy_to(self, ring: Ring, begin: int, tensor: torch.Tensor) -> None:
        """Copy a tensor with the same dtype, size and stride into the ring's memory for this place."""
        own = torch.empty(0, dtype=self.dtype)
        self.go(own, ring, begin)
        own.copy_(tensor)

    def is_in(self, tensor: torch.Tensor, ring: Ring, begin: int) -> bool:
        """Whether a tensor uses the ring's memory for this place."""
        return self.holds(tensor) and tensor.data_ptr() == ring.storage.data_ptr() + begin + self.offset


@dataclass(eq=False)
class Unit:
    """Parameters whose state is contiguous in a file.

    Attributes:
        run: the range in the file.
        places: for each parameter, the places of its state tensors by name.
    """

    run: Run
    places: dict[torch.Tensor, dict[str, Place]]

    def holds(self, param: torch.Tensor, parts: Parts) -> bool:
        """Whether the parameter's places match exactly these tensors."""
        places = self.places[param]
        return places.keys() == parts.keys() and all(places[name].holds(part) for name, part in parts.items())

    def is_home(self, param: torch.Tensor, parts: Parts) -> bool:
        """Whether these tensors are exactly the parameter's tensors, mapped from the file."""
        places = self.places[param]
        return places.keys() == parts.keys() and all(places[name].is_home(part) for name, part in parts.items())


class _Moves:
    """Moves units through a ring. It reads ahead as many units as fit, and writes units after they were stepped.

    Attributes:
        ring: the ring buffer.
    """

    def __init__(self, ring: Ring, units: deque[Unit], threads: Executor) -> None:
        self.ring = ring
        self._ahead, self._threads = units, threads
        self._reading: deque[tuple[Unit, int, list[Future[None]]]] = deque()
        self._writing: deque[list[Future[None]]] = deque()

    def begin(self) -> int:
        """Wait until the next unit has been read. Returns its offset in the ring."""
        while self._writing and all(move.done() for move in self._writing[0]):
            self._give_back()
        self._read_ahead()
        while not self._reading:  # the whole ring waits to be written
            self._give_back()
            self._read_ahead()
        _, begin, moves = self._reading[0]
        finish(moves)
        return begin

    def end(self) -> None:
        """Start to write the current unit, which has been stepped."""
        unit, begin, _ = self._reading.popleft()
        self._writing.append(self.ring.write(begin, unit.run, self._threads))

    def finish(self) -> None:
        """Wait until all units have been written."""
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
    """The memory for state on disk. All optimizers with an equal policy share it and use it one at a time.

    Attributes:
        capacity: limit in bytes.
        most: peak bytes of state in memory.
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
                "an optimizer with state on disk steps within the step of another one with the same policy; use "
                "policies with different `directory` or `memory`"
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
        """A ring for moving `wanted` bytes in total, limited by `capacity`."""
        capacity = min(wanted, self.capacity)
        if self._ring is None or self._ring.capacity < capacity:
            self._ring = None  # free the old memory before allocating the new
            self._ring = Ring(capacity)
        return self._ring

    def release(self) -> None:
        """Return the memory of the ring to the system until it is used again."""
        if self._ring is not None:
            self._ring.release()

    def note(self, nbytes: int) -> None:
        """Update `most` with the current bytes in memory."""
        self.most = max(self.most, nbytes)


_workspaces: weakref.WeakValueDictionary[tuple[str, int, int], Workspace] = weakref.WeakValueDictionary()


def workspace_of(policy: DiskOffloadPolicy) -> Workspace:
    """The memory of a policy in the current thread.

    Threads that simulate ranks each have their own, because one may wait for another during a step.
    """
    key = str(policy.directory), policy.memory, threading.get_ident()
    return _workspaces.setdefault(key, Workspace(policy.memory))


class StateKeeper:
    """Stores the offloaded state of an optimizer. A step moves the state to the parameters, or the other way round.

    Attributes:
        loads_on_host: whether a load leaves state on the host, instead of on the device of its parameter.
    """

    loads_on_host = False

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters by calls of `step` with some of them."""
        raise NotImplementedError

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Move the state of parameters to where it is stored, for example after a load."""
        raise NotImplementedError

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a step that replace those of a param group."""
        return {}


class StateOnDisk(StateKeeper):
    """The state of one optimizer on disk.

    Args:
        policy: the directory of the files, and the limit of memory.
        name_of: returns the name of a parameter for messages.

    Raises:
        OffloadError: the directory is not writable.
    """

    def __init__(self, policy: DiskOffloadPolicy, name_of: Callable[[torch.Tensor], str]) -> None:
        self.workspace = workspace_of(policy)
        self.files = Files(policy.directory)  # type: ignore[arg-type]  # a Path since the policy was made
        self._name_of = name_of
        self._large = most_in_a_unit(self.workspace.capacity)
        self._units: dict[torch.Tensor, Unit | None] = {}  # None if the parameter's state has no tensors on disk
        self._ratio = 0.0  # the highest ratio of a state's bytes to its parameter's bytes

    # ---- a step

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters.

        Args:
            states: the state of the optimizer.
            params: the parameters to step, in the optimizer's order.
            step: steps some of the parameters, with their state in memory.
        """
        self.keep_all(states, params)
        sections, unknown = self._sections(states, params)
        self.files.settle()  # reads bypass the page cache, and `_sections` may have moved state
        with self.workspace, ThreadPoolExecutor(THREADS, "composable_shard.offload") as threads:
            changed = self._step_sections(states, sections, step, threads)
            self._step_unknown(states, unknown, params, step)
        self.keep_all(states, changed)

    def _sections(
        self, states: States, params: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[Unit | None, list[torch.Tensor]]], list[torch.Tensor]]:
        """The parameters in sections with their unit (None if nothing is on disk), and the parameters without state.

        Parameters are in the order in which they got their state. Units differ between ranks, but this order does not,
        so ranks stay aligned if a step communicates.
        """
        unknown = [p for p in params if p not in self._units or (self._units[p] is not None and not states.get(p))]
        stepped = {*params}.difference(unknown)
        sections: list[tuple[Unit | None, list[torch.Tensor]]] = []
        seen: set[Unit] = set()
        for unit, members in groupby([param for param in self._units if param in stepped], self._units.__getitem__):
            part = [*members]
            # After the state of a parameter has moved, its old unit may have parameters before and after it. A step of
            # that whole unit would change the order, so the part after it becomes a unit of its own.
            if unit in seen:
                unit = self._move(states, part)
            if unit is not None:
                seen.add(unit)
            sections.append((unit, part))
        return sections, unknown

    def _step_sections(
        self,
        states: States,
        sections: Iterable[tuple[Unit | None, list[torch.Tensor]]],
        step: Step,
        threads: Executor,
    ) -> list[torch.Tensor]:
        """Step parameters with state. Returns the parameters whose state must be put into units again.

        These are the ones of sections without a unit, and the ones whose state has other names, dtypes or shapes.
        """
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
                else:  # the step has replaced the tensor
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
        """Step parameters without state one at a time, and move their new state to disk."""
        if not unknown:
            return
        self.workspace.release()
        waiting: list[torch.Tensor] = []
        held = 0
        for param in unknown:
            if waiting and held + self._ratio * local_part(param).nbytes > self._large:
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
            PoolBudgetError: the state does not fit into `DiskOffloadPolicy.memory`.
        """
        nbytes = sum(aligned(part.nbytes, _LINE) for part in parts.values())
        own = local_part(param).nbytes
        if own:
            self._ratio = max(self._ratio, nbytes / own)
        if aligned(nbytes) > self.workspace.capacity:
            largest = max((local_part(each).nbytes for each in params), default=own)
            least = aligned(max(nbytes, int(self._ratio * largest)))
            raise PoolBudgetError(
                f"DiskOffloadPolicy.memory: the state of {self._name_of(param)} has {nbytes:,} bytes and must fit into "
                f"memory while it is stepped; set memory to at least {least} for this optimizer",
                self._name_of(param),
                least,
            )
        return nbytes

    # ---- state on disk

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Move state to disk if it is not there, for example after a load or after user code has replaced it.

        Raises:
            PoolBudgetError: the state of a parameter does not fit into `DiskOffloadPolicy.memory`.
            ShardConfigTypeError: a state has tensors that cannot be stored on disk.
            OffloadError: the disk is full, or a write failed.
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

    def blank(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Create state on disk for a parameter without state, with the names, dtypes, shapes and values of `state`."""
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
        """Move the state of parameters to disk: to its previous place if that matches, otherwise into a new unit."""
        new = []
        for param in params:
            unit, parts = self._units.get(param), self._parts(states.get(param, {}))
            if unit is not None and unit.holds(param, parts):
                self._put(states[param], unit, param, parts)
            else:
                new.append(param)
        self._move(states, new)

    def _move(self, states: States, params: Sequence[torch.Tensor]) -> Unit | None:
        """Move the state of parameters into a new unit, and return it; None if none of it belongs on disk."""
        all_parts = {param: self._parts(states.get(param, {})) for param in params}
        unit = self._new_unit(all_parts)
        self._units.update(dict.fromkeys(params, unit))
        if unit is not None:
            for param, parts in all_parts.items():
                self._put(states[param], unit, param, parts)
        return unit

    def _new_unit(self, all_parts: Mapping[torch.Tensor, Parts]) -> Unit | None:
        if not any(all_parts.values()):
            return None
        offsets, end = [], 0
        for parts in all_parts.values():
            for part in parts.values():
                offsets.append(end)
                end += aligned(part.nbytes, _LINE)
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
        """Write those tensors of a state that are not on disk to their places, and map them from the file."""
        file, begin = unit.run.file, unit.run.offset
        for name, place in unit.places[param].items():
            if not place.is_home(parts[name]):
                file.put(_bytes_of(parts[name]), begin + place.offset)
                _replace(state, name, place)

    def _parts(self, state: Mapping[str, Any]) -> Parts:
        """The local tensors of a state that belong on disk. Scalars and empty tensors stay in memory."""
        return {name: local_part(value) for name, value in state.items() if _moves(value)}

    def _checked(self, param: torch.Tensor, state: dict[str, Any]) -> Parts:
        """`_parts`, after checking that the tensors can be on disk. Tensors with gaps are replaced by dense copies."""
        for name, value in state.items():
            tensors = [value] if isinstance(value, torch.Tensor) else tree_tensors(value)
            for tensor in filter(_moves, tensors):
                self._check(f"state {name!r} of {self._name_of(param)}", value, local_part(tensor))
            if _moves(value) and not _is_dense(local_part(value)):
                state[name] = wrap_like(value, local_part(value).contiguous())
        return self._parts(state)

    def _check(self, where: str, value: Any, local: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise ShardConfigTypeError(
                f"{where} is a {type(value).__name__} of tensors; only tensors can be stored on disk, not containers. "
                "Do not use DiskOffloadPolicy for this optimizer"
            )
        if type(local) is not torch.Tensor:
            raise ShardConfigTypeError(f"{where} is a {type(local).__name__}; only plain tensors can be stored on disk")
        if local.device.type != "cpu":
            raise ShardConfigTypeError(
                f"{where} is on {local.device}, but an optimizer with state on disk steps on the CPU; keep the shards "
                "on the CPU with fully_shard(..., offload_policy=DiskOffloadPolicy(...))"
            )


def most_in_a_unit(memory: int) -> int:
    """Limit in bytes for the state of a unit, given the memory of a policy. A unit of one parameter may be larger."""
    return max(BLOCK, min(_LARGE, memory // 4 & -BLOCK))


def bytes_on_disk(state: Mapping[str, Any]) -> int:
    """Bytes of a parameter's state that a step reads and writes."""
    return sum(aligned(local_part(value).nbytes, _LINE) for value in state.values() if _moves(value))


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and local_part(value).numel() > 0


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
    """The memory of a dense CPU tensor as bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def wrap_like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local`, in a DTensor if `value` is one."""
    return dtensor_at(local, value.device_mesh, value.placements, value) if isinstance(value, DTensor) else local


def _place(part: torch.Tensor, file: File, begin: int, offset: int) -> Place:
    """The place of a tensor at `offset` in a unit that begins at `begin` in a file."""
    home = file.part(begin + offset, part.nbytes)
    return Place(offset, part.dtype, part.size(), part.stride(), home)


def _replace(state: dict[str, Any], name: str, place: Place) -> None:
    """Replace a state tensor, which a step or a load has set, by a new tensor that is mapped from the file.

    The old tensor is not modified, because other code may use it. For example, it may be a gradient.
    """
    own = torch.empty(0, dtype=place.dtype)
    place.go_home(own)
    state[name] = wrap_like(state[name], own)


def _move_out(state: dict[str, Any], ring: Ring) -> None:
    """Copy those tensors of a state that use the ring's memory, because the ring will be reused."""
    for name, value in state.items():
        if _moves(value) and local_part(value).untyped_storage().data_ptr() == ring.storage.data_ptr():
            state[name] = wrap_like(value, local_part(value).clone())
