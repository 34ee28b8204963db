"""The watcher: a thread next to the training that reads messages of other ranks and ends waits that cannot succeed.

Ranks exchange messages through the store of a process group (see `ledger._News`). A rank asks for another rank's note,
has failed, has ended, or has found that ranks cannot continue together (the *poison*). Every rank also writes a
heartbeat to the store about once a second. Others check it only when one of their waits has failed, or lasts too long.

A wait for a gloo collective does not end before its own timeout. A receive with a timeout of one millisecond, issued
from another thread of the process, ends any such wait: it closes the connections of the process group. On accelerators,
the host waits for a stream and not for a collective, so the backend is aborted instead. Both happen only when ranks
cannot continue together; the process group is unusable afterwards.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._comm.lanes import WAITING
from .._comm.own_groups import FORKED, MEETINGS
from .._torch.distributed import another_client, backend_name, exists, leave_to_gloo
from ..errors import ComposableShardError, PeerLostError, RankMismatchError, ShardConfigValueError
from .dump import Dump, in_ranges
from .interrupts import Interrupts
from .ledger import Ledger, Meeting, TransferLedger

_log = logging.getLogger("composable_shard.faults")

SILENCE = "COMPOSABLE_SHARD_PEER_TIMEOUT"  # seconds without a heartbeat after which a rank is lost; 0 for no limit
LOOK_S = 0.25  # seconds between two looks
_LOOKS_A_SIGN = 4  # looks per heartbeat
_LOOKS_FOR_MISSING = 4  # after this many looks, a missing message is skipped
LOST_S = 3.0  # a rank with an older heartbeat is lost, if a wait of this rank has failed
_ANSWERED_S = 2.0  # how long the store may take to answer
_EXPLAINED_S = 6.0  # how long a failed wait waits for its explanation
_JOINED_S = 5.0  # how long the end of the process waits for the watcher thread
_VAIN_S = 0.5  # a wait that lasts longer may never end
_TAG, _NEVER_SENT = 0x7FFF_0001, 0x7FFF_0002  # tags of messages that are never sent
_QUIET_S = 1.5  # a rank with no heartbeat for longer may have ended
_ENDED, _DESTROYED = "has ended", "has destroyed its process groups"  # how a rank leaves without a failure
_OUTPUT = "look at its output, and start the job again from a checkpoint"
_BATCHES = f"if it had fewer batches than the others, give all ranks the same number; otherwise {_OUTPUT}"
_OF_BACKEND = {"TIMEOUT": "a collective timed out"}  # by the error that NCCL's backend reports
_OF_NETWORK = ("onnection", "losed", "imed out", "timeout", "reset by peer", "roken pipe", "gloo")  # in errors of waits


class _Left(NamedTuple):
    """A rank that has left.

    Attributes:
        place: the place in its ledger at which it left.
        why: its error, `_ENDED` or `_DESTROYED`.
        sign: its last heartbeat.
    """

    place: int
    why: str
    sign: bytes

    @property
    def in_order(self) -> bool:
        """Whether it left without a known failure."""
        return self.why in (_ENDED, _DESTROYED)

    def __str__(self) -> str:
        action = f"after action {self.place - 1}" if self.place else "before its first forward"
        return f"{self.why} {action}" if self.in_order else f"failed {action} ({self.why})"


class _Ear:
    """The state of a watcher for one process group.

    Args:
        ledger: the ledger of this rank in the process group.
        silence_s: the maximum age in seconds of the heartbeat of a rank that this one waits for; 0 for no limit.
    """

    def __init__(self, ledger: Ledger, silence_s: float) -> None:
        self.ledger, self.silence_s = ledger, silence_s
        try:
            self.store = another_client(ledger.store)  # a separate connection, because waits on the other one are long
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {ledger.ranks[ledger.rank]}: {error}. Look at the output of rank 0, and restart the job"
            ) from error
        self.heard = self.missed = 0
        self.asked: set[int] = set()
        self.left: dict[int, _Left] = {}  # by index of a rank, for the ranks that have left
        self.signs: dict[int, tuple[bytes, float]] = {}
        self.looks = 0
        self.broken_at = self.searched_since = 0.0
        self.backend = ledger.group._get_backend(ledger.device)
        self.queues = backend_name(ledger.group, ledger.device) != "gloo"  # then the host waits for no collectives

    def look(self, own: Ledger, failed: str) -> None:
        """Read new messages, and act on them.

        Args:
            own: the ledger.
            failed: the text of the error with which a wait of this rank has failed; empty if none has.
        """
        if self.looks % _LOOKS_A_SIGN == 0:
            self.store.set(f"sign/{own.rank}", f"{self.looks}|{own.place}|{own.last}")
            own.news.forget_old(self.store)
        self.looks += 1
        self._hear(own)
        self.asked = {place for place in self.asked if not own.answer(self.store, place)}
        failed = failed or self._failed()
        in_vain = failed or self.queues or (WAITING.since and time.monotonic() - WAITING.since > _VAIN_S)
        if own.fault is None and in_vain:
            self._look_for_lost(own, failed)

    def _hear(self, own: Ledger) -> None:
        """Read new messages."""
        last = self.store.add("news", 0)
        while self.heard < last:
            key = f"news/{self.heard + 1}"
            if self.store.check([key]):
                self.missed = 0
                self._take(own, self.store.get(key).decode())
            elif self.missed < _LOOKS_FOR_MISSING:
                self.missed += 1
                return
            self.heard += 1  # also skips messages that a killed rank did not write, or that were deleted since

    def _failed(self) -> str:
        """The failure that the backend reports; empty if there is none."""
        asked = getattr(self.backend, "get_error", None)
        state = "SUCCESS" if asked is None else asked().name
        return _OF_BACKEND.get(state, state) if state != "SUCCESS" else ""

    def _take(self, own: Ledger, news: str) -> None:
        kind, _, rest = news.partition("|")
        if kind == "poison":
            own.hear(self.store.get("poison").decode())
        elif kind == "ask":
            self.asked.add(int(rest))
        elif kind == "left":
            rank, place, why = rest.split("|", 2)
            self.left[int(rank)] = _Left(int(place), why, self._sign(int(rank)))

    def _look_for_lost(self, own: Ledger, failed: str) -> None:
        """Check whether this rank waits for another one that will never come."""
        if self._look_for_left(own, failed):
            return
        if failed:
            self._look_for_signs(own, failed, LOST_S)
        elif own.asks and not self.queues and self._look_for_closed(own):
            return
        elif self.silence_s and self.looks % _LOOKS_A_SIGN == 0:
            self._look_for_signs(own, failed, self.silence_s)
        elif WAITING.since and time.monotonic() - WAITING.since > own.limit - 2 * LOST_S:  # the wait may fail soon
            self._signs(own)

    def _look_for_left(self, own: Ledger, failed: str) -> bool:
        """Check whether a rank left before it reached the place where this rank waits."""
        at = own.place + (own.asks or bool(failed))  # a rank that asks or agrees on a plan has not noted its action yet
        for rank, left in self.left.items():
            if rank != own.rank and at > left.place > own.left_at and not self._is_back(rank, left):
                self._lost(own, rank, str(left), _BATCHES if left.in_order else _OUTPUT)
                return True
        return False

    def _is_back(self, rank: int, left: _Left) -> bool:
        """Whether a rank that had destroyed its process groups has created them again, in the same store."""
        return left.why == _DESTROYED and self._sign(rank) != left.sign

    def _look_for_signs(self, own: Ledger, failed: str, longest_s: float) -> None:
        signs = self._signs(own)
        now = time.monotonic()
        for rank, (sign, seen) in signs.items():
            if now - seen > longest_s:
                self._lost(own, rank, f"has sent no heartbeat for {now - seen:.0f} s{_known_of(sign)}")
                return
        if ("imed out" in failed or "imeout" in failed) and now - self.searched_since > longest_s:
            self._late(own, signs)

    def _look_for_closed(self, own: Ledger) -> bool:
        """Check whether a rank that this one asks has closed its connection, for example because it was killed.

        This rank waits for the store, so its connections to other ranks do not report this. A receive fails immediately
        if the connection is closed. Otherwise it stays pending, and no message is ever sent for it.
        """
        now = time.monotonic()
        for rank, (sign, seen) in self._signs(own).items():
            if now - seen > _QUIET_S:
                try:
                    own.group.recv([torch.zeros(1)], rank, _NEVER_SENT)
                except RuntimeError:
                    self._lost(own, rank, f"has closed its connections{_known_of(sign)}")
                    return True
        return False

    def _signs(self, own: Ledger) -> dict[int, tuple[bytes, float]]:
        """By index of each other rank: its last heartbeat, and when that was first seen."""
        now = time.monotonic()
        self.searched_since = self.searched_since or now
        for rank in range(own.world):
            if rank != own.rank:
                sign = self._sign(rank)
                if self.signs.get(rank, (None, 0.0))[0] != sign:
                    self.signs[rank] = sign, now
        return self.signs

    def _sign(self, rank: int) -> bytes:
        key = f"sign/{rank}"
        return self.store.get(key) if self.store.check([key]) else b"0|0|"

    def _lost(self, own: Ledger, index: int, what: str, advice: str = _OUTPUT) -> None:
        own.poison(
            PeerLostError,
            f"rank {own.ranks[index]} {what}; rank {own.ranks[own.rank]} waits for it in {_last(own)}. "
            f"{own.after_loss(advice)}",
            self.store,
        )

    def _late(self, own: Ledger, signs: dict[int, tuple[bytes, float]]) -> None:
        behind = {own.ranks[rank]: _place_of(sign) for rank, (sign, _) in signs.items()}
        late = {rank: (place, last) for rank, (place, last) in behind.items() if place < own.place}
        if late:
            did = "; ".join(
                f"rank {rank} only reached action {place - 1} ({last})"
                if place
                else f"rank {rank} has reached no action yet"
                for rank, (place, last) in late.items()
            )
            own.poison(
                RankMismatchError,
                f"not all ranks reached action {own.place - 1}, {own.last}, within {own.limit:.0f} s: {did}. All ranks "
                "must run the same modules: if one rank alone runs a forward, a save or a full_tensor, or has fewer "
                "batches, the others wait",
                self.store,
            )

    def end_vain_waits(self, own: Ledger, is_stuck: bool) -> None:
        """End waits of this rank that would never end.

        Args:
            own: the ledger.
            is_stuck: whether this rank was interrupted (Ctrl-C) and still waits for others.
        """
        if is_stuck and own.fault is None:
            self._interrupted(own)
        if own.fault is not None and not isinstance(own, Meeting) and (WAITING.since or self.queues):
            self._free(own)

    def _interrupted(self, own: Ledger) -> None:
        own.poison(
            PeerLostError,
            f"rank {own.ranks[own.rank]} was interrupted (Ctrl-C) while it waited in {_last(own)}, and has closed its "
            "connections. Start the job again from a checkpoint",
            self.store,
        )

    def is_answered(self) -> bool:
        """Whether the store still answers after an error."""
        with suppress(Exception):
            self.store.check(["poison"])
            return True
        return False

    def _free(self, own: Ledger) -> None:
        now = time.monotonic()
        if now - self.broken_at > 1.0:
            self.broken_at = now
            if self.queues:
                self.backend.abort()
                self.broken_at = float("inf")  # abort only once
                return
            with suppress(RuntimeError):
                nowhere = [torch.zeros(1)]
                own.group.recv(nowhere, (own.rank + 1) % own.world, _TAG).wait(timedelta(milliseconds=1))


def _within(seconds: float, *calls: Callable[[], object]) -> None:
    """Make calls to the store. If its host is stopped, they never return, and are abandoned after `seconds`."""

    def make() -> None:
        for call in calls:
            with suppress(Exception):
                call()

    thread = threading.Thread(target=make, name="composable_shard calls", daemon=True)
    thread.start()
    thread.join(seconds)


def _silence_s() -> float:
    given = os.environ.get(SILENCE, "").strip()
    try:
        seconds = float(given or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ShardConfigValueError(
            f"{SILENCE}={given}: expected the number of seconds without a heartbeat after which a rank is lost while "
            "others wait for it, or 0 to wait as long as the process group's timeout"
        )
    return seconds


def _is_of_network(error: Exception) -> bool:
    return not isinstance(error, ComposableShardError) and any(word in str(error) for word in _OF_NETWORK)


def _last(own: Ledger) -> str:
    first = "its first transfer of weights" if isinstance(own, TransferLedger) else "its first forward"
    return f"action {own.place - 1} ({own.last})" if own.place else first


def _without_connection(own: Ledger, error: Exception) -> str:
    return f"rank {own.ranks[own.rank]} lost a connection in {_last(own)}: {error}"


def _known_of(sign: bytes) -> str:
    place, last = _place_of(sign)
    return f"; its last known action is {place - 1} ({last})" if place else ""


def _place_of(sign: bytes) -> tuple[int, str]:
    _, place, last = sign.decode().split("|", 2)
    return int(place), last


class _Watcher:
    """The watcher thread, and all ledgers of this process."""

    def __init__(self) -> None:
        self._ears: list[_Ear] = []
        self._meetings: dict[dist.ProcessGroup, Meeting] = {}  # by the user's process group, until its ranks have met
        # Ledgers whose store is lost, to explain errors of later waits. Weak, because ledgers keep process groups
        # alive.
        self._unheard: weakref.WeakSet[Ledger] = weakref.WeakSet()
        self._failed = ""
        self._failed_in: dict[Ledger, str] = {}  # failed waits of transfers, which do not concern training
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._why = _ENDED
        self._interrupts = Interrupts()
        self._dump = Dump()

    def add(self, ledger: Ledger) -> None:
        """Watch a ledger while its process group exists.

        Raises:
            ShardConfigValueError: the environment variable `SILENCE` is not a valid time.
        """
        heard = [ear for ear in self._ears if ear.ledger.fault is None]  # faulty ledgers are not used any more
        self._ears = [*heard, _Ear(ledger, _silence_s())]  # a new list, because the thread may be reading the old one
        _log.info("watching process group %s of ranks %s", ledger.group.group_name, in_ranges(ledger.ranks))
        if self._thread is None:
            self._interrupts.listen()
            WAITING.explain_by(self.explain)
            self._thread = threading.Thread(target=self._run, name="composable_shard watcher", daemon=True)
            self._thread.start()

    @contextmanager
    def watching(self, ledger: Ledger) -> Iterator[None]:
        """Watch a ledger in this context only."""
        self.add(ledger)
        try:
            yield
        finally:
            self._ears = [ear for ear in self._ears if ear.ledger is not ledger]

    def ledgers(self) -> list[Ledger]:
        """The ledgers of process groups that exist, without meetings."""
        return [ear.ledger for ear in self._ears if ear.ledger.trains and exists(ear.ledger.group)]

    def explain_transfer(self, own: TransferLedger, error: Exception) -> Exception:
        """The error that explains why a wait for a transfer has failed. It is a fault of this transfer alone."""
        if not _is_of_network(error):
            return error
        self._failed_in[own] = str(error)
        try:
            return self._explained([own], error)
        finally:
            del self._failed_in[own]

    def expect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Expect a meeting of the ranks of this group: notify them if this process ends before it comes."""
        if group not in self._meetings:
            self._meetings = {each: meeting for each, meeting in self._meetings.items() if exists(each)}
            self._meetings[group] = Meeting(group, device, self.spread)
            self.add(self._meetings[group])

    def meet(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Wait for the other ranks of a group.

        Raises:
            PeerLostError: a rank is lost, or does not come.
        """
        self.expect(group, device)
        meeting = self._meetings[group]
        meeting.come()
        del self._meetings[group]
        self._ears = [ear for ear in self._ears if ear.ledger is not meeting]

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            is_stuck = self._interrupts.came_while_waiting()
            for ear in self._ears:
                self._look(ear, is_stuck)
        # Done in this thread, because from Python 3.12 on no thread can be started while an interpreter ends.
        for ear in self._ears:
            with suppress(Exception):
                ear.ledger.end(self._why)

    def _look(self, ear: _Ear, is_stuck: bool) -> None:
        own = ear.ledger
        try:
            if not exists(own.group):
                own.end(_DESTROYED)
                raise RuntimeError("it was destroyed")
            ear.look(own, self._failed if own.trains else self._failed_in.get(own, self._failed))
            ear.end_vain_waits(own, is_stuck)
        except Exception as error:
            _log.debug("a look at a process group has failed", exc_info=True)
            if not (exists(own.group) and ear.is_answered()):
                self._drop(ear, error)

    def _drop(self, ear: _Ear, error: Exception) -> None:
        """Stop watching a process group that was destroyed, or whose store is lost."""
        self._ears = [each for each in self._ears if each is not ear]
        due = self._failed or (not ear.ledger.trains and exists(ear.ledger.group))  # later waits cannot find the reason
        if due and ear.ledger.fault is None:
            ear.ledger.without_store(error)
        if ear.ledger.trains:
            self._unheard.add(ear.ledger)

    def spread(self, faulty: Ledger) -> None:
        """Report the fault of one process group to the ranks of all other current ones."""
        fault = faulty.fault
        assert fault is not None
        self._dump.of_fault(faulty, self.ledgers(), fault.kind, fault.text)
        for ear in self._ears:
            if ear.ledger.fault is None:
                with suppress(Exception):
                    ear.ledger.poison(type(fault.error()), fault.text, ear.store)

    def failed(self, why: str) -> None:
        """Write the ledgers because this rank itself has failed."""
        self._dump.of_failure(self.ledgers(), why)

    def explain(self, error: Exception) -> Exception:
        """The error that explains why a wait has failed, or the same error if there is no explanation."""
        if threading.current_thread() is self._thread or not _is_of_network(error):
            return error
        ledgers = self.ledgers()
        if not ledgers:
            own = next((each for each in self._unheard if exists(each.group)), None)
            return error if own is None else PeerLostError(_without_connection(own, error))
        self._failed = str(error)
        try:
            return self._explained(ledgers, error)
        finally:
            self._failed = ""

    def _explained(self, ledgers: Sequence[Ledger], error: Exception) -> Exception:
        """Wait until the thread has found the reason. Otherwise return an error with the last action."""
        end = time.monotonic() + _EXPLAINED_S
        while time.monotonic() < end:
            if (fault := next((own.fault for own in ledgers if own.fault is not None), None)) is not None:
                return fault.error()
            time.sleep(0.02)
        own = ledgers[0]
        why = _without_connection(own, error)
        _within(_ANSWERED_S, partial(own.poison, PeerLostError, why))
        if own.fault is None:  # the store does not answer either
            for each in ledgers:
                each.cut(why)
        return PeerLostError(why) if own.fault is None else own.fault.error()

    def end(self) -> None:
        """Notify other ranks that this process ends, and why."""
        if (raised := getattr(sys, "last_value", None)) is not None:
            self._why = f"{type(raised).__name__}: {raised}"
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOINED_S)  # a thread that outlives the interpreter would crash the process
            leave_to_gloo()
        if raised is not None:
            self.failed(self._why)

    def forked(self) -> None:
        """Reset in a child process: the connections belong to its parent."""
        self._interrupts.forked()
        for own in self.ledgers():
            own.cut(FORKED.format(os.getpid()))
        self._ears, self._unheard, self._meetings, self._thread = [], weakref.WeakSet(), {}, None
        self._ended, self._dump = threading.Event(), Dump()  # another thread may have held their locks during the fork


WATCHER = _Watcher()
MEETINGS.arrange_by(WATCHER.expect, WATCHER.meet)
atexit.register(WATCHER.end)
os.register_at_fork(after_in_child=WATCHER.forked)


def ledger_of(group: dist.ProcessGroup, device: torch.device) -> Ledger:
    """The ledger of this rank in a process group of this library; it is watched from now on."""
    for ledger in WATCHER.ledgers():
        if ledger.group is group:
            return ledger
    ledger = Ledger(group, device, WATCHER.spread)
    WATCHER.add(ledger)
    return ledger


def together(what: str, ranks: Collection[int]) -> None:
    """Note a joint action of all of these ranks that belongs to no model, for example "save a checkpoint".

    Every process group of this library whose ranks are all among these compares it, in the same order on all ranks.
    Process groups with a fault are skipped, because their error was already raised.

    Raises:
        RankMismatchError: some ranks are about to do something else. Raised on all ranks.
        PeerLostError: another rank is lost.
    """
    for ledger in sorted(WATCHER.ledgers(), key=lambda each: each.group.group_name):
        if ledger.fault is None and {*ledger.ranks} <= {*ranks}:
            ledger.issue(what)
