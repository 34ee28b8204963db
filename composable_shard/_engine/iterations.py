"""Where one iteration ends and the next begins.

`Iterations` decides by the calls that the program makes, never by which graphs are alive. All ranks make the same calls
and therefore find the same iterations, even if only one rank keeps an output, and with it a graph whose backward never
runs.
"""

from __future__ import annotations

import threading

from ..errors import ShardConfigStateError

# After this many forwards without a backward, none is expected any more: a program that never runs one, such as an
# evaluation with gradients, would otherwise stay in one iteration forever.
_MOST_WAITING = 256
_FORWARD = "forward"


def two_threads(where: str) -> ShardConfigStateError:
    """The error for a thread that calls a model while another thread is in `where`, a part of a step."""
    return ShardConfigStateError(
        f"thread {threading.current_thread().name!r}: calls a sharded model while another thread is in {where}; run a "
        "model in one thread at a time, or give each thread its own model"
    )


class Iterations:
    """Counts the forwards of a root, and tracks the backwards that go through them.

    Attributes:
        forward: number of the last forward.
        was_interrupted: whether an interrupt (Ctrl-C) ended the last forward.
        has_run: whether a forward of any group has begun.
        thread: the thread in which the last forward began; 0 if there was none.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.was_interrupted = self.has_run = False
        self.thread = 0
        self._inside: dict[str, int] = {}  # the thread of the running forward; a dict because `setdefault` is atomic
        # Numbers of forwards; all between the two wait for their backward.
        self._awaited = 0  # the last one that has trained parameters, so that a backward can follow
        self._reached = 0  # the last one that no longer waits, for example because a backward went through it

    @property
    def waiting(self) -> bool:
        """Whether a forward waits for its backward. A backward through a forward also ends the wait of earlier ones."""
        return 0 < self._awaited - self._reached < _MOST_WAITING

    def begin(self) -> bool:
        """Begin a forward. Returns whether an earlier one waits for its backward, so that both form one iteration."""
        waiting = self.waiting
        if not waiting:  # also after `_MOST_WAITING` forwards: these no longer wait
            self._reached = self.forward
        self.forward += 1
        self.was_interrupted = False
        self.thread = threading.get_ident()
        return waiting

    def claim(self) -> None:
        """Keep other threads out until `release`, because a forward is about to begin in this thread.

        Raises:
            ShardConfigStateError: another thread has claimed the model. `setdefault` is atomic, so of two threads that
                call this at the same time, one gets the error.
        """
        here = threading.get_ident()
        if self._inside.setdefault(_FORWARD, here) != here:
            raise two_threads(f"forward {self.forward} of it, or in its backward")

    def release(self) -> None:
        """End the claim of `claim`."""
        self._inside.pop(_FORWARD, None)

    def check_thread(self) -> None:
        """Raise ShardConfigStateError if the forward began in another thread than this one."""
        if threading.get_ident() != self.thread:
            raise two_threads(f"forward {self.forward} of it, or in its backward")

    def interrupt(self) -> None:
        """Note that an interrupt (Ctrl-C) ended the forward."""
        self.was_interrupted = True

    def await_backward(self, forward: int) -> None:
        """Note that forward number `forward` uses parameters that require gradients, so a backward may follow."""
        if forward > self._awaited:
            self._awaited = forward

    def reach(self, forward: int) -> None:
        """Note that a backward goes through this forward (0: through none)."""
        self._reached = max(self._reached, forward)

    def end(self) -> None:
        """Stop waiting for backwards, because one has failed or the parameters are about to change."""
        self._reached = self.forward
