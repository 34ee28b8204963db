"""How the pieces of parameters travel in fewer bits: integers only.

A *parcel* is what one rank sends in a collective: parts, and behind the values of all of them the scales. Rows, the
indices of the dim that is cut, are cut into equal blocks, each of which has a scale. Parameters whose blocks are of one
size are one part, without gaps, so that one operator rounds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._policies import Wire

SHARD_ALIGNMENT_BYTES = 16
SCALE_BYTES = 4
AT_ONCE = 1 << 16  # numbers of all ranks that are rounded together in any case; more if a parameter has more
_VALUE_BYTES = {"fp8": 1, "int8": 1, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """Some parameters in a parcel that travel alike, one behind the other.

    Attributes:
        form: what their values travel as; empty if as they are.
        begin: byte at which they begin.
        nbytes: how many bytes they are.
        block: elements that share a scale; 0 if there are none.
        scales: byte at which the scales begin.
        members: indices of the parameters; that behind the last one stands for the marks.
        turn: parts of equal turns are rounded together.
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
        parts: by turn.
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


def parcel(
    pieces: Sequence[tuple[int, int]], itemsize: int, wire: Wire | None, marks: int = 0, ranks: int = 1
) -> Parcel | None:
    """Lay a parcel out; None if nothing in it would become smaller.

    Args:
        pieces: rows of a padded piece of each parameter, and elements of a row.
        itemsize: bytes of an element that travels as it is.
        wire: what the others travel as.
        marks: elements behind the pieces, which travel as they are.
        ranks: how many parcels are rounded, or read, together.
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
    """The parcel of these parts, with their scales from byte `end` on."""
    placed = []
    for each in parts:
        placed.append(replace(each, scales=end if each.block else 0))
        end += SCALE_BYTES * (each.nbytes // each.block) if each.block else 0
    return Parcel(tuple(placed), _aligned(end))


def _batches(kinds: Sequence[tuple[str, int]], numels: Sequence[int]) -> dict[tuple[int, str, int], list[int]]:
    """Indices of what travels alike, by turn, form and block.

    A turn is of no more numbers than the largest parameter has, or `AT_ONCE`: so it takes no more memory than that one.
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
