"""Detects edits of unsharded parameters. Resharding would lose them, so an edit that changes a value is an error.

A higher version shows that a tensor was written to, but not whether a value has changed. For example,
`torch.nn.utils.parametrize` sets a parameter to itself, and a clamp may find nothing to clamp. So for parameters with
higher versions, sums over their bits are compared with those of the gathered values: one sum for each row and one for
each column. An edit that leaves all of them the same is very unlikely.

When are the sums of the gathered values computed? At the first gather of a bucket for all its parameters, and at later
gathers for the parameters that were ever written to. So a program that writes in every forward is checked from the
first forward on, and in other programs, only the first gather costs something. If a program writes for the first time
later, there are no sums. Then the parameters are gathered again into the same memory and summed. If not all ranks do
so, the ledger of actions (`_faults/`) raises an error.

Each rank checks its full unsharded parameters, not only its own rows. So ranks that have made the same write come to
the same result, no matter whose rows it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import ComposableShardError, StaleStateError
from .faces import Leaves

_version = attrgetter("_version")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_EDITED = -1  # a version that no tensor has


class BitSums(NamedTuple):
    """Sums over the bits of one parameter, read as integers: two 1-D tensors on the parameter's device."""

    rows: torch.Tensor
    columns: torch.Tensor

    def differ(self, other: BitSums) -> torch.Tensor:
        """Return whether the sums differ, as a bool tensor on the device."""
        return (self.rows != other.rows).any() | (self.columns != other.columns).any()


def bit_sums(weight: torch.Tensor) -> BitSums:
    """Return the sums of a contiguous tensor of any dtype, whose last dim is a row.

    Sums may overflow. This does not matter, because they are only compared with other sums.
    """
    row = weight.shape[-1] if weight.ndim and weight.numel() else 1
    numbers = weight.detach().view(-1, row).view(torch.uint8)
    # Use the widest integers that fit: on a CPU, summing 8-byte ones is 20 times faster than converting 4 bytes to 8.
    wide = next(dtype for dtype in _INTEGERS if numbers.shape[1] % dtype.itemsize == 0)
    if numbers.storage_offset() % wide.itemsize:
        numbers = numbers.clone()
    numbers = numbers.view(wide)
    dtype = wide if wide.itemsize >= 4 else torch.int64
    return BitSums(numbers.sum(1, dtype=dtype), numbers.sum(0, dtype=dtype))


