"""Writes this rank's ledgers to a file for `composable-shard explain FOLDER` when ranks cannot continue together.

Files are written only if the environment variable ``COMPOSABLE_SHARD_FAULTS`` names a folder. Each rank writes one file
there when it is notified of a fault or fails itself. A later fault of the same rank replaces the file.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from .._plan.codec import read, written
from ..errors import ShardConfigValueError

VARIABLE = "COMPOSABLE_SHARD_FAULTS"
JSON_VERSION = 1
FILE_NAME = re.compile(r"rank([0-9]+)\.json")
LOG = logging.getLogger("composable_shard.faults")
WAITS_LOG = logging.getLogger("composable_shard.faults.waits")
WAITS_LOG.addHandler(logging.NullHandler())  # healthy ranks wait, too: no output on stderr unless logging is set up
_MOST_RANKS = 1 << 20
_NOTES = 200  # how many notes of each ledger are written
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class LedgerTail:
    """The end of a ledger.

    Attributes:
        group, description: name and description of the process group.
        device: the device of its tensors.
        ranks: its ranks of the world, in the format of `in_ranges`.
        limit: the maximum time in seconds that ranks wait for each other.
        place: the number of notes in the ledger so far.
        notes: the last notes; the very last is the note at `place - 1`.
        asked: the places of those notes that were not expected, so that all ranks compared them.
        about_to: the note that the rank is waiting to have compared; None if it is not waiting.
        taken_back: whether the action of the last note was not issued, because the rank has failed.
        left: whether this rank itself has failed at this place.
    """

    group: str
    description: str
    device: str
    ranks: str
    limit: float
    place: int
    notes: tuple[str, ...]
    asked: tuple[int, ...]
    about_to: str | None
    taken_back: bool
    left: bool


@dataclass(frozen=True)
class FaultText:
    """Why ranks cannot continue together: the name of an error's class, and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class RankLedgers:
    """The content of a rank's file.

    Attributes:
        rank, world: rank and world size in the default process group.
        host, pid: host name and process id.
        time: the time of writing; UTC, in ISO 8601.
        torch, library: their versions.
        failure: the error with which the rank itself failed; None if it has not failed, or continued afterwards.
        fault: the fault; None if the rank failed itself and has not been notified of a fault.
        ledgers: the ledgers of all process groups over which this rank communicates.
    """

    rank: int
    world: int
    host: str
    pid: int
    time: str
    torch: str
    library: str
    failure: str | None
    fault: FaultText | None
    ledgers: tuple[LedgerTail, ...]

    def to_json(self) -> str:
        """The content as JSON, for `from_json`."""
        return written(self, "ledgers", JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> RankLedgers:
        """The inverse of `to_json`.

        Raises:
            ShardConfigValueError: the text has another format or version, or other fields.
        """
        return read(cls, text, "ledgers", JSON_VERSION)


class Noted(Protocol):
    """The parts of a ledger that are needed to write it."""

    ranks: list[int]
    rank: int

    def tail(self, count: int) -> LedgerTail: ...


class Dump:
    """Writes the ledgers of this process, once for each fault."""

    def __init__(self) -> None:
        self._covered: weakref.WeakSet[Noted] = weakref.WeakSet()  # ledgers that were written with a fault
        self._lock = threading.Lock()
        self._failure = ""

    def of_fault(self, faulty: Noted, others: Sequence[Noted], kind: str, text: str) -> None:
        """Write the ledgers because of a fault. If the fault spreads to further ledgers, nothing more is written.

        Args:
            faulty: the ledger in which the fault was found.
            others: the ledgers whose process groups exist.
            kind, text: class name and text of the error.
        """
        ledgers = [*dict.fromkeys([faulty, *others])]
        with self._lock:
            if faulty in self._covered:
                return
            self._covered.update(ledgers)
        LOG.error("rank %d: %s: %s", faulty.ranks[faulty.rank], kind, text)
        _write_where_asked(ledgers, FaultText(kind, text), self._failure)

    def of_failure(self, ledgers: Sequence[Noted], why: str) -> None:
        """Write the ledgers because this rank itself has failed, unless they were written for a fault before."""
        self._failure = why
        if ledgers and not any(each in self._covered for each in ledgers):
            _write_where_asked(ledgers, None, why)


def pointer() -> str:
    """The end of an error's text, which names the folder; empty if no folder was requested."""
    path = _folder()
    return "" if path is None else f"; ledgers of the ranks: {path} (python -m composable_shard explain {path})"


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    return Path(named).absolute() if named else None


def _write_where_asked(ledgers: Sequence[Noted], fault: FaultText | None, failure: str) -> None:
    path = _folder()
    if path is None:
        return
    try:
        write(path, ledgers, fault, failure)
    except Exception as error:  # no error here may hide the fault itself
        LOG.warning("%s: cannot write the ledgers of this rank (%s); %s names the folder", path, error, VARIABLE)


def write(folder: Path, ledgers: Sequence[Noted], fault: FaultText | None, failure: str = "") -> Path:
    """Write the ends of ledgers atomically.

    Args:
        folder: the folder; created if it does not exist.
        ledgers: the ledgers of this rank; at least one.
        fault: why ranks cannot continue together; None if they can.
        failure: the last error of this rank itself. It is not written if the rank continued afterwards.

    Returns:
        the path of the file, ``rank<N>.json``.

    Raises:
        OSError: the file cannot be written.
    """
    rank = ledgers[0].ranks[ledgers[0].rank]
    tails = tuple([each.tail(_NOTES) for each in ledgers])
    content = RankLedgers(
        rank=rank,
        world=dist.get_world_size() if dist.is_initialized() else 1 + max(max(each.ranks) for each in ledgers),
        host=socket.gethostname(),
        pid=os.getpid(),
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        torch=str(torch.__version__),
        library=_version(),
        failure=failure if failure and any(each.left for each in tails) else None,
        fault=fault,
        ledgers=tails,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.json"
    temporary = folder / f".rank{rank}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    try:
        temporary.write_text(content.to_json(), encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _version() -> str:
    try:
        return importlib.metadata.version("composable-shard")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def in_ranges(ranks: Sequence[int]) -> str:
    """Ranks as text, for example ``0, 2-7``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_ranges(text: str) -> tuple[int, ...]:
    """The inverse of `in_ranges`.

    Raises:
        ShardConfigValueError: the text has another format, or more than a million ranks.
    """
    ranks: list[int] = []
    for each in text.split(", "):
        run = _RANGE.fullmatch(each)
        first, last = (int(run[1]), int(run[2] or run[1])) if run else (1, 0)
        if first > last or last >= _MOST_RANKS or len(ranks) + last - first >= _MOST_RANKS:
            raise ShardConfigValueError(f"expected ranks such as '0, 2-7', got {text!r:.60}")
        ranks += range(first, last + 1)
    return tuple(ranks)
