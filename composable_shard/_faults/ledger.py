"""The ledger: the ordered actions that this rank takes with others, compared with those of others *before* they happen.

Each process group of this library has one. Before a rank issues a gather or a reduction, it adds a note to the ledger.
It also notes each forward that gathers, and each optimizer step. If the notes of all ranks are equal, their collectives
match.

Training repeats itself. So each note is compared with the expected one: the note that last time followed the previous
note (`_Log`). All ranks expect the same note, because all earlier notes are the same. An expected note costs a fraction
of a microsecond, and the rank continues. If a note is not expected, the rank *asks*: it writes the note to the store of
the process group, and issues nothing until all ranks have reported their note for this place. If all ranks do the same,
all of them ask, and all continue. If a rank does what was expected, it does not ask, but answers through its watcher
(see `watch.py`). Its note differs, which raises a `RankMismatchError` on all ranks.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .._comm.lanes import WAITING
from .._comm.own_groups import limit_of, note_broken
from .._plan.plan import ShardPlan
from .._torch.distributed import Store, delete_key, prefixed, store_of
from ..errors import ComposableShardError, PeerLostError, RankMismatchError
from .dump import WAITS_LOG, LedgerTail, in_ranges, pointer

_KINDS: dict[str, type[ComposableShardError]] = {each.__name__: each for each in (PeerLostError, RankMismatchError)}
_HOST = 0  # the rank that hosts the store, unless a launcher hosts it
_MOST_NOTES = 1 << 18  # above this number, half of the notes are discarded
_MOST_NOTES_OF_TRANSFERS = 1 << 12  # they are all different, so none is expected
_MODEL = re.compile(r"model [\d.]+")
STEP, HOLD = "step ", "hold "  # prefixes of notes about past actions, and about current values
IN_HOOK = " in a hook on parameter "  # part of notes about collectives of users' hooks
_PAUSES = (0.0002, 0.01)  # seconds between two checks for an answer: the first and the longest pause
_TOLD_S = 1.0  # how long a rank waits for the plan of another one, to report how they differ
_LATE_S = 1.0  # a question that lasts longer is logged
_NEWS_FOR_S = 10.0  # messages are deleted after this time
_NEWS_AFTER = 0.02  # seconds that a rank waits for others to ask, too, before it notifies their watchers


@dataclass(frozen=True)
class Fault:
    """Why ranks cannot continue together.

    Attributes:
        kind: name of the error's class.
        text: what is wrong, where, and what to do; the same on all ranks.
        ending: text that this rank's error appends.
    """

    kind: str
    text: str
    ending: str = ""

    def error(self) -> ComposableShardError:
        """Create an error for this fault."""
        return _KINDS[self.kind](self.text + self.ending)

    def __str__(self) -> str:
        return f"{self.kind}|{self.text}"

    @classmethod
    def parse(cls, text: str, ending: str = "") -> Fault:
        """The inverse of `str`."""
        kind, _, rest = text.partition("|")
        return cls(kind, rest, ending)


class _News:
    """Messages of this rank to the watchers of all ranks. They are deleted after some seconds.

    Args:
        store: the store of the process group.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._posted: deque[tuple[float, str]] = deque()

    def post(self, text: str, store: Store | None = None) -> None:
        """Send a message; `store` is another client, for use in another thread."""
        store = store or self._store
        key = f"news/{store.add('news', 1)}"
        store.set(key, text)
        self._posted.append((time.monotonic(), key))

    def forget_old(self, store: Store) -> None:
        """Delete old messages; called in one thread only."""
        while self._posted and time.monotonic() - self._posted[0][0] > _NEWS_FOR_S:
            delete_key(store, self._posted.popleft()[1])


