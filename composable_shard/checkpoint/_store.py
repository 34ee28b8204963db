"""Ranks that communicate through the store of their process group, while training threads use the collectives."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from .._torch.distributed import another_client, delete_key, shared_store
from ..errors import CheckpointError
from ._ranks import Ranks

LOST_AFTER_S = 60.0  # a rank is lost if its process sends no heartbeat for this long
_BEAT_S = 1.0  # seconds between two heartbeats
_READ_S = 5.0  # seconds in which all ranks can read an error, before its key is deleted
_SHORTEST_S, _LONGEST_S = 0.001, 0.05  # seconds between two polls of the store
_CHUNK = 4 << 20  # bytes of a value under one key

_T = TypeVar("_T")


class RankLostError(CheckpointError):
    """A rank has died, or cannot be reached."""


def can_talk(ranks: Ranks) -> bool:
    """Whether these ranks have a store, or do not need one."""
    return ranks.size == 1 or shared_store() is not None


class StoreRanks(Ranks):
    """The ranks of a process group, for use in another thread than the training thread.

    Every rank sends a heartbeat each second. If a rank waits for a rank without heartbeat, it fails after
    `LOST_AFTER_S`, and then all ranks fail. For a slow rank with a heartbeat, the others wait without limit.

    Args:
        group: the process group.
        name: a name that is unique for each instance, but equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(group)
        self._base = f"composable_shard/checkpoint/{name}"
        self._round = 0
        self._used: list[str] = []  # keys that rank 0 deletes
        self._ended = threading.Event()
        self._store: Any = None
        if self.size > 1:
            with self._reached():
                self._store = another_client(shared_store(), LOST_AFTER_S)
        self._beats: dict[int, tuple[bytes, float]] = {}  # by rank: the last heartbeat and the seconds since it changed
        self._thread = threading.Thread(target=self._beat, name="checkpoint-beat", daemon=True)

    def start(self) -> None:
        """Start the heartbeat of this rank. Call `alive` or `give_up` afterwards."""
        if self.size > 1:
            self._thread.start()

    def give_up(self, error: BaseException) -> None:
        """Stop the heartbeat and raise `error` on the other ranks. Call this instead of `alive`."""
        self._ended.set()
        if self.size > 1:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(self._failed, "", f"rank {self.rank}: {str(error) or type(error).__name__}")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Keep the heartbeat until the end of the context. Its error is raised on all ranks that wait for this one."""
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
        """Gather every rank's value on every rank, in the order of the ranks."""
        return self.from_first(self.gather_on_first(value))

    def gather_on_first(self, value: _T) -> list[_T]:
        """Gather every rank's value on rank 0, in the order of the ranks."""
        if self.size == 1:
            return [value]
        self._round += 1
        if self.rank:
            self._put(f"{self._round}/{self.rank}", value)
            return []
        return [value, *(self._get(f"{self._round}/{rank}", rank) for rank in range(1, self.size))]

    def from_first(self, value: _T) -> _T:
        """Broadcast rank 0's value."""
        if self.size == 1:
            return value
        self._round += 1
        if self.rank:
            return self._get(f"{self._round}/0", 0)  # type: ignore[no-any-return]
        self._put(f"{self._round}/0", value)
        return value

    def first_alone(self, work: Callable[[], _T]) -> _T:
        """Run `work` on rank 0, unless a rank has failed. Every rank returns its result or raises its error."""

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
        data = pickle.dumps(value)  # safe between the ranks of one run; all_gather_object does the same
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
                # Count at most two beats, however much time has passed: this process itself may have been stopped.
                silent = self._silence(rank, min(now - looked, 2 * _BEAT_S))
                looked = now
            if silent >= LOST_AFTER_S:
                raise RankLostError(
                    f"rank {rank} sent no heartbeat for {LOST_AFTER_S:.0f} s while a checkpoint was written in the "
                    "background; its process has ended, or is stopped"
                )

    def _silence(self, rank: int, passed: float) -> float:
        """Seconds since the last heartbeat of a rank.

        Args:
            rank: the rank.
            passed: seconds since the last call.
        """
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
        with contextlib.suppress(RuntimeError):  # a thread that waits reports a lost store
            while True:
                number += 1
                self._store.set(f"{self._base}/beat/{self.rank}", str(number))
                if self._ended.wait(_BEAT_S):
                    return

    def _clean_up(self, limit: float) -> None:
        """Delete this instance's keys from the store, when all ranks have read them or after `limit` seconds."""
        self._store.add(f"{self._base}/read", 1)
        if self.rank:
            return
        begun = time.monotonic()
        while self._store.add(f"{self._base}/read", 0) < self.size and time.monotonic() - begun < limit:
            time.sleep(_LONGEST_S)
        beats = (f"{self._base}/beat/{rank}" for rank in range(self.size))
        for key in (*self._used, *beats, self._failed, f"{self._base}/read"):
            delete_key(self._store, key)
