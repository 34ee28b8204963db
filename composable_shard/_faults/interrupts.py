"""Detects Ctrl-C while a rank waits for others: Python handles signals only when the wait ends, which may be never.

The wakeup file descriptor of `signal` is notified immediately. The interpreter writes the number of each signal to it
when the signal arrives, even while the main thread is in a long call.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from .._comm.lanes import WAITING

_PATIENCE_S = 1.0  # a wait that ends by itself within this time is not interrupted
_MOST = 4096  # maximum number of bytes to read in one call


class Interrupts:
    """The signals that this process receives, from the call of `listen` on."""

    def __init__(self) -> None:
        self._pipe = -1
        self._came = 0.0

    def listen(self) -> None:
        """Listen to signals, unless other code (such as an event loop) does, or this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before == -1:
            self._pipe = reading
            return
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)

    def came_while_waiting(self) -> bool:
        """Whether an interrupt came more than `_PATIENCE_S` ago, and the main thread is still in the same wait."""
        if self._pipe != -1 and signal.SIGINT in self._read():
            self._came = time.monotonic()
        waits = 0 < WAITING.since <= self._came
        if not waits and time.monotonic() - self._came > _PATIENCE_S:
            self._came = 0.0
        return waits and time.monotonic() - self._came > _PATIENCE_S

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe, _MOST)
        except OSError:  # no signal has come
            return b""

    def forked(self) -> None:
        """Reset in a child process, whose signals are not its parent's."""
        if self._pipe != -1:
            self._pipe = -1
            signal.set_wakeup_fd(-1)
