"""The ledgers that ranks wrote when they could not go on together, laid side by side: where they parted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .._errors import RankMismatchError, ShardConfigValueError
from .._faults.dump import FILE_NAME, VARIABLE, FaultText, LedgerTail, RankLedgers, from_ranges, in_ranges
from ._explain_text import Section

_BEFORE, _AFTER = 8, 3  # actions that are shown around the place at which ranks parted
_MOST_COLUMNS = 4
_MOST_RUNS = 6  # of ranks that follow one another, in a list of ranks
_MOST_GROUPS = 4  # process groups that the text shows
_SLACK_S = 60.0  # by which clocks, and writing, may be apart
_SAME, _NOTHING = "the same", "-"
_NOT_AGREED, _FAILED = "not agreed", "failed"
_ranks_of = lru_cache(maxsize=1024)(from_ranges)


# ---- reading


@dataclass(frozen=True)
class _File:
    """What a rank wrote, and when, in seconds since the epoch."""

    path: Path
    content: RankLedgers
    written_at: float


def read_folder(folder: Path) -> tuple[RankLedgers, ...]:
    """What all ranks wrote, by rank. Files of other names are passed over.

    Raises:
        ShardConfigValueError: there is no file of a rank, or one of them is damaged, something else, of another
            version of the format, or of another run; the message begins with its path.
    """
    named = [(path, FILE_NAME.fullmatch(path.name)) for path in folder.iterdir()]
    paths = sorted((int(name[1]), path) for path, name in named if name)
    if not paths:
        raise ShardConfigValueError(
            f"{folder}: no rank has written a file here (rank0.json and so on). Ranks write when they cannot go on "
            f"together, into the folder that {VARIABLE} names in their environment"
        )
    files = [_read(path, rank) for rank, path in paths]
    _require_one_run(files)
    return tuple([file.content for file in files])


def _read(path: Path, rank: int) -> _File:
    try:
        content = RankLedgers.from_json(path.read_text(encoding="utf-8"))
        if content.rank != rank or not rank < content.world:
            raise ShardConfigValueError(f"is of rank {content.rank} of {content.world}")
        for each in content.ledgers:
            _check(each, rank)
        return _File(path, content, datetime.fromisoformat(content.time).timestamp())
    except OSError as error:
        raise ShardConfigValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ShardConfigValueError(
            f"{path}: {error}. Explain it with the version of the library that wrote it, or move it away, to explain "
            "what the other ranks wrote"
        ) from None


def _check(ledger: LedgerTail, rank: int) -> None:
    """Raise if the parts of a ledger contradict each other."""
    if rank not in _ranks_of(ledger.ranks):
        raise ShardConfigValueError(f"process group {ledger.group}: has ranks {ledger.ranks}, and not rank {rank}")
    if len(ledger.notes) > ledger.place:
        raise ShardConfigValueError(f"process group {ledger.group}: has {len(ledger.notes)} notes of {ledger.place}")


def _require_one_run(files: Sequence[_File]) -> None:
    """Raise if files were left by an earlier run."""
    first = files[0]
    limit = max([ledger.limit for file in files for ledger in file.content.ledgers], default=0.0) + _SLACK_S
    newest = max(file.written_at for file in files)
    for file in files:
        if file.content.world != first.content.world:
            difference = f"is of a run of {file.content.world} ranks, and {first.path.name} of {first.content.world}"
        elif newest - file.written_at > limit:
            difference = f"is {newest - file.written_at:,.0f} s older than another one"
        else:
            continue
        raise ShardConfigValueError(f"{file.path}: {difference}. Move the files of an earlier run away")


# ---- laying side by side


@dataclass(frozen=True)
class Action:
    """What a rank did in a place.

    Attributes:
        note: in words.
        mark: empty if the rank went on; "not agreed" if the fault came before all ranks had said that they do the same;
            "failed" if an error of the rank itself came.
        asked: whether it was new, so that ranks compared it.
    """

    note: str
    mark: str = ""
    asked: bool = False


@dataclass(frozen=True)
class Column:
    """Ranks that did the same in all actions that are shown; None where they did nothing, or it was not written."""

    ranks: tuple[int, ...]
    actions: tuple[Action | None, ...]


@dataclass(frozen=True)
class GroupStory:
    """What the ranks of a process group did, side by side.

    Attributes:
        name, description, device: of the process group.
        ranks: all of them.
        alike: in how many actions ranks are alike, from the first one on.
        differ: whether ranks did, or were about to do, different things then. If not, some have done nothing more.
        parted: whether ranks differ, or some have done more than others.
        first: the place of the first action in `columns`.
        columns: of most ranks first.
        silent: ranks that wrote no file.
        without: ranks whose file lacks this process group.
    """

    name: str
    description: str
    device: str
    ranks: tuple[int, ...]
    alike: int
    differ: bool
    parted: bool
    first: int
    columns: tuple[Column, ...]
    silent: tuple[int, ...]
    without: tuple[int, ...]

    @property
    def last(self) -> tuple[tuple[tuple[int, ...], Action | None], ...]:
        """Which ranks did what in the action in which they parted."""
        actions: dict[Action | None, list[int]] = {}
        for column in self.columns:
            action = column.actions[self.alike - self.first]
            actions.setdefault(action and Action(action.note, action.mark), []).extend(column.ranks)
        return tuple([(tuple(sorted(ranks)), action) for action, ranks in actions.items()])


def _at(ledger: LedgerTail, place: int) -> Action | None:
    """The action of a rank in a place; None if it did nothing there, or that was not written."""
    if place == ledger.place and ledger.about_to is not None:
        return Action(ledger.about_to, _NOT_AGREED)
    index = place - ledger.place + len(ledger.notes)
    if not 0 <= index < len(ledger.notes):
        return None
    return Action(ledger.notes[index], _FAILED if ledger.taken_back and place == ledger.place - 1 else "")


def _end(ledger: LedgerTail) -> int:
    """The place behind the last action that was done, or is about to be."""
    return ledger.place - ledger.taken_back + (ledger.about_to is not None)


def _alike(ledgers: Sequence[LedgerTail]) -> tuple[int, bool]:
    """In how many actions ranks are alike, and whether they differ then."""
    begin, end = max(each.place - len(each.notes) for each in ledgers), min(map(_end, ledgers))
    distinct = {_notes(each, begin, end) for each in ledgers}  # few, and many ranks
    for index, notes in enumerate(zip(*distinct, strict=True)):
        if len({*notes}) > 1:
            return begin + index, True
    return end, len({action.note for each in ledgers if (action := _at(each, end)) is not None}) > 1


def _notes(ledger: LedgerTail, begin: int, end: int) -> tuple[str, ...]:
    """The notes from one place to another; what a rank was about to do is the last one."""
    notes = ledger.notes if ledger.about_to is None else (*ledger.notes, ledger.about_to)
    first = ledger.place - len(ledger.notes)
    return notes[begin - first : max(end, begin) - first]


def _columns(ledgers: dict[int, LedgerTail], places: range) -> tuple[Column, ...]:
    ranks: dict[tuple[Action | None, ...], list[int]] = {}
    for rank, ledger in ledgers.items():
        ranks.setdefault(tuple([_at(ledger, place) for place in places]), []).append(rank)
    asked = {place for ledger in ledgers.values() for place in ledger.asked}
    columns = [Column(tuple(alike), _marked(actions, places, asked)) for actions, alike in ranks.items()]
    return tuple(sorted(columns, key=lambda column: (-len(column.ranks), column.ranks)))


def _marked(actions: Sequence[Action | None], places: range, asked: set[int]) -> tuple[Action | None, ...]:
    """Actions with the mark of those that were asked."""
    pairs = zip(actions, places, strict=True)
    return tuple([each and replace(each, asked=place in asked or each.mark == _NOT_AGREED) for each, place in pairs])


def _story(ranks: tuple[int, ...], ledgers: dict[int, LedgerTail], wrote: set[int]) -> GroupStory:
    one = next(iter(ledgers.values()))
    alike, differ = _alike([*ledgers.values()])
    end = max(map(_end, ledgers.values()))
    places = range(max(alike - _BEFORE, 0), min(alike + _AFTER + 1, end))
    return GroupStory(
        one.group,
        one.description,
        one.device,
        ranks,
        alike,
        differ,
        alike < end,
        places.start,
        _columns(ledgers, places),
        tuple([rank for rank in ranks if rank not in wrote]),
        tuple([rank for rank in ranks if rank in wrote and rank not in ledgers]),
    )


@dataclass(frozen=True)
class FaultExplanation:
    """What the files of ranks say together.

    Attributes:
        folder: of the files.
        files: by rank.
        stories: of the process groups; those whose ranks differ first, then those that a rank is missing in.
    """

    folder: Path
    files: tuple[RankLedgers, ...]
    stories: tuple[GroupStory, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.files[0].world

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that wrote no file."""
        wrote = {file.rank for file in self.files}
        return tuple([rank for rank in range(self.world) if rank not in wrote])

    @cached_property
    def faults(self) -> dict[FaultText, list[int]]:
        """The faults that ranks heard of, with these ranks."""
        faults: dict[FaultText, list[int]] = {}
        for file in self.files:
            if file.fault is not None:
                faults.setdefault(file.fault, []).append(file.rank)
        return faults

    @cached_property
    def failed(self) -> dict[str, list[int]]:
        """The errors with which ranks failed themselves, with these ranks."""
        failed: dict[str, list[int]] = {}
        for file in self.files:
            if file.failure is not None:
                failed.setdefault(file.failure, []).append(file.rank)
        return failed

    def sections(self) -> Iterator[Section]:
        """What there is to say, from the whole to the parts."""
        missing = f"; {_silent(self.silent)}" if self.silent else ""
        yield Section("", [f"{_of(self.files)} of {self.world} ranks wrote their ledgers{missing}"])
        yield Section("What ranks say", [*_said(self)])
        shown = [story for story in self.stories if story.parted or story.silent][:_MOST_GROUPS]
        for story in shown or self.stories[:1]:
            yield _section(story)
        if more := len(self.stories) - len(shown or self.stories[:1]):
            yield Section("", [f"{more} more process group{'s' * (more > 1)}: see --json"])
        yield Section("What to do", [_advice(self)])

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "folder": str(self.folder),
            "world": self.world,
            "wrote": [file.rank for file in self.files],
            "silent": self.silent,
            "hosts": {file.rank: file.host for file in self.files},
            "faults": [{**asdict(fault), "ranks": ranks} for fault, ranks in self.faults.items()],
            "failed": [{"text": text, "ranks": ranks} for text, ranks in self.failed.items()],
            "groups": [asdict(story) for story in self.stories],
            "advice": _advice(self),
        }


