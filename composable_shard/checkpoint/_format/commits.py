"""The directory of a run's checkpoints: names, what is committed, what is the latest, and what may be removed.

DIR/
  LATEST                       the name of the newest checkpoint, replaced at once
  step-00000100/               a committed one: it got this name when all of it was on disk
    manifest.json
    rank-00000.safetensors     what rank 0 has written
  .step-00000200.tmp-3f1c/     one that is being written, or whose writer has died
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..._errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointUnsafeError,
    ShardConfigValueError,
)
from .._io import files
from .manifest import MOST_BYTES, NAME, Manifest, check, read_manifest

LATEST = "LATEST"
_NEW_LATEST = ".LATEST.tmp"  # the next one, before it is in the place of the other
_REMEDY = f"give the step to load, or remove {LATEST}, for the committed checkpoint of the highest step to be used"
_COMMITTED = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,9}))?", re.ASCII)
_PARTIAL = re.compile(r"\.step-[0-9]{8,18}\.tmp-[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, order=True)
class Committed:
    """A committed checkpoint: its step, which of the saves at that step, and where it is."""

    step: int
    again: int
    path: Path


def committed(directory: Path) -> list[Committed]:
    """All committed checkpoints of a directory, oldest step first; none where the directory does not exist."""
    checkpoints = []
    for entry in _entries(directory):
        named = _COMMITTED.fullmatch(entry.name)
        if named and entry.is_dir(follow_symlinks=False) and (directory / entry.name / NAME).is_file():
            checkpoints.append(Committed(int(named[1]), int(named[2] or 0), directory / entry.name))
    return sorted(checkpoints)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror or error}") from error


def _refuse_links(directory: Path, names: Callable[[str], bool]) -> None:
    """A link in the place of a checkpoint may lead anywhere."""
    for entry in _entries(directory):
        if entry.is_symlink() and names(entry.name):
            raise CheckpointUnsafeError(
                f"{directory / entry.name} is a symbolic link, which is not followed; put the checkpoint itself there, "
                "or give the path that it leads to"
            )


def newest(directory: Path) -> Committed | None:
    """The checkpoint that LATEST names; where there is no LATEST, the committed one of the highest step.

    Raises:
        CheckpointUnsafeError: LATEST is a link, or names something outside of the directory, or a link.
        CheckpointCorruptError: it names no checkpoint, or one that is not there.
    """
    path = directory / LATEST
    checkpoints = committed(directory)
    if not os.path.lexists(path):
        return checkpoints[-1] if checkpoints else None
    name = _named_in(path)
    for each in checkpoints:
        if each.path.name == name:
            return each
    _refuse_links(directory, name.__eq__)
    others = ", ".join(each.path.name for each in checkpoints) or "none"
    raise CheckpointCorruptError(
        f"{path} names {name}, which is not there or has no manifest; committed are: {others}; {_REMEDY}"
    )


def _named_in(path: Path) -> str:
    """The name of a checkpoint that LATEST holds."""
    try:
        name = files.read_file(path, 1024).decode().strip()
    except UnicodeDecodeError:
        raise CheckpointCorruptError(f"{path} holds no text; {_REMEDY}") from None
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise CheckpointUnsafeError(f"{path} is no file of this library's: {error.strerror}") from None
    if _COMMITTED.fullmatch(name) is None:
        kind = CheckpointUnsafeError if "/" in name or "\\" in name or name == ".." else CheckpointCorruptError
        raise kind(f"{path} names {name[:200]!r}, which is not the name of a checkpoint; {_REMEDY}")
    return name


def find(directory: Path, step: int | None) -> Committed:
    """A committed checkpoint: that of a step, or the latest. A directory that is itself one is taken, too.

    Raises:
        CheckpointIncompleteError: there is none.
    """
    if _PARTIAL.fullmatch(directory.name):
        raise CheckpointIncompleteError(f"{directory} is of a save that goes on, or was cut off: it is no checkpoint")
    if (directory / NAME).is_file():
        own = _step_of(directory.name)
        if None not in (step, own) and step != own:
            raise CheckpointIncompleteError(f"{directory} is not a checkpoint of step {step}")
        return Committed(own or 0, 0, directory)
    checkpoint = newest(directory) if step is None else _last_of(directory, step)
    if checkpoint is not None:
        return checkpoint
    steps = ", ".join(str(each.step) for each in committed(directory)) or "none"
    partial = "; a save that has not ended is there, and does not count" if partials(directory) else ""
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointIncompleteError(f"{directory} holds {wanted}; committed steps: {steps}{partial}")


def _last_of(directory: Path, step: int) -> Committed | None:
    """The last save at a step."""
    for each in reversed(committed(directory)):
        if each.step == step:
            return each
    _refuse_links(directory, lambda name: _step_of(name) == step)
    return None


def manifest_of(checkpoint: Committed, data: bytes) -> Manifest:
    """A checkpoint's manifest from its bytes.

    Raises:
        CheckpointCorruptError, CheckpointUnsafeError: as `read_manifest`, or it is that of another step.
    """
    where = str(checkpoint.path / NAME)
    manifest = read_manifest(data, where)
    if _COMMITTED.fullmatch(checkpoint.path.name) and manifest.step != checkpoint.step:
        raise CheckpointCorruptError(f"{where} is that of step {manifest.step}, which is not the step of its directory")
    return manifest


def _step_of(name: str) -> int | None:
    named = _COMMITTED.fullmatch(name)
    return int(named[1]) if named else None


def partials(directory: Path) -> list[Path]:
    """Checkpoints that have not been committed: of saves that go on, or that were cut off."""
    return sorted(directory / each.name for each in _entries(directory) if _PARTIAL.fullmatch(each.name))


def leftovers(directory: Path) -> list[Path]:
    """All that saves which were cut off have left."""
    unused = directory / _NEW_LATEST
    return [*partials(directory), *([unused] if os.path.lexists(unused) else [])]


@dataclass(frozen=True)
class Attempt:
    """A save that has begun: where it writes, and what the directory is to be called in the end."""

    partial: Path
    final: Path


def begin(directory: Path, step: int, overwrite: bool) -> Attempt:
    """Make the directory that a save writes into.

    A checkpoint of a step after the latest was never announced, or a run that went back to an earlier step has come
    past it again: it is replaced without being asked.

    Raises:
        ShardConfigValueError: a checkpoint of the step is there, and `overwrite` is not set.
    """
    if _COMMITTED.fullmatch(directory.name) and (directory / NAME).is_file():
        raise ShardConfigValueError(f"directory: {directory} is itself a checkpoint; give the directory that it is in")
    name = f"step-{step:08d}"
    same = [each.again for each in committed(directory) if each.step == step]
    if same and not overwrite:
        _refuse_again(directory, step)
    final = directory / (f"{name}-{max(same) + 1}" if same else name)
    if os.path.lexists(final):
        raise ShardConfigValueError(f"step: {final} exists and is no committed checkpoint; move it away, or remove it")
    attempt = Attempt(directory / f".{name}.tmp-{secrets.token_hex(6)}", final)
    files.make_directory(attempt.partial)
    return attempt


def _refuse_again(directory: Path, step: int) -> None:
    latest = newest(directory)
    if latest is not None and step <= latest.step:
        raise ShardConfigValueError(
            f"step: {directory} has a checkpoint of step {step} already; save another step, remove it (`prune`), "
            "or give overwrite=True, which replaces it once the new one is committed"
        )


def commit(attempt: Attempt, manifest: Manifest) -> None:
    """With all other files on disk: write the manifest, give the directory its name, and let LATEST name it.

    What needs room on the disk is written before the directory has its name. Where something fails before LATEST names
    it, it loses the name again.

    Raises:
        CheckpointError: the manifest could not be read again.
    """
    root = attempt.final.parent
    files.write_file(attempt.partial / NAME, _readable(manifest))
    files.sync_directory(attempt.partial)
    latest = root / _NEW_LATEST
    if os.path.lexists(latest):
        files.remove_tree(latest)
    try:
        files.write_file(latest, attempt.final.name.encode())
        files.rename(attempt.partial, attempt.final)
        files.replace(latest, root / LATEST)
    except OSError:
        with contextlib.suppress(OSError):
            latest.unlink()  # where it is not there, LATEST is the new one already
            if not os.path.lexists(attempt.partial):
                attempt.final.rename(attempt.partial)
        raise


def _readable(manifest: Manifest) -> bytes:
    """A manifest's bytes, of which it is certain that they can be read again."""
    data = manifest.to_json()
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(
                f"the manifest would have {len(data):,} bytes, and at most {MOST_BYTES:,} are read; save large arrays "
                "as tensors (torch.from_numpy)"
            )
        check(manifest)
        for values in (manifest.values, manifest.per_rank):  # the user's, which may be nested deeply
            json.loads(json.dumps(values))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"this could not be loaded again, and is not committed: {error}") from None
    return data


def removable(directory: Path, keep: int) -> Iterator[Path]:
    """What may go: all but the `keep` newest steps and the latest, and saves of a step that was saved again."""
    checkpoints = committed(directory)
    latest = newest(directory)
    best = {each.step: each for each in checkpoints}  # of each step, the last save
    kept = {best[step].path for step in sorted(best)[max(len(best) - keep, 0) :]}
    if latest is not None:
        kept.add(latest.path)
    yield from (each.path for each in checkpoints if each.path not in kept)
