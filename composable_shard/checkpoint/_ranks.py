"""Communication between the ranks of a save or a load. An error on one rank is raised on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .._faults.watch import together
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointUnsafeError,
    ComposableShardError,
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigValueError,
    StaleStateError,
)

_T = TypeVar("_T")
_U = TypeVar("_U")
_KINDS = (  # types that all ranks raise if one rank does; an error of another type is raised as a CheckpointError
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointUnsafeError,
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigValueError,
    StaleStateError,
)


class Ranks:
    """The ranks that save or load together; only this process if there is no process group.

    Attributes:
        rank: rank of this process in the group.
        size: size of the group.
        everyone: global ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        self.everyone = dist.get_process_group_ranks(group) if together and self.rank >= 0 else [0]
        if self.rank < 0:
            raise ShardConfigValueError("process_group: this process is not in it; pass a group that contains it")

    def meet(self, what: str) -> None:
        """Check that all ranks are about to do `what`, because a rank that does something else would block the others.

        Only ranks that have run a sharded model together are checked.

        Raises:
            RankMismatchError: a rank does something else. Raised on all ranks.
            PeerLostError: a rank is lost. Raised on all remaining ranks.
        """
        if self.size > 1:
            together(what, self.everyone)

    def gather(self, value: _T) -> list[_T]:
        """Gather every rank's value on every rank, in the order of the ranks. Values are plain Python data."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._talking():
            dist.all_gather_object(values, value, self._group)
        return values

    def gather_on_first(self, value: _T) -> list[_T]:
        """Gather every rank's value on rank 0, in the order of the ranks. The other ranks get an empty list."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._talking():
            dist.gather_object(value, values or None, group=self._group, group_dst=0)
        return values

    def from_first(self, value: _T) -> _T:
        """Broadcast rank 0's value."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        with self._talking():
            dist.broadcast_object_list(values, group_src=0, group=self._group)
        first: _T = values[0]
        return first

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ComposableShardError):
                raise
            raise CheckpointError(
                f"rank {self.rank} of {self.size} cannot reach the other ranks: one has died, or does something "
                f"else (all ranks must save and load together): {error}"
            ) from error

    def together(self, work: Callable[[], _T]) -> _T:
        """Run `work` on every rank. If it fails on any rank, all ranks raise an error that lists ranks and reasons.

        This costs one small collective. `work` may issue its own collectives, unless a rank can fail before a
        collective in which another rank waits for it.
        """
        return self.together_and_tell(work, lambda _: None)[0]

    def together_and_tell(self, work: Callable[[], _T], tell: Callable[[_T], _U]) -> tuple[_T, list[_U]]:
        """Like `together`, and also gathers `tell(result)` of every rank on every rank, as plain Python data."""
        result, error = _tried(work)
        said = self.gather((_described(error), tell(cast(_T, result)) if error is None else None))
        done = self._judged(result, error, [failure for failure, _ in said])
        return done, cast(list[_U], [result for _, result in said])

    def first_alone(self, work: Callable[[], _T]) -> _T:
        """Run `work` on rank 0 only. Every rank returns its result or raises its error."""
        result, error = _tried(work) if self.rank == 0 else (None, None)
        said = self.from_first((_described(error), result if error is None else None))
        failures: list[_Described] = [None] * self.size
        failures[0] = said[0]
        return self._judged(said[1], error, failures)

    def _judged(self, result: _T | None, own: BaseException | None, failures: list[_Described]) -> _T:
        if own is not None and not isinstance(own, Exception):
            raise own  # for example, KeyboardInterrupt: only this rank raises it unchanged
        failed = [(rank, each) for rank, each in enumerate(failures) if each is not None]
        if not failed:
            return cast(_T, result)
        if self.size == 1 and isinstance(own, ComposableShardError):
            raise own
        kind = failed[0][1][0]
        raise kind("; ".join(_lines(failed, self.size))) from own


def compare(call: str, said: list[dict[str, Any]]) -> None:
    """Raise CheckpointMismatchError unless the arguments of a call are equal on all ranks."""
    for rank, arguments in enumerate(said):
        for name, value in arguments.items():
            if said[0][name] != value:
                raise CheckpointMismatchError(
                    f"{name}: rank 0 calls {call} with {said[0][name]!r} and rank {rank} with {value!r}; call {call} "
                    "with the same arguments on all ranks"
                )


_Described = tuple[type[ComposableShardError], str] | None


def _tried(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _described(error: BaseException | None) -> _Described:
    """The error type and the message that all ranks raise for an error on one rank."""
    if error is None:
        return None
    if isinstance(error, ComposableShardError):
        kind = next((each for each in _KINDS if isinstance(error, each)), CheckpointError)
        return kind, str(error) if kind is not CheckpointError or type(error) is kind else _spoken(error)
    return CheckpointError, _spoken(error)


def _spoken(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _lines(failed: list[tuple[int, Any]], size: int) -> list[str]:
    """One line per distinct message, with the ranks that raised it."""
    by_text: dict[str, list[int]] = {}
    for rank, (_, text) in failed:
        by_text.setdefault(text, []).append(rank)
    if size == 1:
        return list(by_text)
    lines = []
    for text, ranks in list(by_text.items())[:8]:
        who = "all ranks" if len(ranks) == size else f"rank {', '.join(map(str, ranks))}"
        lines.append(f"{who}: {text}")
    if len(by_text) > 8:
        lines.append(f"and {len(by_text) - 8} more messages of other ranks")
    return lines
