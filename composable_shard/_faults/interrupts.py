"""Ctrl-C while a rank waits for others: Python hears of it only when the wait ends, which may be never.

What hears of it at once is the wakeup file descriptor of `signal`, to which the interpreter writes the number of each
signal as it comes, in whatever call the main thread is.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from .._comm.lanes import WAITING

_PATIENCE_S = 1.0  # a wait that ends by itself within this time goes on as if nothing had come
_MOST = 4096  # bytes read at once


class Interrupts:
    """The signals that come to this process; `listen` begins."""

    def __init__(self) -> None:
        self._pipe = -1
        self._came = 0.0

    def listen(self) -> None:
        """Hear signals, unless somebody else does already, as an event loop, or this is not the main thread."""
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
        """Whether an interrupt came some time ago, and the main thread still waits in the same wait as then."""
        if self._pipe != -1 and signal.SIGINT in self._read():
            self._came = time.monotonic()
        waits = 0 < WAITING.since <= self._came
        if not waits and time.monotonic() - self._came > _PATIENCE_S:
            self._came = 0.0
        return waits and time.monotonic() - self._came > _PATIENCE_S

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe, _MOST)
        except OSError:  # nothing has come
            return b""

    def forked(self) -> None:
        """This is a child process, whose signals are not its parent's."""
        if self._pipe != -1:
            self._pipe = -1
            signal.set_wakeup_fd(-1)
