"""Compare the ledgers that ranks wrote when they could not continue together, to find where they diverged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .._faults.dump import FILE_NAME, VARIABLE, FaultText, LedgerTail, RankLedgers, from_ranges, in_ranges
from ..errors import RankMismatchError, ShardConfigValueError
from ._explain_text import Section

_BEFORE, _AFTER = 8, 3  # number of actions to show before and after the action at which ranks diverged
_MOST_COLUMNS = 4
_MOST_RUNS = 6  # limit of ranges in a list of ranks
_MOST_GROUPS = 4  # limit of process groups in the text
_SLACK_S = 60.0  # seconds by which clocks and writes of ranks may differ
_SAME, _NOTHING = "the same", "-"
_NOT_AGREED, _FAILED = "not agreed", "failed"
_ranks_of = lru_cache(maxsize=1024)(from_ranges)


# ---- reading


@dataclass(frozen=True)
class _File:
    """The file of a rank, and the time when it was written, in seconds since the epoch."""

    path: Path
    content: RankLedgers
    written_at: float


def read_folder(folder: Path) -> tuple[RankLedgers, ...]:
    """Read the files of all ranks, by rank. Files with other names are ignored.

    Raises:
        ShardConfigValueError: there is no file of a rank, or a file is damaged, has other content or another version of
            the format, or is of another run. The message begins with its path.
    """
    named = [(path, FILE_NAME.fullmatch(path.name)) for path in folder.iterdir()]
    paths = sorted((int(name[1]), path) for path, name in named if name)
    if not paths:
        raise ShardConfigValueError(
            f"{folder}: no rank has written a file here (rank0.json and so on). Ranks that cannot continue together "
            f"write to the folder that the environment variable {VARIABLE} names"
        )
    files = [_read(path, rank) for rank, path in paths]
    _require_one_run(files)
    return tuple([file.content for file in files])


def _read(path: Path, rank: int) -> _File:
    try:
        content = RankLedgers.from_json(path.read_text(encoding="utf-8"))
        if content.rank != rank or not rank < content.world:
            raise ShardConfigValueError(f"is the file of rank {content.rank} of {content.world}")
        for each in content.ledgers:
            _check(each, rank)
        return _File(path, content, datetime.fromisoformat(content.time).timestamp())
    except OSError as error:
        raise ShardConfigValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ShardConfigValueError(
            f"{path}: {error}. Explain it with the version of the library that wrote it, or move it away to explain "
            "the other files"
        ) from None


def _check(ledger: LedgerTail, rank: int) -> None:
    """Check that the parts of a ledger agree."""
    if rank not in _ranks_of(ledger.ranks):
        raise ShardConfigValueError(f"process group {ledger.group}: has ranks {ledger.ranks}, but not rank {rank}")
    if len(ledger.notes) > ledger.place:
        raise ShardConfigValueError(f"process group {ledger.group}: has {len(ledger.notes)} notes of {ledger.place}")


def _require_one_run(files: Sequence[_File]) -> None:
    """Check that no file is left over from an earlier run."""
    first = files[0]
    limit = max([ledger.limit for file in files for ledger in file.content.ledgers], default=0.0) + _SLACK_S
    newest = max(file.written_at for file in files)
    for file in files:
        if file.content.world != first.content.world:
            difference = f"is of a run of {file.content.world} ranks, but {first.path.name} of {first.content.world}"
        elif newest - file.written_at > limit:
            difference = f"is {newest - file.written_at:,.0f} s older than another file"
        else:
            continue
        raise ShardConfigValueError(f"{file.path}: {difference}. Move the files of an earlier run away")


# ---- comparison


@dataclass(frozen=True)
class Action:
    """The action of a rank at a place.

    Attributes:
        note: description of the action.
        mark: empty if the rank continued; "not agreed" if the fault occurred before all ranks had confirmed that they
            do the same; "failed" if the rank itself failed.
        asked: whether the action was new, so that ranks compared it.
    """

    note: str
    mark: str = ""
    asked: bool = False


@dataclass(frozen=True)
class Column:
    """Ranks that did the same in all actions shown. None if they did nothing, or if their ledgers lack the place."""

    ranks: tuple[int, ...]
    actions: tuple[Action | None, ...]


@dataclass(frozen=True)
class GroupStory:
    """The actions of the ranks of a process group, compared.

    Attributes:
        name, description, device: of the process group.
        ranks: all its ranks.
        alike: number of actions, from the first one on, in which the ranks agree.
        differ: whether ranks did different things after that, or were about to. If not, some did nothing more.
        parted: whether ranks differ, or some have done more than others.
        first: the place of the first action in `columns`.
        columns: the column with the most ranks first.
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
        """The ranks by what they did in the action at which they diverged."""
        actions: dict[Action | None, list[int]] = {}
        for column in self.columns:
            action = column.actions[self.alike - self.first]
            actions.setdefault(action and Action(action.note, action.mark), []).extend(column.ranks)
        return tuple([(tuple(sorted(ranks)), action) for action, ranks in actions.items()])


def _at(ledger: LedgerTail, place: int) -> Action | None:
    """The action of a rank at a place; None if it did nothing there, or its ledger does not contain the place."""
    if place == ledger.place and ledger.about_to is not None:
        return Action(ledger.about_to, _NOT_AGREED)
    index = place - ledger.place + len(ledger.notes)
    if not 0 <= index < len(ledger.notes):
        return None
    return Action(ledger.notes[index], _FAILED if ledger.taken_back and place == ledger.place - 1 else "")


def _end(ledger: LedgerTail) -> int:
    """The place after the last action that was done or is about to be done."""
    return ledger.place - ledger.taken_back + (ledger.about_to is not None)


