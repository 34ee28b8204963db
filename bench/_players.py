"""Processes that take turns. Each runs one implementation, and only one works at a time.

Implementations in the same process would affect each other by hooks, garbage and memory. Because processes take turns,
other load on the machine affects all of them alike.
"""

import contextlib
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

END_S = 30  # time for a process to end before it is killed


@dataclass(frozen=True)
class _Failure:
    """The error with which a process ends."""

    text: str


class Player:
    """A process that builds an object and calls its methods on request.

    Args:
        name: name of the process in error messages.
        make: builds the object. `make` and its arguments are pickled. If the object has a method `close`, it is called
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
        """Wait until the object is built. Call this once, before the first `call`.

        Raises:
            SystemExit: the process ended. The message has its error.
        """
        self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and return its result.

        Raises:
            SystemExit: the process ended. The message has its error.
        """
        with contextlib.suppress(OSError):  # the process has ended; `_receive` raises
            self._connection.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            raise SystemExit(
                f"the process of {self._name} ended with status {self._process.exitcode}; "
                "if it raised an error, see above"
            ) from None
        if isinstance(answer, _Failure):
            self._process.join(END_S)  # its memory on the GPU is free afterwards
            raise SystemExit(f"the process of {self._name} ended: {answer.text}")
        return answer


def _play(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        _answer_calls(connection, make, arguments)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent ended
            connection.send(_Failure(f"{type(error).__name__}: {error}"))
        raise


def _answer_calls(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    played = make(*arguments)
    try:
        connection.send(None)
        while True:
            try:
                method, of_method = connection.recv()
            except EOFError:  # the parent closed the connection or ended
                return
            connection.send(getattr(played, method)(*of_method))
    finally:
        close = getattr(played, "close", None)
        if close is not None:
            close()
