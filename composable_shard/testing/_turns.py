"""Ranks as threads that take turns.

One rank runs at a time. It hands its turn on where it must wait for others, and nowhere else, so a run is the same
every time; and when nobody can go on, that is known at once and needs no time limit.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from .._errors import DeadlockError, WorldTimeoutError
from ._torch import raise_in_thread

_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, threading.__file__))
_GRACE_S = 1.0  # for ranks to end after the time limit


class Released(BaseException):
    """Ends a rank because another one has failed. It passes by `except Exception`."""


@dataclass
class RandomState:
    """Random numbers that belong to a process: torch's, numpy's and Python's default generators."""

    torch: torch.Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        """The state at this moment."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Go on from this state."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@dataclass
class _Rank:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None  # what it waits for
    waits_in: str = ""
    ended: bool = False
    random: RandomState | None = None
    thread: int | None = None


class Turns:
    """Whose turn it is among the ranks of a world.

    Args:
        size: number of ranks.

    Attributes:
        failed: the first failure, and the rank that had it (None if it is nobody's alone).
        done: set when all ranks have ended.
    """

    def __init__(self, size: int) -> None:
        self.failed: tuple[int | None, BaseException] | None = None
        self.done = threading.Event()
        self._ranks = [_Rank() for _ in range(size)]
        self._running = 0

    def run(self, rank: int, body: Callable[[], None]) -> None:
        """What the thread of a rank does: wait for the first turn, run, hand the turn on."""
        __tracebackhide__ = True
        own = self._ranks[rank]
        own.thread = threading.get_ident()
        own.go.acquire()
        self._running = rank
        try:
            self.check()
            body()
        except Released:
            pass
        except BaseException as error:
            self.fail(rank, error)
        own.ended = True
        self._hand_on(rank)

    def start(self) -> None:
        """Give rank 0 its turn."""
        self._ranks[0].go.release()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Something is wrong; all ranks end as soon as they have a turn."""
        if self.failed is None:
            self.failed = rank, error

    def check(self) -> None:
        """End this rank if another one has failed."""
        if self.failed is not None:
            raise Released

    def wait_for(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()` holds; `what` says in words what this one waits in."""
        self.check()
        if not ready():
            self._rest(rank, ready, what)

    def pause(self, rank: int) -> None:
        """Let the others run as far as they get."""
        self.check()
        self._rest(rank, None, "")

    def _rest(self, rank: int, ready: Callable[[], bool] | None, what: str) -> None:
        own = self._ranks[rank]
        own.ready, own.waits_in = ready, what
        own.random = RandomState.now()
        self._hand_on(rank)
        own.go.acquire()
        self._running = rank
        own.random.restore()
        own.ready = None
        self.check()

    def _hand_on(self, rank: int) -> None:
        if all(each.ended for each in self._ranks):
            self.done.set()
            return
        following = self._next(rank)
        if following is None:
            self.fail(None, DeadlockError(f"no rank can go on, for each waits for another one:\n{self.describe()}"))
            following = self._next(rank)
        assert following is not None
        self._ranks[following].go.release()

    def _next(self, rank: int) -> int | None:
        for step in range(1, len(self._ranks) + 1):
            at = (rank + step) % len(self._ranks)
            each = self._ranks[at]
            if not each.ended and (self.failed is not None or each.ready is None or each.ready()):
                return at
        return None

    def describe(self) -> str:
        """Where each rank is, a line each."""
        frames = sys._current_frames()
        lines = []
        for rank, each in enumerate(self._ranks):
            if each.ended:
                lines.append(f"  rank {rank} has returned")
            else:
                where = _location(frames.get(each.thread or 0))
                lines.append(f"  rank {rank} {f'waits in {each.waits_in}' if each.ready else 'runs'}{where}")
        return "\n".join(lines)

    def join(self, limit_s: float) -> None:
        """Wait until all ranks have ended; after `limit_s` seconds, end them.

        What a rank does then ends at its next line of Python; one that hangs in a call that never returns stays.
        """
        try:
            if self.done.wait(limit_s):
                return
            own = self._ranks[self._running]
            frame = sys._current_frames().get(own.thread or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            self.fail(
                None,
                WorldTimeoutError(
                    f"the world did not end within {limit_s:g} s; give it more by `timeout`, or see what rank "
                    f"{self._running} does:\n{stack}\n{self.describe()}"
                ),
            )
        except BaseException as error:  # Ctrl-C, or the time limit of a test
            self.fail(None, error)
            raise
        finally:
            if not self.done.is_set():
                thread = self._ranks[self._running].thread
                if thread is not None:
                    raise_in_thread(thread, Released)
                self.done.wait(_GRACE_S)


def _location(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither torch's nor this library's."""
    own = str(Path(__file__).parent.parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, own, "<")):
            return f", at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
