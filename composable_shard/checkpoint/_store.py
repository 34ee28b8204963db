"""Ranks that talk through the store of their processes, while the threads that train use the collectives."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from .._errors import CheckpointError
from .._torch.distributed import another_client, delete_key, shared_store
from ._ranks import Ranks

LOST_AFTER_S = 60.0  # a rank is lost whose process was not heard of for so long
_BEAT_S = 1.0
_READ_S = 5.0  # for all ranks to see that one has failed
_SHORTEST_S, _LONGEST_S = 0.001, 0.05  # between two looks at the store
_CHUNK = 4 << 20  # bytes of a value under one key

_T = TypeVar("_T")


class RankLostError(CheckpointError):
    """A rank is not there any more, or cannot be reached."""


def can_talk(ranks: Ranks) -> bool:
    """Whether these ranks have a store, or need none."""
    return ranks.size == 1 or shared_store() is not None


class StoreRanks(Ranks):
    """The same ranks as those of a process group, in a thread beside the one that trains.

    Every rank says each second that its process is there; who waits for a rank that has gone silent gives up, and so
    do then all. A rank that is slow, and be it for hours, is waited for.

    Args:
        group: the process group.
        name: that no other ranks of this kind have had, the same on all.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(group)
        self._base = f"composable_shard/checkpoint/{name}"
        self._round = 0
        self._used: list[str] = []  # on rank 0, keys to remove
        self._ended = threading.Event()
        self._store: Any = None
        if self.size > 1:
            with self._reached():
                self._store = another_client(shared_store(), LOST_AFTER_S)
        self._beats: dict[int, tuple[bytes, float]] = {}  # by rank, the last one and how long it is the last
        self._thread = threading.Thread(target=self._beat, name="checkpoint-beat", daemon=True)

    def start(self) -> None:
        """Begin to say that this rank is there; `alive` must follow."""
        if self.size > 1:
            self._thread.start()

    def give_up(self, error: BaseException) -> None:
        """In the place of `alive`: tell the others that nothing comes of it."""
        self._ended.set()
        if self.size > 1:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(self._failed, "", f"rank {self.rank}: {str(error) or type(error).__name__}")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Until its end this rank says that it is there; an error within is that of all ranks that wait for it."""
        if self.size == 1:
            yield
            return
        limit = _READ_S
        try:
            yield
            limit = LOST_AFTER_S
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(self._failed, "", f"rank {self.rank}: {str(error) or type(error).__name__}")
            raise
        finally:
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(RuntimeError):
                self._clean_up(limit)

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, by rank, on every rank."""
        return self.from_first(self.gather_on_first(value))

    def gather_on_first(self, value: _T) -> list[_T]:
        """Every rank's value, by rank, on rank 0."""
        if self.size == 1:
            return [value]
        self._round += 1
        if self.rank:
            self._put(f"{self._round}/{self.rank}", value)
            return []
        return [value, *(self._get(f"{self._round}/{rank}", rank) for rank in range(1, self.size))]

    def from_first(self, value: _T) -> _T:
        """Rank 0's value."""
        if self.size == 1:
            return value
        self._round += 1
        if self.rank:
            return self._get(f"{self._round}/0", 0)  # type: ignore[no-any-return]
        self._put(f"{self._round}/0", value)
        return value

    def first_alone(self, work: Callable[[], _T]) -> _T:
        """Do something on rank 0, unless a rank has given up; its result, or its error, is that of every rank."""

        def work_if_all_wait() -> _T:
            if self.size > 1:
                self._raise_failure()
            return work()

        return super().first_alone(work_if_all_wait)

    # ---- the store

    @property
    def _failed(self) -> str:
        return f"{self._base}/failed"

    def _put(self, name: str, value: Any) -> None:
        data = pickle.dumps(value)  # between the ranks of one run, as all_gather_object does
        count = max(-(-len(data) // _CHUNK), 1)
        with self._reached():
            for number in range(count):
                self._store.set(f"{self._base}/{name}/{number}", data[number * _CHUNK : (number + 1) * _CHUNK])
            self._store.set(f"{self._base}/{name}", str(count))
        self._note(name, count)

    def _get(self, name: str, rank: int) -> Any:
        self._wait_for(f"{self._base}/{name}", rank)
        with self._reached():
            count = int(self._store.get(f"{self._base}/{name}"))
            data = b"".join(self._store.get(f"{self._base}/{name}/{number}") for number in range(count))
        self._note(name, count)
        return pickle.loads(data)

    def _note(self, name: str, chunks: int) -> None:
        self._used += [f"{self._base}/{name}", *(f"{self._base}/{name}/{number}" for number in range(chunks))]

    def _wait_for(self, key: str, rank: int) -> None:
        pause, looked, silent = _SHORTEST_S, time.monotonic(), 0.0
        while not self._has(key):
            self._raise_failure()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
            now = time.monotonic()
            if now - looked >= _BEAT_S:
                # Not more than two beats, however long it was: this process may have been stopped itself.
                silent = self._silence(rank, min(now - looked, 2 * _BEAT_S))
                looked = now
            if silent >= LOST_AFTER_S:
                raise RankLostError(
                    f"rank {rank} was not heard of for {LOST_AFTER_S:.0f} s while a checkpoint was written in the "
                    "background; its process has ended, or is stopped"
                )

    def _silence(self, rank: int, passed: float) -> float:
        """For how long a rank has not been heard of, where so much time has passed since this was last asked."""
        key = f"{self._base}/beat/{rank}"
        with self._reached():
            beat = self._store.get(key) if self._store.check([key]) else b""
        last, silent = self._beats.get(rank, (b"", 0.0))
        self._beats[rank] = beat, silent + passed if beat == last else 0.0
        return self._beats[rank][1]

    def _has(self, key: str) -> bool:
        with self._reached():
            return bool(self._store.check([key]))

    def _raise_failure(self) -> None:
        if self._has(self._failed):
            with self._reached():
                raise CheckpointError(self._store.get(self._failed).decode())

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            message = f"the store of the process group cannot be reached from rank {self.rank}: {error}"
            raise RankLostError(message) from error

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(RuntimeError):  # a store that is gone is reported by who waits
            while True:
                number += 1
                self._store.set(f"{self._base}/beat/{self.rank}", str(number))
                if self._ended.wait(_BEAT_S):
                    return

    def _clean_up(self, limit: float) -> None:
        """Remove what the store holds, once all ranks have read it, or so many seconds have passed."""
        self._store.add(f"{self._base}/read", 1)
        if self.rank:
            return
        begun = time.monotonic()
        while self._store.add(f"{self._base}/read", 0) < self.size and time.monotonic() - begun < limit:
            time.sleep(_LONGEST_S)
        beats = (f"{self._base}/beat/{rank}" for rank in range(self.size))
        for key in (*self._used, *beats, self._failed, f"{self._base}/read"):
            delete_key(self._store, key)