def _alike(ledgers: Sequence[LedgerTail]) -> tuple[int, bool]:
    """The number of actions, from the first one on, in which ranks agree, and whether they differ after that."""
    begin, end = max(each.place - len(each.notes) for each in ledgers), min(map(_end, ledgers))
    distinct = {_notes(each, begin, end) for each in ledgers}  # few, even for many ranks
    for index, notes in enumerate(zip(*distinct, strict=True)):
        if len({*notes}) > 1:
            return begin + index, True
    return end, len({action.note for each in ledgers if (action := _at(each, end)) is not None}) > 1


def _notes(ledger: LedgerTail, begin: int, end: int) -> tuple[str, ...]:
    """The notes between two places. What a rank was about to do is the last note."""
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
    """Mark the actions that ranks compared."""
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
    """The comparison of the files of all ranks.

    Attributes:
        folder: folder of the files.
        files: the files, by rank.
        stories: the process groups. Those whose ranks differ come first, then those with missing ranks.
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
        """The faults that ranks were notified of, with these ranks."""
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
        """The sections of the text, from the summary to the details."""
        missing = f"; {_silent(self.silent)}" if self.silent else ""
        yield Section("", [f"{_of(self.files)} of {self.world} ranks wrote their ledgers{missing}"])
        yield Section("Errors", [*_said(self)])
        shown = [story for story in self.stories if story.parted or story.silent][:_MOST_GROUPS]
        for story in shown or self.stories[:1]:
            yield _section(story)
        if more := len(self.stories) - len(shown or self.stories[:1]):
            yield Section("", [f"{more} more process group{'s' * (more > 1)}: see --json"])
        yield Section("What to do", [_advice(self)])

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data for JSON."""
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
    """Compare the files of ranks in a folder.

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


# ---- text


def _ranks(ranks: Sequence[int]) -> str:
    runs = in_ranges(ranks).split(", ")
    named = ", ".join(runs[:_MOST_RUNS])
    more = len(ranks) - len(from_ranges(named))
    return f"rank{'s' * (len(ranks) > 1)} {named}{f' and {more:,} more' if more else ''}"


def _of(files: Sequence[RankLedgers]) -> str:
    return "all" if len(files) == files[0].world else str(len(files))


def _silent(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} wrote no file: killed, ended without an error, or on another machine"


def _said(step: FaultExplanation) -> Iterator[str]:
    for fault, ranks in step.faults.items():
        yield f"{_ranks(ranks)}: {fault.kind}: {fault.text}"
    for text, ranks in step.failed.items():
        yield f"{_ranks(ranks)} failed: {text}"
    if not step.faults and not step.failed:
        yield "none: no rank has failed or was notified of a fault"


def _section(story: GroupStory) -> Section:
    title = f'Process group "{story.name}" of {_ranks(story.ranks)} on {story.device}'
    shown, others = story.columns[:_MOST_COLUMNS], story.columns[_MOST_COLUMNS:]
    lines = [_parting(story)]
    lines += [_silent(story.silent)] if story.silent else []
    lines += [f"{_ranks(story.without)} wrote nothing about this process group"] if story.without else []
    lines += [f"not shown: {', '.join(_ranks(column.ranks) for column in others)}"] if others else []
    rows = [
        (f"{story.first + index:,}", *_cells([column.actions[index] for column in shown]))
        for index in range(len(shown[0].actions))
    ]
    if not rows:
        return Section(title, lines)
    return Section(title, lines, ("action", *(_ranks(each.ranks) for each in shown)), rows, range(1, 1 + len(shown)))


def _cells(actions: Sequence[Action | None]) -> Iterator[str]:
    """The cells of a row. If all columns have the same action, it is written only once."""
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
        return f"only rank {ranks[0]} wrote a ledger of this process group, with {story.alike:,} actions"
    those = f"ranks {ranks[0]} and {ranks[1]}" if len(ranks) == 2 else _ranks(ranks)
    if not story.parted:
        return f"{those} agree in all of their {story.alike:,} actions"
    before = f"agree up to action {story.alike - 1:,}" if story.alike else "differ from the first action on"
    at = [f"{_ranks(alike)}: {_words(action)}" for alike, action in story.last]
    more = ["and so on"] if len(at) > _MOST_COLUMNS else []
    return f"{those} {before}; action {story.alike:,}: {'; '.join([*at[:_MOST_COLUMNS], *more])}"


def _words(action: Action | None) -> str:
    if action is None:
        return "nothing"
    return f"{action.note} ({action.mark})" if action.mark else action.note


def _advice(step: FaultExplanation) -> str:
    """What to do next, depending on the type of the fault."""
    first = step.stories[0] if step.stories else None
    kinds = {fault.kind for fault in step.faults}
    if first is not None and first.differ:
        few, *_, many = sorted([ranks for ranks, action in first.last if action is not None], key=len)
        return (
            f"find out why {_ranks(few)} and {_ranks(many)} issued different actions at action {first.alike:,}: look "
            "for code that depends on the rank or its data; run the same modules, settings and optimizer steps on all "
            "ranks"
        )
    if lost := sorted({rank for ranks in step.failed.values() for rank in ranks}):
        return f"fix the error of {_ranks(lost)}, and restart from a checkpoint"
    if step.silent:
        return (
            f"read the output of {_ranks(step.silent)}, and look for out-of-memory kills and signals in the system "
            "log; then restart from a checkpoint"
        )
    if RankMismatchError.__name__ in kinds:
        return "find out why some ranks issued fewer actions: look for code that runs on some ranks only, or takes long"
    return "read the output of the rank that the error names, and restart from a checkpoint"
