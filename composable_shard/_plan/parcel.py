"""The byte layout of parameter pieces that are sent in fewer bits, as integers.

A *parcel* is what one rank sends in a collective: the values of all parts, followed by the scales. A row (one index of
the sharded dim) is divided into equal blocks, and each block has a scale. Parameters with the same block size form one
part without gaps, so that one operator rounds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._policies import Wire

SHARD_ALIGNMENT_BYTES = 16
SCALE_BYTES = 4
AT_ONCE = 1 << 16  # elements (summed over ranks) that are rounded together; more if a single parameter has more
_VALUE_BYTES = {"fp8": 1, "int8": 1, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive parameters of a parcel that are sent in the same format.

    Attributes:
        form: the format of the values (``fp8``, ``int8``, ``bf16``); empty for their dtype.
        begin: byte offset of the values in the parcel.
        nbytes: bytes of the values.
        block: number of elements that share a scale; 0 if there are no scales.
        scales: byte offset of the scales in the parcel.
        members: indices of the parameters. The index after the last parameter stands for the marks.
        turn: parts with the same turn are rounded together.
    """

    form: str
    begin: int
    nbytes: int
    block: int = 0
    scales: int = 0
    members: tuple[int, ...] = (0,)
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank sends.

    Attributes:
        parts: the parts, ordered by turn.
        nbytes: bytes of the parcel, padded so that the next rank's parcel is aligned.
    """

    parts: tuple[Part, ...]
    nbytes: int


def block_of(row: int, most: int) -> int:
    """Elements of the equal blocks of a row: the largest size up to `most` that divides it, or the row."""
    for blocks in range(-(-row // most), 4 * row // most + 1):
        if row % blocks == 0:
            return row // blocks
    return row


def _cut(row: int, itemsize: int, wire: Wire) -> tuple[str, int]:
    """The format and block size in which a row is sent. The format is empty if `wire` would not save bytes."""
    size = _VALUE_BYTES[wire.form]
    block = 0 if size > 1 or row == 0 else block_of(row, wire.block)
    scales = SCALE_BYTES * (row // block) if block else 0
    return (wire.form, block) if row * size + scales < row * itemsize else ("", 0)


def parcel(
    pieces: Sequence[tuple[int, int]], itemsize: int, wire: Wire | None, marks: int = 0, ranks: int = 1
) -> Parcel | None:
    """Lay out a parcel.

    Args:
        pieces: for each parameter, the rows of a padded piece and the elements per row.
        itemsize: bytes of an element that is sent in its dtype.
        wire: the format of all other elements.
        marks: number of elements after the pieces that are sent in their dtype.
        ranks: number of parcels that are rounded, or read, together.

    Returns:
        The parcel, or None if the format would not save bytes.
    """
    if wire is None:
        return None
    kinds, numels = [_cut(row, itemsize, wire) for _, row in pieces], [rows * row for rows, row in pieces]
    if not any(form and numel for (form, _), numel in zip(kinds, numels, strict=True)):
        return None
    if marks:
        kinds, numels = [*kinds, ("", 0)], [*numels, marks]
    batches = _batches(kinds, [ranks * numel for numel in numels])
    end, parts = 0, []
    for (turn, form, block), members in batches.items():
        nbytes = sum(map(numels.__getitem__, members)) * _VALUE_BYTES.get(form, itemsize)
        parts.append(Part(form, end, nbytes, block, 0, tuple(members), turn))
        end = _aligned(end + nbytes)
    return _with_scales(parts, end)


def _with_scales(parts: Sequence[Part], end: int) -> Parcel:
    """Add the scales to the parts, starting at byte `end`."""
    placed = []
    for each in parts:
        placed.append(replace(each, scales=end if each.block else 0))
        end += SCALE_BYTES * (each.nbytes // each.block) if each.block else 0
    return Parcel(tuple(placed), _aligned(end))


def _batches(kinds: Sequence[tuple[str, int]], numels: Sequence[int]) -> dict[tuple[int, str, int], list[int]]:
    """Group the indices by turn, format and block size.

    A turn has at most as many elements as the largest parameter, or `AT_ONCE`. This bounds the memory for rounding.
    """
    batches: dict[tuple[int, str, int], list[int]] = {}
    most = max(AT_ONCE, *numels)
    turn = together = 0
    for index, (kind, numel) in enumerate(zip(kinds, numels, strict=True)):
        if together and together + numel > most:
            turn, together = turn + 1, 0
        together += numel
        batches.setdefault((turn, *kind), []).append(index)
    return batches


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SHARD_ALIGNMENT_BYTES) * SHARD_ALIGNMENT_BYTES