def explain_ledgers(folder: Path) -> FaultExplanation:
    """Lay what ranks wrote in a folder side by side.

    Raises:
        ShardConfigValueError: files are missing, damaged, or do not belong together; see `read_folder`.
    """
    files = read_folder(folder)
    groups: dict[tuple[str, str], dict[int, LedgerTail]] = {}
    for file in files:
        for ledger in file.ledgers:
            groups.setdefault((ledger.group, ledger.ranks), {})[file.rank] = ledger
    wrote = {file.rank for file in files}
    stories = [_story(_ranks_of(ranks), ledgers, wrote) for (_, ranks), ledgers in groups.items()]
    stories.sort(key=lambda story: (not story.differ, not story.silent, not story.parted))
    return FaultExplanation(folder, files, tuple(stories))


# ---- in words


def _ranks(ranks: Sequence[int]) -> str:
    runs = in_ranges(ranks).split(", ")
    named = ", ".join(runs[:_MOST_RUNS])
    more = len(ranks) - len(from_ranges(named))
    return f"rank{'s' * (len(ranks) > 1)} {named}{f' and {more:,} more' if more else ''}"


def _of(files: Sequence[RankLedgers]) -> str:
    return "all" if len(files) == files[0].world else str(len(files))


def _silent(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} wrote nothing: killed, ended without an error, or on another machine"


