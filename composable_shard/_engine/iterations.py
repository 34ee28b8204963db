"""Where one iteration ends and the next one begins: by what a program calls, never by what somebody keeps alive.

Ranks run one program, so all of them find the same iterations; the output of a forward without backward, kept on one
rank alone, changes nothing.
"""

from __future__ import annotations

import threading

from .._errors import ShardConfigStateError

_MOST_WAITING = 256  # forwards of one iteration that wait for a backward
_FORWARD = "forward"


def two_threads(where: str) -> ShardConfigStateError:
    """The error of a thread that calls a model while another one is there."""
    return ShardConfigStateError(
        f"thread {threading.current_thread().name!r}: calls a sharded model while another thread is in {where}; let "
        "one thread at a time run a model, or give each its own"
    )


class Iterations:
    """Counts the forwards of a root, and the backwards that go through them.

    Attributes:
        forward: number of the last forward.
    """

    def __init__(self) -> None:
        self.forward = 0
        self._thread = 0  # in which it began
        self._inside: dict[str, int] = {}  # the thread of the forward that runs now: `setdefault` is atomic
        self._awaited = 0  # the last forward that a backward can go through
        self._reached = 0  # ... and the last one that one has gone through

    @property
    def waiting(self) -> bool:
        """Whether a forward still waits for its backward. A backward ends the wait of its forward and of all before."""
        return 0 < self._awaited - self._reached < _MOST_WAITING

    def begin(self) -> bool:
        """A forward begins; returns whether an earlier one waits for its backward: both are of one iteration then."""
        waiting = self.waiting
        if not waiting:
            self._reached = self.forward
        self.forward += 1
        self._thread = threading.get_ident()
        return waiting

    def claim(self) -> None:
        """A forward is about to begin in this thread, and no other one shall until it is over (`release`).

        Raises:
            ShardConfigStateError: one has, however short the time between them.
        """
        here = threading.get_ident()
        if self._inside.setdefault(_FORWARD, here) != here:
            raise two_threads(f"forward {self.forward} of it, or in its backward")

    def release(self) -> None:
        """The forward is over."""
        self._inside.pop(_FORWARD, None)

    def check_thread(self) -> None:
        """Raises ShardConfigStateError if the forward began in another thread than this one."""
        if threading.get_ident() != self._thread:
            raise two_threads(f"forward {self.forward} of it, or in its backward")

    def await_backward(self, forward: int) -> None:
        """Parameters that want gradients are used in this forward; 0 is none."""
        if forward > self._awaited:
            self._awaited = forward

    def reach(self, forward: int) -> None:
        """A backward goes through this forward."""
        self._reached = max(self._reached, forward)

    def end(self) -> None:
        """No backward is waited for any more: one has failed, or the parameters are about to change."""
        self._reached = self.forward
