"""Processes that take turns: each holds one implementation, and only the process that was called works.

Implementations in one process are not independent: hooks, garbage and memory that one leaves behind change the figures
of the others. Taking turns lets whatever else the machine does affect all of them alike.
"""

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

END_S = 30  # in which a process closes what it holds, before it is killed


class Player:
    """A process that builds an object, and calls methods of it on request.

    Args:
        name: for the message if the process fails.
        make: builds the object. It and its arguments are pickled. The object may have a method `close`, which is called
            before the process ends.
    """

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_play, args=(other_end, make, arguments), daemon=True)
        self._process.start()
        other_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()

    def ready(self) -> None:
        """Wait until the object has been built; once, before the first call.

        Raises:
            SystemExit: the process ended.
        """
        self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and wait for what it returns.

        Raises:
            SystemExit: the process ended.
        """
        with contextlib.suppress(OSError):  # the process has closed its end: `_receive` raises
            self._connection.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            raise SystemExit(
                f"the process of {self._name} ended with status {self._process.exitcode}; "
                "if it raised an error, that is above"
            ) from None


def _play(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    played = make(*arguments)
    try:
        connection.send(None)
        while True:
            try:
                method, of_method = connection.recv()
            except EOFError:  # the parent closed its end, or ended
                return
            connection.send(getattr(played, method)(*of_method))
    finally:
        close = getattr(played, "close", None)
        if close is not None:
            close()