def _said(step: FaultExplanation) -> Iterator[str]:
    for fault, ranks in step.faults.items():
        yield f"{_ranks(ranks)}: {fault.kind}: {fault.text}"
    for text, ranks in step.failed.items():
        yield f"{_ranks(ranks)} failed: {text}"
    if not step.faults and not step.failed:
        yield "nothing: no rank has failed, or heard of a fault"


def _section(story: GroupStory) -> Section:
    title = f'Process group "{story.name}" of {_ranks(story.ranks)} on {story.device}'
    shown, others = story.columns[:_MOST_COLUMNS], story.columns[_MOST_COLUMNS:]
    lines = [_parting(story)]
    lines += [_silent(story.silent)] if story.silent else []
    lines += [f"{_ranks(story.without)} wrote nothing of this process group"] if story.without else []
    lines += [f"not shown: {', '.join(_ranks(column.ranks) for column in others)}"] if others else []
    rows = [
        (f"{story.first + index:,}", *_cells([column.actions[index] for column in shown]))
        for index in range(len(shown[0].actions))
    ]
    if not rows:
        return Section(title, lines)
    return Section(title, lines, ("action", *(_ranks(each.ranks) for each in shown)), rows, range(1, 1 + len(shown)))


def _cells(actions: Sequence[Action | None]) -> Iterator[str]:
    """An action of each column; what all of them did alike is written once."""
    for number, action in enumerate(actions):
        if action is None:
            yield _NOTHING
        elif number and all(each == action for each in actions):
            yield _SAME
        else:
            yield _words(action)


