"""A scheduler for ranks that are threads and take turns.

One rank runs at a time. Its turn ends only where it must wait for other ranks, so every run is the same. If no rank can
continue, this is detected immediately, without a time limit.
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

from ..errors import DeadlockError, WorldTimeoutError
from ._torch import raise_in_thread

_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, threading.__file__))
_GRACE_S = 1.0  # seconds in which ranks must end after the time limit


class Released(BaseException):
    """Ends a rank because another one has failed. `except Exception` does not catch it."""


@dataclass
class RandomState:
    """The state of the default random generators of torch, numpy and Python."""

    torch: torch.Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        """The current state."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@dataclass
class _Rank:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None  # becomes true when the rank can continue; None if it does not wait
    waits_in: str = ""
    ended: bool = False
    random: RandomState | None = None
    thread: int | None = None


class Turns:
    """The scheduler of the ranks of a world.

    Args:
        size: number of ranks.

    Attributes:
        failed: the rank and the exception of the first failure; the rank is None for a failure of the whole world.
        done: is set when all ranks have ended.
    """

    def __init__(self, size: int) -> None:
        self.failed: tuple[int | None, BaseException] | None = None
        self.done = threading.Event()
        self._ranks = [_Rank() for _ in range(size)]
        self._running = 0

    def run(self, rank: int, body: Callable[[], None]) -> None:
        """Run `body` as a rank, in this thread: wait for the first turn, run, pass the turn to another rank."""
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
        """Record a failure. All ranks end at their next turn."""
        if self.failed is None:
            self.failed = rank, error

    def check(self) -> None:
        """End this rank if another one has failed."""
        if self.failed is not None:
            raise Released

    def wait_for(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()` is true. `what` describes the wait, for messages."""
        self.check()
        if not ready():
            self._rest(rank, ready, what)

    def pause(self, rank: int) -> None:
        """Let the other ranks run until they wait."""
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
            words = "no rank can continue, because each one waits for another:"
            self.fail(None, DeadlockError(f"{words}\n{self.describe()}"))
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
        """The current position of each rank, one per line."""
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
        """Wait until all ranks have ended. After `limit_s` seconds, stop them.

        A rank stops at its next line of Python. A rank that hangs in a C call cannot be stopped.
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
                    f"the world did not end within {limit_s:g} s; pass a larger `timeout`, or see where rank "
                    f"{self._running} is:\n{stack}\n{self.describe()}"
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
    """The innermost line of a stack outside of torch and this library."""
    own = str(Path(__file__).parent.parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, own, "<")):
            return f", at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