class Writes:
    """The writes to the unsharded parameters of one bucket, judging by versions.

    There are two checks. At the end of a forward and at release, `changed` compares bit sums of written parameters
    with their sums when they were gathered. In backward, each read of a parameter through a handle compares versions,
    because backward must read the value that was saved. The second check has three steps. The first two identify a
    use by the outputs of its node:

        begin_reads   backward reaches the use: `noted` is set, and `rewritten` has the writes until now. If there are
                      none, reads need no check (`unwritten`)
        look_at       a read that needs a check, or that the budget waits for (`await_read`): `looked_at` is set
        end_reads     the backward of the use is over: `noted`, `looked_at` and `unwritten` are None again

    Args:
        count: the number of parameters.

    Attributes:
        gathered: by index, sums of the parameters when they were gathered.
        sums_next: indices of the parameters whose sums the next gather computes.
        packed: the places of the handles that the running forward has made of leaves, with the versions of the leaves
            at that time (`GatherBucket._read_before`).
        noted: the outputs of the use that backward has reached; None if there is none.
        rewritten: by index, versions of the parameters of that use that were written to before backward reached it.
        looked_at: the outputs of that use, if `look_at` was called in its backward; else None.
        unwritten: the outputs of that use, if its reads need no further check; else None. A handle knows the outputs of
            its use, so "is `unwritten` the same object?" is all that most reads have to ask (`saved_tensors.py`).
    """

    __slots__ = ("_ended", "_ever", "gathered", "looked_at", "noted", "packed", "rewritten", "sums_next", "unwritten")

    def __init__(self, count: int) -> None:
        self.gathered: dict[int, BitSums] = {}
        self.packed: list[tuple[Any, int]] = []
        self.rewritten: dict[int, int] = {}
        self._ended: Sequence[torch.Tensor] = ()  # the outputs of the last use, if it has written to some of them
        # Indices of the parameters whose versions have ever increased. The first gather computes the sums of all
        # parameters, and `sums_next` is this set from then on.
        self._ever: set[int] = set()
        self.noted: Sequence[torch.Tensor] | None = None
        self.looked_at: Sequence[torch.Tensor] | None = None
        self.unwritten: Sequence[torch.Tensor] | None = None
        self.sums_next: Iterable[int] = range(count)

    def note_gathered(self, sums: dict[int, BitSums]) -> None:
        """Note the sums of the parameters in `sums_next` after a gather."""
        self.gathered, self.sums_next = sums, self._ever

    def note_shown(self, shown: Sequence[torch.Tensor]) -> None:
        """Note the node outputs of a finished forward that has written to some of them."""
        self._ended = shown

    def risen(self, leaves: Leaves | None) -> dict[int, list[torch.Tensor]]:
        """Return, by index, the output and the leaf of each parameter whose version has increased since the gather."""
        written = {index: [out] for index, out in enumerate(self._ended) if out._version}
        if leaves is not None:
            for index in leaves.written():
                written.setdefault(index, []).append(leaves.params[index])
        return written

    def note_risen(self, indices: set[int]) -> None:
        """Note that the versions of these parameters have increased: each gather computes their sums from now on."""
        self._ever |= indices

    def accept(self) -> None:
        """Forget the writes so far, which were checked."""
        self._ended = ()  # each use has its own outputs, which are checked only once
        self.packed.clear()

    def begin_reads(self, shown: Sequence[torch.Tensor], leaves: Leaves | None) -> None:
        """Note the writes so far, when backward reaches a use. Its reads of parameters are checked against them.

        Why not at the first read: before it, a checkpoint may recompute the forward. If that writes to parameters
        without changing a bit, which is allowed, the first read would take it for an edit.

        Args:
            shown: the outputs of the node. A handle has the version that the output had when it was saved. A higher
                version now means that the parameter was edited after that.
            leaves: the leaves over the memory of the parameters, if any were made. A handle's version cannot be
                compared with theirs, because they have other version counters. So any write to a leaf counts.
        """
        rewritten: dict[int, int] = {}
        if any(map(_version, shown)):
            rewritten = {index: out._version for index, out in enumerate(shown) if out._version}
        if leaves is not None:
            rewritten |= dict.fromkeys(leaves.written(), _EDITED)
        self.rewritten, self.noted = rewritten, shown
        self.unwritten = None if rewritten else shown

    def look_at(self, shown: Sequence[torch.Tensor], leaves: Leaves | None) -> dict[int, int]:
        """At the first read of a use's parameters, note that backward has read them, and return what was written to.

        Args:
            shown, leaves: as for `begin_reads`.

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
        """Make the next read call `look_at`, even if nothing was written to.

        `Budget` then finds out from `looked_at` whether backward has read the use.
        """
        self.unwritten = None

    def end_reads(self) -> None:
        """Note the end of a use's backward: the next one checks for edits again."""
        self.looked_at = self.noted = self.unwritten = None


class Edited(Protocol):
    """The interface by which edits of a bucket's parameters are checked.

    Attributes:
        fqns: names of its parameters.
        writes: the writes to them.
    """

    fqns: list[str]
    writes: Writes

    def risen(self) -> set[int]:
        """Return indices of the parameters whose versions have increased since the gather."""

    def sums(self, indices: Iterable[int]) -> dict[int, BitSums]:
        """Return the current sums of these parameters.

        Three types of parameters are left out, and so count as changed: those that `set_` has moved to other memory;
        those that a forward has saved as leaves before the last write, because backward would read the new values; and
        those outside of the pool's memory.
        """

    def accept(self, edited: Collection[int] = ()) -> None:
        """Accept all writes so far, except those to the leaves of the parameters with the indices `edited`."""


def changed(buckets: Sequence[Edited], gather_again: Callable[[], None]) -> list[str]:
    """Return FQNs of the unsharded parameters whose values have changed since the gather, and accept all others.

    Waits for the device if any version has increased.

    Args:
        buckets: the buckets of one group.
        gather_again: gathers the group again into the same memory; a collective.

    Raises:
        StaleStateError: the values could not be compared, because other ranks do not gather again.
    """
    written = [(bucket, risen, bucket.sums(risen)) for bucket in buckets if (risen := bucket.risen())]
    edited = {bucket: risen for bucket, risen, _ in written}  # if the comparison fails, all count as edited
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
    """Return the indices whose sums are equal; waits once for the device."""
    flags = torch.stack([sums.differ(before[index]) for index, sums in now.items()]).tolist() if now else []
    return {index for index, differ in zip(now, flags, strict=True) if not differ}


def lost_edit(fqns: Sequence[str]) -> StaleStateError:
    """Make the error for unsharded parameters that were edited in place."""
    return StaleStateError(
        f"{', '.join(fqns)}: edited in place while unsharded. Resharding frees the unsharded copy, so the edit, and "
        "anything that the model should learn from it, would be lost. Edit sharded parameters instead, between two "
        "steps, or compute with an edited copy"
    )
