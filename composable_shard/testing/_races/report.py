"""Races as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch

from ..._torch import collective_mode
from .memory import Clash, Operator, Stack

_SHOWN = 8
_LIBRARY = Path(__file__).parents[2]
# These run between an operator and the code that calls it.
_BETWEEN = str(Path(__file__).parents[1]), collective_mode.__file__
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Place:
    """Where an operator was launched.

    Attributes:
        user: the innermost line outside of torch and this library, as ``file.py:3 function``; empty if there is none.
        library: the innermost line of this library, in the same form.
        node: name of the autograd node that ran; empty outside of backward.
    """

    user: str = ""
    library: str = ""
    node: str = ""


@dataclass(frozen=True)
class Access:
    """One of the two accesses of a race.

    Attributes:
        operator: name of the operator or collective: ``aten.mul.Tensor``, ``all_gather``.
        stream: name of its stream.
        writes: True if it writes, False if it reads.
        place: where it was launched.
    """

    operator: str
    stream: str
    writes: bool
    place: Place

    def __str__(self) -> str:
        return f"{self.operator} {'writes' if self.writes else 'reads'} on stream {self.stream!r}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory that no event orders. `str` gives both accesses and the missing wait.

    Attributes:
        shape, dtype: of the tensor of the second access, or of the tensor that was freed.
        name: name of the data, for example ``weight blocks.0.norm.weight``; empty if it is of no sharded model.
        offset: offset of the shared bytes in their allocation, in bytes.
        nbytes: number of bytes that both accesses share.
        address: address of the first of these bytes.
        first, then: the accesses, in the order in which the program launched them.
        reuses: whether `then` does not use the tensor, but may reuse its freed memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    offset: int
    nbytes: int
    address: int
    first: Access
    then: Access
    reuses: bool

    @property
    def missing(self) -> str:
        """Description of the missing wait."""
        return (
            f"stream {self.then.stream!r} has to wait for an event that was recorded on stream {self.first.stream!r} "
            f"after {self.first.operator}"
        )

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        name = f" of {self.name}" if self.name else ""
        end = self.offset + self.nbytes
        where = f"bytes {self.offset} to {end} of the allocation, at {self.address:#x}"
        lines = [
            f"{kind} {list(self.shape)}{name}: {where}",
            f"  first {self.first}",
            *_lines_of(self.first.place),
            f"  then  {self._second()}",
            *_lines_of(self.then.place),
            f"  missing: {self.missing}",
        ]
        if self.reuses:
            lines.append("           before the tensor is freed; or call tensor.record_stream for that stream")
        return "\n".join(lines)

    def _second(self) -> str:
        if not self.reuses:
            return str(self.then)
        return f"{self.then.operator} on stream {self.then.stream!r} may reuse the memory, which was freed"


def _lines_of(place: Place) -> list[str]:
    node = [f"in the backward of {place.node}"] if place.node else []
    return [f"        {line}" for line in filter(None, [place.library, place.user, *node])]


class Races:
    """The races of a program, one for each pair of operators, streams and source lines.

    Args:
        name: returns the name of the data at an address.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._races: dict[tuple[object, ...], Race] = {}

    def add(self, clash: Clash) -> None:
        """Add the race of a clash, unless it is known."""
        first, then = _access(clash.first, clash.first_writes), _access(clash.then, clash.then_writes)
        key = first, then, clash.reuses
        if key not in self._races:
            name, where = self._name(clash.address), (clash.offset, clash.nbytes, clash.address)
            self._races[key] = Race(*clash.tensor, name, *where, first, then, clash.reuses)

    def all(self) -> tuple[Race, ...]:
        """The races so far."""
        return tuple(self._races.values())


def _access(operator: Operator, writes: bool) -> Access:
    return Access(operator.name, operator.stream.name, writes, place_of(operator.stack))


def place_of(stack: Stack) -> Place:
    """The lines of the program and of the library in a call stack."""
    user = library = ""
    for code, line in stack.lines:
        file = code.co_filename
        if file.startswith(str(_LIBRARY)):
            library = library or ("" if file.startswith(_BETWEEN) else _line(code, line, _LIBRARY.parent))
        elif not file.startswith((_TORCH, "<frozen")):
            user = _line(code, line, Path(file).parent)
            break
    return Place(user, library, stack.node)


def _line(code: CodeType, line: int, root: Path) -> str:
    return f"{Path(code.co_filename).relative_to(root).as_posix()}:{line} {code.co_name}"


def text_of(races: Sequence[Race]) -> str:
    """The report of races: the first ones in full, and the number of the others."""
    lines = [f"{len(races)} race{'s' if len(races) > 1 else ''}: accesses to the same memory that no event orders"]
    lines += [str(race) for race in races[:_SHOWN]]
    if len(races) > _SHOWN:
        lines.append(f"and {len(races) - _SHOWN} more")
    return "\n".join(lines)