def _parting(story: GroupStory) -> str:
    ranks = sorted(rank for column in story.columns for rank in column.ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]} alone wrote of it, after {story.alike:,} actions"
    those = f"ranks {ranks[0]} and {ranks[1]}" if len(ranks) == 2 else _ranks(ranks)
    if not story.parted:
        return f"{those} are alike in all of their {story.alike:,} actions"
    before = f"alike up to action {story.alike - 1:,}" if story.alike else "not alike from the first action on"
    at = [f"{_ranks(alike)}: {_words(action)}" for alike, action in story.last]
    more = ["and so on"] if len(at) > _MOST_COLUMNS else []
    return f"{those} are {before}; action {story.alike:,}: {'; '.join([*at[:_MOST_COLUMNS], *more])}"


def _words(action: Action | None) -> str:
    if action is None:
        return "nothing"
    return f"{action.note} ({action.mark})" if action.mark else action.note


def _advice(step: FaultExplanation) -> str:
    """What to do next, by the kind of the fault."""
    first = step.stories[0] if step.stories else None
    kinds = {fault.kind for fault in step.faults}
    if first is not None and first.differ:
        few, *_, many = sorted([ranks for ranks, action in first.last if action is not None], key=len)
        return (
            f"look for what leads {_ranks(few)} another way than {_ranks(many)} before action {first.alike:,}: code "
            "that depends on the rank or on its data; run the same modules, settings and optimizer steps on all ranks"
        )
    if lost := sorted({rank for ranks in step.failed.values() for rank in ranks}):
        return f"mend the error of {_ranks(lost)}, and start again from a checkpoint"
    if step.silent:
        return (
            f"look at the output of {_ranks(step.silent)}, and at what the system says of memory and signals there; "
            "then start again from a checkpoint"
        )
    if RankMismatchError.__name__ in kinds:
        return "look for what keeps ranks that have done less: something that runs on some ranks only, or takes long"
    return "look at the output of the rank that the error names, and start again from a checkpoint"
