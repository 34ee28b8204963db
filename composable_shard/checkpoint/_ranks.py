"""What the ranks of a save or a load tell each other, and errors that all of them raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .._errors import (
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
from .._faults.watch import together

_T = TypeVar("_T")
_U = TypeVar("_U")
_KINDS = (  # of errors that all ranks raise for one of them; other kinds are told in the words of a CheckpointError
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
    """The ranks that save or load together; this process alone where there is no process group.

    Attributes:
        rank: of this process among them.
        size: how many they are.
        everyone: their ranks in the world.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        self.everyone = dist.get_process_group_ranks(group) if together and self.rank >= 0 else [0]
        if self.rank < 0:
            raise ShardConfigValueError("process_group: this process is not in it; call with a group that it is in")

    def meet(self, what: str) -> None:
        """All ranks are about to do this: see that none does something else, which would keep the others waiting.

        It is known of ranks that have run a sharded model together, of others nothing is said.

        Raises:
            RankMismatchError: on all ranks, one does something else.
            PeerLostError: on all that are left, one is lost.
        """
        if self.size > 1:
            together(what, self.everyone)

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, by rank, on every rank; values are plain Python data."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._talking():
            dist.all_gather_object(values, value, self._group)
        return values

    def gather_on_first(self, value: _T) -> list[_T]:
        """Every rank's value, by rank, on rank 0; nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._talking():
            dist.gather_object(value, values or None, group=self._group, group_dst=0)
        return values

    def from_first(self, value: _T) -> _T:
        """Rank 0's value."""
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
                f"rank {self.rank} of {self.size} does not reach the others: one has died, or does something "
                f"else (all ranks save and load together): {error}"
            ) from error

    def alike(self, call: str, arguments: dict[str, Any]) -> None:
        """See that all ranks have called with the same arguments.

        Raises:
            CheckpointMismatchError: they have not; it names the first that differs.
        """
        compare(call, self.gather(arguments))

    def together(self, work: Callable[[], _T]) -> _T:
        """Do something on every rank; where it fails on one, all ranks raise, and say which ranks failed and why.

        It costs one small collective. `work` may issue collectives of its own as long as no rank can fail before
        another one that waits for it.
        """
        return self.together_and_tell(work, lambda _: None)[0]

    def together_and_tell(self, work: Callable[[], _T], tell: Callable[[_T], _U]) -> tuple[_T, list[_U]]:
        """The same, and every rank has what `tell` gives of every rank's result, as plain Python data."""
        result, error = _tried(work)
        said = self.gather((_described(error), tell(cast(_T, result)) if error is None else None))
        done = self._judged(result, error, [failure for failure, _ in said])
        return done, cast(list[_U], [result for _, result in said])

    def first_alone(self, work: Callable[[], _T]) -> _T:
        """Do something on rank 0; its result, or its error, is that of every rank."""
        result, error = _tried(work) if self.rank == 0 else (None, None)
        said = self.from_first((_described(error), result if error is None else None))
        failures: list[_Described] = [None] * self.size
        failures[0] = said[0]
        return self._judged(said[1], error, failures)

    def _judged(self, result: _T | None, own: BaseException | None, failures: list[_Described]) -> _T:
        if own is not None and not isinstance(own, Exception):
            raise own  # an interrupt is not made into an error; the other ranks have been told
        failed = [(rank, each) for rank, each in enumerate(failures) if each is not None]
        if not failed:
            return cast(_T, result)
        if self.size == 1 and isinstance(own, ComposableShardError):
            raise own
        kind = failed[0][1][0]
        raise kind("; ".join(_lines(failed, self.size))) from own


def compare(call: str, said: list[dict[str, Any]]) -> None:
    """See that the arguments of a call are those of rank 0 on every rank; a CheckpointMismatchError otherwise."""
    for rank, arguments in enumerate(said):
        for name, value in arguments.items():
            if said[0][name] != value:
                raise CheckpointMismatchError(
                    f"{name}: rank 0 calls {call} with {said[0][name]!r} and rank {rank} with {value!r}; all ranks "
                    f"must call {call} alike"
                )


_Described = tuple[type[ComposableShardError], str] | None


def _tried(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _described(error: BaseException | None) -> _Described:
    """The kind and the message that all ranks raise for an error of one of them."""
    if error is None:
        return None
    if isinstance(error, ComposableShardError):
        kind = next((each for each in _KINDS if isinstance(error, each)), CheckpointError)
        return kind, str(error) if kind is not CheckpointError or type(error) is kind else _spoken(error)
    return CheckpointError, _spoken(error)


def _spoken(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _lines(failed: list[tuple[int, Any]], size: int) -> list[str]:
    """What failed: a message that several ranks have is said once."""
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
