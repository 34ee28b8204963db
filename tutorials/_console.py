"""Progress on the terminal, and Ctrl-C.

This module does not import torch, so Ctrl-C prints no traceback while torch is imported.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit status after Ctrl-C


class Interrupt:
    """Ctrl-C ends the program immediately. Inside `deferred()` it only sets `asked`.

    If a rank stopped during a step, the other ranks would wait for it. Inside `deferred()`, ranks exchange `asked`
    after each step, and stop together.
    """

    def __init__(self) -> None:
        self.asked = False
        self._wait = False
        signal.signal(signal.SIGINT, self._notice)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self._wait:
            self.leave()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._wait = True
        try:
            yield
        finally:
            self._wait = False

    def leave(self) -> NoReturn:
        """Exit immediately, without a traceback and without waiting for peers that may have ended."""
        sys.stdout.flush()
        os._exit(INTERRUPTED)


class Display:
    """A progress bar on a terminal (with rich), otherwise plain lines. Prints nothing if not `active`."""

    def __init__(self, *, active: bool, seconds_between_lines: float = 10.0) -> None:
        self._active = active
        self._pause = seconds_between_lines
        self._last_line = -self._pause
        self._bar = _make_bar() if active and sys.stdout.isatty() else None
        self._task = None

    def say(self, text: str = "") -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._active:
            print(text, flush=True)

    def progress(self, share: float, *, step: int, loss: float, speed: float, left: float) -> None:
        """Show progress.

        Args:
            share: finished part of the training, 0 to 1.
            speed: tokens per second.
            left: estimated seconds until the end.
        """
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=1.0, facts="")
                self._bar.start()
            facts = f"step {step}  loss {loss:.3f}  {speed:,.0f} tokens/s  {_clock(left)} left"
            self._bar.update(self._task, completed=share, facts=facts)
        elif self._active and (share >= 1 or time.monotonic() - self._last_line >= self._pause):
            self._last_line = time.monotonic()
            line = f"{share:5.1%}  step {step:5d}  loss {loss:.3f}  {speed:8,.0f} tokens/s"
            print(f"{line}  {_clock(left)} left", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes}:{seconds:02d}"


def _make_bar():
    """Return a rich progress bar, or None if rich is not installed."""
    try:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    except ImportError:
        return None
    return Progress(BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[facts]}"))
