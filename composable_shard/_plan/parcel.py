"""How the pieces of parameters travel in fewer bits: integers only.

A *parcel* is what one rank sends in a collective: for each parameter its values, then, behind those of all parameters,
the scales. Rows, the indices of the dim that is cut, are cut into equal blocks, each of which has a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._policies import Wire

SHARD_ALIGNMENT_BYTES = 16
SCALE_BYTES = 4
_VALUE_BYTES = {"fp8": 1, "int8": 1, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter in a parcel.

    Attributes:
        form: what its values travel as; empty if as they are.
        begin: byte at which they begin.
        nbytes: how many bytes they are.
        block: elements that share a scale; 0 if there are none.
        scales: byte at which the scales begin.
    """

    form: str
    begin: int
    nbytes: int
    block: int = 0
    scales: int = 0


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank sends.

    Attributes:
        parts: of the parameters, and behind them, in a reduction, of the marks.
        nbytes: of all of it, so that the next rank's is aligned.
    """

    parts: tuple[Part, ...]
    nbytes: int


def block_of(row: int, most: int) -> int:
    """Elements of the equal blocks into which a row is cut: the most that `most` allows, or else the whole row."""
    for blocks in range(-(-row // most), 4 * row // most + 1):
        if row % blocks == 0:
            return row // blocks
    return row


def _cut(row: int, itemsize: int, wire: Wire) -> tuple[str, int]:
    """What a row of numbers travels as, and its blocks; as it is where that takes no more bytes."""
    size = _VALUE_BYTES[wire.form]
    block = 0 if size > 1 or row == 0 else block_of(row, wire.block)
    scales = SCALE_BYTES * (row // block) if block else 0
    return (wire.form, block) if row * size + scales < row * itemsize else ("", 0)


def parcel(pieces: Sequence[tuple[int, int]], itemsize: int, wire: Wire | None, marks: int = 0) -> Parcel | None:
    """Lay a parcel out; None if nothing in it would become smaller.

    Args:
        pieces: rows of a padded piece of each parameter, and elements of a row.
        itemsize: bytes of an element that travels as it is.
        wire: what the others travel as.
        marks: elements behind the pieces, which travel as they are.
    """
    if wire is None:
        return None
    values = [_values(rows, row, itemsize, wire) for rows, row in pieces]
    if not any(each.form and each.nbytes for each in values):
        return None
    values += [Part("", 0, marks * itemsize)] if marks else []
    end, parts = 0, []
    for each in values:
        parts.append(replace(each, begin=end))
        end = _aligned(end + each.nbytes)
    for index, each in enumerate(parts):
        if each.block:
            parts[index] = replace(each, scales=end)
            end += SCALE_BYTES * (each.nbytes // each.block)
    return Parcel(tuple(parts), _aligned(end))


def _values(rows: int, row: int, itemsize: int, wire: Wire) -> Part:
    """What rows travel as, wherever that will be."""
    form, block = _cut(row, itemsize, wire)
    return Part(form, 0, rows * row * _VALUE_BYTES.get(form, itemsize), block)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SHARD_ALIGNMENT_BYTES) * SHARD_ALIGNMENT_BYTES