class _Log:
    """The notes of this rank, and the note expected next: the one that followed the last time, or the planned one.

    The oldest notes are discarded. A place is the number of all earlier notes, including discarded ones.

    Attributes:
        notes: the notes that were not discarded.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._forgotten = 0
        self._lock = threading.Lock()  # protects what other threads read while notes are discarded
        self._not_issued = -1  # the number of notes when the last one was taken back
        self._last: dict[str, int] = {}  # by note: its last index in `notes`, among those before `_indexed`
        self._indexed = 0
        self._source = self.notes  # the list with the expected next note: `notes` itself, or planned notes
        self._at = 0  # index of the expected next note in `_source`
        self._planned: list[str] = []

    @property
    def place(self) -> int:
        """The number of notes so far."""
        return self._forgotten + len(self.notes)

    @property
    def issued(self) -> int:
        """The number of notes, without the last one if it was taken back."""
        return self.place - self.is_taken_back(self.place)

    def at(self, place: int) -> str:
        """The note at a place; other threads may call this."""
        with self._lock:
            index = place - self._forgotten
            return self.notes[index] if index >= 0 else "an action that is no longer recorded"

    def tail(self, count: int) -> tuple[int, tuple[str, ...]]:
        """The number of notes, and the last `count` notes; other threads may call this."""
        with self._lock:
            end = len(self.notes)
            return self._forgotten + end, tuple(self.notes[max(end - count, 0) : end])

    def take_back(self) -> None:
        """Mark the last note as not issued."""
        self._not_issued = self.place

    def is_taken_back(self, place: int) -> bool:
        """Whether there are `place` notes and the last one was taken back."""
        return self._not_issued == place

    def take(self, note: str) -> bool:
        """Append a note if it was expected, and expect the one after it; returns whether it was expected."""
        at, expected = self._at, self._source
        if at < len(expected) and expected[at] == note:
            self._at = at + 1
            self.notes.append(note)
            return True
        return False

    def plan(self, notes: list[str]) -> None:
        """Expect these notes after the next new note."""
        self._planned = notes

    def append(self, note: str) -> None:
        """Append a note that was not expected; all ranks do this at the same place."""
        for index in range(self._indexed, len(self.notes)):
            self._last[self.notes[index]] = index
        self._indexed = len(self.notes)
        self.notes.append(note)
        before = self._last.get(note)
        if before is None and self._planned:
            self._source, self._at, self._planned = self._planned, 0, []
            return
        self._source = self.notes
        self._at = len(self.notes) if before is None else before + 1  # after a new note, none is expected

    def forget(self, count: int) -> None:
        """Discard the first `count` notes."""
        with self._lock:
            del self.notes[:count]
            self._forgotten += count
        self._last.clear()
        self._indexed = 0
        if self._source is self.notes:
            self._at = self._at - count if self._at >= count else len(self.notes)


class Ledger:
    """The notes of this rank in one process group.

    Args:
        group: the process group, created by this library.
        device: the device of its tensors.
        on_fault: called when there is a fault.

    Attributes:
        group, device: the process group, and the device of its tensors.
        ranks: the ranks of the world in it, in order.
        rank: this rank's index among them.
        news: messages to the watchers of all ranks.
        fault: why its ranks cannot continue together; None while they can.
        left_at: the place at which this rank failed last; -1 if it never has.
        plans: by digest, the plans that notes name.
    """

    trains = True  # ranks train over the group: a fault in it is one of all others
    remedy = "Start the job again from a checkpoint"  # after a rank was lost
    _prefix = "composable_shard/ledger"  # prefix of its keys in the store

    def __init__(self, group: dist.ProcessGroup, device: torch.device, on_fault: Callable[[Ledger], None]) -> None:
        self.group, self.device = group, device
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = group.rank()
        self.store = prefixed(self._prefix, store_of(group))
        self.news = _News(self.store)
        self.fault: Fault | None = None
        self.left_at = -1
        self.plans: dict[str, ShardPlan] = {}
        self._on_fault = on_fault
        self._log = _Log()
        self._asked: dict[int, str] = {}  # by place, the notes that this rank has asked about
        self._said = (-1, "")  # place and note of the last question or answer that all ranks have completed
        self._before: dict[str, bool] = {}  # notes to add before the next note; True for those that begin a forward
        self._is_held = False  # whether the next note takes the slow path: notes precede it, or there is a fault
        self._forwards = 0
        self._compares = True  # until the store is lost

    # ---- actions of this rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def limit(self) -> float:
        """The maximum time in seconds that ranks wait for each other."""
        return limit_of(self.group, self.device).total_seconds()

    @property
    def place(self) -> int:
        """The number of notes so far."""
        return self._log.place

    @property
    def asks(self) -> bool:
        """Whether this rank waits for the notes of others at its place."""
        return self.place in self._asked

    @property
    def last(self) -> str:
        """The last note; empty if there is none."""
        return self._log.notes[-1] if self._log.notes else ""

    def plan(self, notes: list[str]) -> None:
        """Expect these notes after the next beginning of a forward, because all ranks have the same plan."""
        self._log.plan(notes)

    def tail(self, count: int) -> LedgerTail:
        """The last notes in the form in which they are written; other threads may call this."""
        place, notes = self._log.tail(count)
        taken_back = self._log.is_taken_back(place)
        return LedgerTail(
            group=self.group.group_name,
            description=self.group.group_desc,
            device=str(self.device),
            ranks=in_ranges(self.ranks),
            limit=self.limit,
            place=place,
            notes=notes,
            asked=tuple([at for at in range(place - len(notes), place) if at in self._asked]),
            about_to=self._asked.get(place),
            taken_back=taken_back,
            left=self.left_at == place - taken_back,
        )

    def begin(self, note: str) -> None:
        """Begin a forward. Its first collective adds the note: a forward without one does not concern other ranks."""
        self._before = {before: False for before, begins in self._before.items() if not begins} | {note: True}
        self._is_held = True
        if len(self._log.notes) > _MOST_NOTES:
            self._log.forget(_MOST_NOTES // 2)
            self._asked.clear()

    def stepped(self, note: str) -> None:
        """Note an optimizer step; added with the next collective."""
        while note in self._before:
            note += "'"
        self._before[note] = False
        self._is_held = True

    def issue(self, note: str) -> None:
        """Note a collective that this rank is about to issue.

        Raises:
            RankMismatchError: not all ranks are about to issue the same collective. It is issued on no rank.
            PeerLostError: another rank is lost.
        """
        if self._is_held or not self._log.take(note):
            self._issue(note)

    def _issue(self, note: str) -> None:
        self._is_held = False
        self._is_held = self.fault is not None  # in this order, because another thread may set both in between
        before, self._before = self._before, {}
        for each, begins in before.items():
            self._forwards += begins
            self._note(each)
        self._note(note)

    def _note(self, note: str) -> None:
        if self.fault is None and self._log.take(note):
            return
        if self._compares:
            try:
                self._ask(note)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                if _HOST in self.ranks:
                    raise self.without_store(error) from error
                self._stop_comparing(error)
        self._log.append(note)

    def _stop_comparing(self, error: Exception) -> None:
        """Continue although the store cannot be reached any more.

        Its host, which is not in this group, has ended or failed. These ranks need the store only to compare their
        actions. A collective with a lost rank also fails without it.
        """
        self._compares = False

    # ---- actions of other ranks

    def _ask(self, note: str) -> None:
        """Ask the other ranks whether they are about to do the same."""
        self.check()
        place = self.place
        self._asked[place] = note
        self._say(self.store, place, note)
        with WAITING.for_ranks():
            self._await_answers(place, note)
        if self.store.get(f"go/{place}") != b"alike":
            self._differ(place)
        self._clear(place, note)

    def _await_answers(self, place: int, note: str) -> None:
        deadline = time.monotonic() + self.limit
        news_at = time.monotonic() + _NEWS_AFTER
        late_at = time.monotonic() + _LATE_S
        pause, longest = _PAUSES
        while not self.store.check([f"go/{place}"]):
            self.check()
            now = time.monotonic()
            if now > news_at:
                news_at = float("inf")
                self.news.post(f"ask|{place}")
            if now > late_at:
                late_at = float("inf")
                WAITS_LOG.warning("rank %d waits for others at action %d: %s", self.ranks[self.rank], place, note)
            if now > deadline:
                self._absent(place, note)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _clear(self, place: int, note: str) -> None:
        """Delete the keys of the previous question from the store: all ranks have reached this place."""
        (before, said), self._said = self._said, (place, note)
        if before < 0:
            return
        delete_key(self.store, f"said/{before}/{self.rank}")
        if self.rank == 0:
            for key in (_alike(before, said), f"all/{before}", f"go/{before}"):
                delete_key(self.store, key)

    def check(self) -> None:
        """Raise the error of the fault, if there is one."""
        if self.fault is not None:
            raise self.fault.error()

    def _say(self, store: Store, place: int, note: str) -> None:
        """Report this rank's note at a place; the last rank to report sets whether all notes are equal."""
        alike = _alike(place, note)
        store.set(f"said/{place}/{self.rank}", note)
        store.add(alike, 1)
        if store.add(f"all/{place}", 1) == self.world:
            store.set(f"go/{place}", "alike" if store.add(alike, 0) == self.world else "apart")

    def answer(self, store: Store, place: int) -> bool:
        """Answer another rank's question for this rank's note at a place; returns whether it was answered.

        Args:
            store: a separate client, because another thread calls this.
            place: the place.
        """
        if place >= self.place:
            return False
        if place not in self._asked:  # otherwise this rank has reported the note itself
            note = self._log.at(place)
            self._tell_plan(store, note)
            self._say(store, place, note)
        return True

    def _tell_plan(self, store: Store, note: str) -> None:
        """Publish the plan that a note of this rank names."""
        if plan := self.plans.get(_plan_in(note)):
            store.set(f"plan/{_plan_in(note)}", plan.to_json())

    def _plan_of(self, note: str) -> str:
        """The plan that a note of another rank names, as JSON; empty if it names none, or if it is not published."""
        key = f"plan/{_plan_in(note)}"
        end = time.monotonic() + _TOLD_S
        while _plan_in(note) and time.monotonic() < end:
            if self.store.check([key]):
                return self.store.get(key).decode()
            time.sleep(_PAUSES[0])
        return ""

    def _differ(self, place: int) -> None:
        said = [self.store.get(f"said/{place}/{rank}").decode() for rank in range(self.world)]
        self._tell_plan(self.store, said[self.rank])
        other = next(rank for rank, note in enumerate(said) if note != said[0])
        one, two = f"rank {self.ranks[0]}", f"rank {self.ranks[other]}"
        plans = [self._plan_of(note) for note in (said[0], said[other])]
        if all(plans) and plans[0] != plans[1]:
            lines = ShardPlan.from_json(plans[0]).diff(ShardPlan.from_json(plans[1])).splitlines()
            what = f"ranks {self.ranks[0]} and {self.ranks[other]} have different plans: {'; '.join(lines)}"
        else:
            what = (
                f"ranks {self.ranks[0]} and {self.ranks[other]} do different things: {one} {_tense(said[0])}, and "
                f"{two} {_tense(said[other])}"
            )
        where = f" (action {place} of these ranks, forward {self._forwards})" if self.trains else ""
        self.poison(RankMismatchError, f"{what}{where}. {self._advice(said[0], said[other])}")
        self.check()

    def _advice(self, one: str, two: str) -> str:
        """What to do if two ranks have these notes at one place."""
        return _advice(one, two)

    def _absent(self, place: int, note: str) -> None:
        absent = [rank for at, rank in enumerate(self.ranks) if not self.store.check([f"said/{place}/{at}"])]
        if absent:  # else the last rank has just arrived
            self.poison(*self._absence(place, note, absent))
        self.check()

    def _absence(self, place: int, note: str, absent: Sequence[int]) -> tuple[type[ComposableShardError], str]:
        """The error type and text for ranks that wait for absent ones."""
        text = (
            f"{_ranks(absent)} did not reach action {place}, where rank {self.ranks[self.rank]} {_tense(note)}, within "
            f"{self.limit:.0f} s. All ranks must run the same modules: if one rank alone runs a forward, a save or a "
            "full_tensor, the others wait for it. If a rank is only slow, increase "
            "init_process_group(timeout=...)"
        )
        return RankMismatchError, text

    # ---- faults

    def poison(self, kind: type[ComposableShardError], text: str, store: Store | None = None) -> None:
        """Make all ranks raise this error, or the one that another rank reported earlier."""
        store = store or self.store
        first = store.compare_set("poison", "", f"{kind.__name__}|{text}")
        self.news.post("poison", store)
        self.hear(first.decode())

    def hear(self, poison: str) -> None:
        """Record the fault that a rank has reported, as written by `Fault`'s `str`."""
        if self.fault is None:
            self.fault = Fault.parse(poison, pointer())
            self._is_held = True
            note_broken(self.group)
            self._on_fault(self)

    def after_loss(self, advice: str) -> str:
        """What to do after a rank was lost, for the error message; `advice` is about that rank."""
        return f"Training cannot continue without that rank: {advice}"

    def without_store(self, error: Exception) -> ComposableShardError:
        """The error to raise when the store of the process group cannot be reached any more."""
        self.hear(
            f"{PeerLostError.__name__}|the store of the process group cannot be reached: its host (rank {_HOST}, "
            f"unless a launcher hosts it) may have ended: {error}. {self.remedy}"
        )
        assert self.fault is not None
        return self.fault.error()

    def end(self, why: str) -> None:
        """Notify other ranks that this process ends."""
        self.left_at = -1
        self.leave(why)

    def cut(self, why: str) -> None:
        """Set a fault because this process cannot reach the others."""
        self.fault = Fault(PeerLostError.__name__, why)
        self._is_held = True

    def take_back(self) -> None:
        """Mark the last note as not issued, because this rank raises an error."""
        self._log.take_back()

    def leave(self, error: str) -> None:
        """Notify other ranks that this rank has failed. They stop waiting for it, unless they fail in the same way."""
        place = self._log.issued
        if self.fault is None and self.left_at != place:
            self.left_at = place
            self.news.post(f"left|{self.rank}|{place}|{error[:500]}")


