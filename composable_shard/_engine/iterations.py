"""Where one iteration ends and the next begins: decided by the calls of a program, never by which graphs are alive.

All ranks make the same calls and so find the same iterations, even if one rank alone keeps an output, and with that a
graph, without running its backward.
"""

from __future__ import annotations

import threading

from .._errors import ShardConfigStateError

_MOST_WAITING = 256  # forwards that may wait for a backward; with this many, none is expected any more
_FORWARD = "forward"


def two_threads(where: str) -> ShardConfigStateError:
    """The error for a thread that calls a model while another one is in `where`, a part of a step."""
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
        self._thread = 0  # the one in which the last forward began
        self._inside: dict[str, int] = {}  # the thread of the forward that runs now; a dict, as `setdefault` is atomic
        self._awaited = 0  # number of the last forward that a backward can go through
        self._reached = 0  # ... and of the last one that a backward has gone through

    @property
    def waiting(self) -> bool:
        """Whether a forward waits for its backward. A backward ends the wait of its forward and of all earlier ones."""
        return 0 < self._awaited - self._reached < _MOST_WAITING

    def begin(self) -> bool:
        """A forward begins; returns whether an earlier one waits for its backward, which makes both one iteration."""
        waiting = self.waiting
        if not waiting:
            self._reached = self.forward
        self.forward += 1
        self._thread = threading.get_ident()
        return waiting

    def claim(self) -> None:
        """A forward is about to begin in this thread: keep other threads out until `release`.

        Raises:
            ShardConfigStateError: another thread has claimed the model; two threads never succeed at once.
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
        """A forward, by its number, uses parameters that want gradients, so a backward may follow."""
        if forward > self._awaited:
            self._awaited = forward

    def reach(self, forward: int) -> None:
        """A backward goes through this forward (0: through none)."""
        self._reached = max(self._reached, forward)

    def end(self) -> None:
        """No forward waits any more: a backward has failed, or the parameters are about to change."""
        self._reached = self.forward
