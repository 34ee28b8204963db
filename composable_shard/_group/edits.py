"""Writes to unsharded parameters: resharding loses them, so they are errors, unless they have changed no value.

A version that has risen shows that a tensor was written to, but not whether values have changed.
`torch.nn.utils.parametrize` sets a parameter onto itself, a clamp may find nothing to clamp. So where versions have
risen, sums over the bits of the weights are compared with those of the weights as they were gathered: a sum of every
row and one of every column. A write that keeps all of them is not met by chance.

Sums are taken at the first gather of a bucket, and then at each gather of the parameters that were ever written to.
So a program that writes in every forward is judged from its first one on, and a step without writes computes nothing.
If the first write comes later, there are no sums, and the weights are gathered again into the same memory. The ledger
of actions (`_faults/`) makes it an error if not all ranks do so.

Each rank judges its whole copies, not only its own rows. So ranks that have made the same write come to the same
verdict, whosever rows it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from .._errors import ComposableShardError, StaleStateError
from .faces import Leaves

_version = attrgetter("_version")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_EDITED = -1  # a version that no tensor has


class BitSums(NamedTuple):
    """Sums over the bits of one weight, read as integers: two 1-D tensors on the weight's device."""

    rows: torch.Tensor
    columns: torch.Tensor

    def differ(self, other: BitSums) -> torch.Tensor:
        """A bool tensor on the device."""
        return (self.rows != other.rows).any() | (self.columns != other.columns).any()


def bit_sums(weight: torch.Tensor) -> BitSums:
    """The sums of a contiguous weight of any dtype, in which the last dim is a row; sums overflow."""
    row = weight.shape[-1] if weight.ndim and weight.numel() else 1
    numbers = weight.detach().view(-1, row).view(torch.uint8)
    # As large ones as fit: sums of 8 bytes are twenty times faster on a CPU than sums for which 4 are converted to 8.
    wide = next(dtype for dtype in _INTEGERS if numbers.shape[1] % dtype.itemsize == 0)
    if numbers.storage_offset() % wide.itemsize:
        numbers = numbers.clone()
    numbers = numbers.view(wide)
    dtype = wide if wide.itemsize >= 4 else torch.int64
    return BitSums(numbers.sum(1, dtype=dtype), numbers.sum(0, dtype=dtype))


class Writes:
    """What was written to the unsharded parameters of one bucket, as far as versions tell.

    Args:
        count: the number of parameters.

    Attributes:
        gathered: by index, sums of weights as they were gathered.
        packed: the places of the handles that the running forward has made of leaves, and the versions of these.
        rewritten: by index, versions of the weights that were written to until the backward of a use began.
        looked_at: the outputs of a use, if the running backward has read a weight of it; else None.
        noted: the outputs of the use that backward has reached, of which `rewritten` tells; None if there is none.
        unwritten: the outputs of a use whose weights were not written to, so that reads need no check; else None.
        sums_next: indices of the weights whose sums the next gather takes.
    """

    __slots__ = ("_ended", "_ever", "gathered", "looked_at", "noted", "packed", "rewritten", "sums_next", "unwritten")

    def __init__(self, count: int) -> None:
        self.gathered: dict[int, BitSums] = {}
        self.packed: list[tuple[Any, int]] = []
        self.rewritten: dict[int, int] = {}
        self._ended: Sequence[torch.Tensor] = ()  # the outputs of the last use, if it has written to some
        # Indices of the parameters whose versions have ever risen; the same set object, which `sums_next` becomes.
        self._ever: set[int] = set()
        self.noted: Sequence[torch.Tensor] | None = None
        self.looked_at: Sequence[torch.Tensor] | None = None
        self.unwritten: Sequence[torch.Tensor] | None = None
        self.sums_next: Iterable[int] = range(count)

    def note_gathered(self, sums: dict[int, BitSums]) -> None:
        """A gather is done: these are the sums of the weights in `sums_next`."""
        self.gathered, self.sums_next = sums, self._ever

    def note_shown(self, shown: Sequence[torch.Tensor]) -> None:
        """A forward that is over has written to some of these, the outputs of its node."""
        self._ended = shown

    def risen(self, leaves: Leaves | None) -> dict[int, list[torch.Tensor]]:
        """By index, the output and the leaf of each parameter, if their versions have risen since the gather."""
        written = {index: [out] for index, out in enumerate(self._ended) if out._version}
        if leaves is not None:
            for index in leaves.written():
                written.setdefault(index, []).append(leaves.params[index])
        return written

    def note_risen(self, indices: set[int]) -> None:
        """The versions of these parameters have risen: each gather takes their sums from now on."""
        self._ever |= indices

    def accept(self) -> None:
        """What was written so far is judged."""
        self._ended = ()  # each use has outputs of its own, which are judged once
        self.packed.clear()

    def begin_reads(self, shown: Sequence[torch.Tensor], leaves: Leaves | None) -> None:
        """Backward reaches a use: note what was written to until now, for all reads of its weights.

        A checkpoint may recompute before the first read, and repeats writes that were judged when the forward ended.

        Args:
            shown: the outputs of the node. A write to one before it was saved was judged, so a weight was edited if it
                has another version now than when it was saved.
            leaves: those over the memory of the weights, if any were made.
        """
        rewritten: dict[int, int] = {}
        if any(map(_version, shown)):
            rewritten = {index: out._version for index, out in enumerate(shown) if out._version}
        if leaves is not None:
            rewritten |= dict.fromkeys(leaves.written(), _EDITED)
        self.rewritten, self.noted = rewritten, shown
        self.unwritten = None if rewritten else shown

    def look_at(self, shown: Sequence[torch.Tensor], leaves: Leaves | None) -> dict[int, int]:
        """Check for writes when a weight is read; once per use without writes, as a check costs as much as a read.

        Args:
            shown, leaves: as of `begin_reads`.

        Returns:
            `rewritten`. If it is empty, later reads of this use need no check; see `unwritten`.
        """
        if shown is not self.noted:
            self.begin_reads(shown, leaves)
        if not self.rewritten:
            self.unwritten = shown
        self.looked_at = shown
        return self.rewritten

    def await_read(self) -> None:
        """Make the next read of a weight call `look_at`, which notes that the use has been read."""
        self.unwritten = None

    def end_reads(self) -> None:
        """The backward of a use is over: the next one looks for edits again."""
        self.looked_at = self.noted = self.unwritten = None