class Meeting(Ledger):
    """The ledger in which the ranks of a user's process group meet before they create the library's own one.

    It has one note. It detects a rank that fails before its first forward and therefore has no other ledger yet.
    """

    trains = False
    _prefix = "composable_shard/meeting"

    def come(self) -> None:
        """Wait for all ranks.

        Raises:
            PeerLostError: another rank has failed or ended, or did not come within the limit. Raised on all ranks that
                wait.
        """
        self.issue("begin its first forward")

    def _absence(self, place: int, note: str, absent: Sequence[int]) -> tuple[type[ComposableShardError], str]:
        has = "has" if len(absent) == 1 else "have"
        text = (
            f"{_ranks(absent)} {has} not begun a first forward within {self.limit:.0f} s, while rank "
            f"{self.ranks[self.rank]} waits in its own. All ranks must run the model. If a rank is only slow, for "
            "example because it loads data, increase init_process_group(timeout=...)"
        )
        return PeerLostError, text


class TransferLedger(Ledger):
    """The ledger of a process group in which weights are sent to ranks that do not train.

    A fault in it concerns the transfer alone: training continues without the receivers. A fault of training also ends
    the transfer.
    """

    trains = False
    remedy = "Training can continue. To send weights again, call weights.connect with another port"
    _prefix = "composable_shard/transfer"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device, lambda ledger: None)

    def after_loss(self, advice: str) -> str:
        return self.remedy

    def _advice(self, one: str, two: str) -> str:
        return f"Call plan_together, send and receive in the same order on all ranks. {self.remedy}"

    def _stop_comparing(self, error: Exception) -> None:
        """Fail instead: receivers must not switch to a new version without the others."""
        raise self.without_store(error) from error

    def forget_old(self) -> None:
        """Discard old notes."""
        if len(self._log.notes) > _MOST_NOTES_OF_TRANSFERS:
            self._log.forget(_MOST_NOTES_OF_TRANSFERS // 2)
            self._asked.clear()

    def _absence(self, place: int, note: str, absent: Sequence[int]) -> tuple[type[ComposableShardError], str]:
        text = (
            f"{_ranks(absent)} did not send or receive weights within {self.limit:.0f} s, while rank "
            f"{self.ranks[self.rank]} {_tense(note)}. All ranks of the process group must call send or receive. If a "
            f"rank is only slow, make the group with a longer timeout. {self.remedy}"
        )
        return PeerLostError, text


def _alike(place: int, note: str) -> str:
    """The key for counting the ranks that have this note at a place."""
    return f"alike/{place}/{hashlib.sha256(note.encode()).hexdigest()[:16]}"


def _is_past(note: str) -> bool:
    """Whether a note is about an optimizer step. Steps are noted when they run, and compared later."""
    return note.startswith(STEP)


def _tense(note: str) -> str:
    """What a rank did, has or is about to do, by its note."""
    if _is_past(note):
        return f"has stepped {note.removeprefix(STEP)}"
    return f"holds {note.removeprefix(HOLD)}" if note.startswith(HOLD) else f"is about to {note}"


def _advice(one: str, two: str) -> str:
    if one.startswith(HOLD) and two.startswith(HOLD):
        return "Seed and load all ranks in the same way, or call broadcast_state(model) to copy the first rank's values"
    if _MODEL.sub("", one) == _MODEL.sub("", two):
        return (
            "Neither was done. Models are numbered in the order in which fully_shard is called on their mesh. Call it "
            "the same number of times on all ranks, also for models that only some ranks use, and run the models in "
            "the same order"
        )
    if IN_HOOK in one or IN_HOOK in two:
        return (
            "Neither was done. Register the hook on all ranks, or compute with gradient.to_local(), this rank's shard: "
            "operators on a DTensor, such as norm(), communicate"
        )
    done = "Weights may differ between ranks since then" if _is_past(one) or _is_past(two) else "Neither was done"
    return (
        f"{done}. Run the same modules, settings and optimizer steps on all ranks, in the same order. If only some "
        "ranks run a module, call unshard() for it on all of them"
    )


def _plan_in(note: str) -> str:
    """The digest of the plan that a note names; empty if it names none."""
    _, _, rest = note.partition(", plan ")
    return rest.rstrip(")")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