class Edited(Protocol):
    """A bucket, as far as its edits go.

    Attributes:
        fqns: names of its parameters.
        writes: what was written to them.
    """

    fqns: list[str]
    writes: Writes

    def risen(self) -> set[int]:
        """Indices of the parameters whose versions have risen since they were gathered."""

    def sums(self, indices: Iterable[int]) -> dict[int, BitSums]:
        """Sums of these weights as they are now.

        Left out are those that were moved, that a forward has saved before the last write to them (it may have computed
        with other values), and those whose bits are not comparable.
        """

    def accept(self, edited: Collection[int] = ()) -> None:
        """What was written so far is judged: only later writes count, and edits of the weights with these indices."""


def changed(buckets: Sequence[Edited], gather_again: Callable[[], None]) -> list[str]:
    """FQNs of the unsharded parameters whose values have changed since they were gathered; all others are accepted.

    Waits for the device if any version has risen.

    Args:
        buckets: of one group.
        gather_again: gathers the group again into the same memory; a collective.

    Raises:
        StaleStateError: it cannot be told, because other ranks do not gather.
    """
    written = [(bucket, risen, bucket.sums(risen)) for bucket in buckets if (risen := bucket.risen())]
    edited = {bucket: risen for bucket, risen, _ in written}  # until the opposite is known
    try:
        edited = _changed(written, gather_again)
    finally:
        for bucket in buckets:
            bucket.accept(edited.get(bucket, ()))
    return [bucket.fqns[index] for bucket, indices in edited.items() for index in sorted(indices)]


def _changed(
    written: Sequence[tuple[Edited, set[int], dict[int, BitSums]]], gather_again: Callable[[], None]
) -> dict[Edited, set[int]]:
    for bucket, risen, _ in written:
        bucket.writes.note_risen(risen)
    if any(sums.keys() - bucket.writes.gathered.keys() for bucket, _, sums in written):
        try:
            gather_again()
        except ComposableShardError as error:
            raise lost_edit([bucket.fqns[i] for bucket, risen, _ in written for i in sorted(risen)]) from error
    return {bucket: risen - _same(sums, bucket.writes.gathered) for bucket, risen, sums in written}


def _same(now: dict[int, BitSums], before: dict[int, BitSums]) -> set[int]:
    """The indices whose sums are the same; waits once for the device."""
    flags = torch.stack([sums.differ(before[index]) for index, sums in now.items()]).tolist() if now else []
    return {index for index, differ in zip(now, flags, strict=True) if not differ}


def lost_edit(fqns: Sequence[str]) -> StaleStateError:
    """The error for unsharded parameters that were edited in place."""
    return StaleStateError(
        f"{', '.join(fqns)}: edited in place while unsharded. Such an edit is lost with the unsharded copy, and with "
        "it what the model was meant to learn from it. Edit sharded parameters instead, between two steps, or compute "
        "with an edited copy"
    )
