"""The directory of a run's checkpoints: its names, and how checkpoints are committed, found and selected for deletion.

DIR/
  LATEST                       name of the latest checkpoint, replaced atomically
  step-00000100/               a committed checkpoint, renamed to this name when all files were on disk
    manifest.json
    rank-00000.safetensors     file of rank 0
  .step-00000200.tmp-3f1c/     an unfinished save: still running, or interrupted
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

from ...errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointUnsafeError,
    ShardConfigValueError,
)
from .._io import files
from .manifest import MOST_BYTES, NAME, Manifest, check, read_manifest

LATEST = "LATEST"
_NEW_LATEST = ".LATEST.tmp"  # the new LATEST, before it replaces the old one
_REMEDY = f"pass the step to load, or delete {LATEST} to use the committed checkpoint with the highest step"
_COMMITTED = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,9}))?", re.ASCII)
_PARTIAL = re.compile(r"\.step-[0-9]{8,18}\.tmp-[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, order=True)
class Committed:
    """A committed checkpoint: its step, its number among the saves of that step, and its path."""

    step: int
    again: int
    path: Path


def committed(directory: Path) -> list[Committed]:
    """All committed checkpoints of a directory, lowest step first; empty if the directory does not exist."""
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
    """Raise CheckpointUnsafeError if a matching name is a symbolic link, because its target is not checked."""
    for entry in _entries(directory):
        if entry.is_symlink() and names(entry.name):
            raise CheckpointUnsafeError(
                f"{directory / entry.name} is a symbolic link, which is not followed; replace it by the checkpoint, "
                "or pass the path of its target"
            )


def newest(directory: Path) -> Committed | None:
    """The checkpoint that LATEST names. Without LATEST, the committed checkpoint with the highest step.

    Raises:
        CheckpointUnsafeError: LATEST is a link, or names a link or a path outside of the directory.
        CheckpointCorruptError: LATEST does not contain the name of a checkpoint, or this checkpoint does not exist.
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
        f"{path} names {name}, which does not exist or has no manifest; committed checkpoints: {others}; {_REMEDY}"
    )


def _named_in(path: Path) -> str:
    """Read the name of a checkpoint from LATEST."""
    try:
        name = files.read_file(path, 1024).decode().strip()
    except UnicodeDecodeError:
        raise CheckpointCorruptError(f"{path} is not a text file; {_REMEDY}") from None
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise CheckpointUnsafeError(f"{path} was not written by this library: {error.strerror}") from None
    if _COMMITTED.fullmatch(name) is None:
        kind = CheckpointUnsafeError if "/" in name or "\\" in name or name == ".." else CheckpointCorruptError
        raise kind(f"{path} names {name[:200]!r}, which is not the name of a checkpoint; {_REMEDY}")
    return name


def find(directory: Path, step: int | None) -> Committed:
    """Find the committed checkpoint of a step, or the latest one. `directory` may also be a checkpoint itself.

    Raises:
        CheckpointIncompleteError: there is no such checkpoint.
    """
    if _PARTIAL.fullmatch(directory.name):
        raise CheckpointIncompleteError(f"{directory} is not a checkpoint: its save is running or was interrupted")
    if (directory / NAME).is_file():
        own = _step_of(directory.name)
        if None not in (step, own) and step != own:
            raise CheckpointIncompleteError(f"{directory} is not a checkpoint of step {step}")
        return Committed(own or 0, 0, directory)
    checkpoint = newest(directory) if step is None else _last_of(directory, step)
    if checkpoint is not None:
        return checkpoint
    steps = ", ".join(str(each.step) for each in committed(directory)) or "none"
    partial = "; it has an unfinished save, which is not a checkpoint" if partials(directory) else ""
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointIncompleteError(f"{directory} has {wanted}; committed steps: {steps}{partial}")


def _last_of(directory: Path, step: int) -> Committed | None:
    """The last committed save of a step."""
    for each in reversed(committed(directory)):
        if each.step == step:
            return each
    _refuse_links(directory, lambda name: _step_of(name) == step)
    return None


def manifest_of(checkpoint: Committed, data: bytes) -> Manifest:
    """Parse the manifest of a checkpoint.

    Raises:
        CheckpointCorruptError: as in `read_manifest`, or the manifest has another step than the directory.
        CheckpointUnsafeError: as in `read_manifest`.
    """
    where = str(checkpoint.path / NAME)
    manifest = read_manifest(data, where)
    if _COMMITTED.fullmatch(checkpoint.path.name) and manifest.step != checkpoint.step:
        raise CheckpointCorruptError(f"{where} is of step {manifest.step}, but its directory is of another step")
    return manifest


def _step_of(name: str) -> int | None:
    named = _COMMITTED.fullmatch(name)
    return int(named[1]) if named else None


def partials(directory: Path) -> list[Path]:
    """Directories of saves that are running or were interrupted."""
    return sorted(directory / each.name for each in _entries(directory) if _PARTIAL.fullmatch(each.name))


def leftovers(directory: Path) -> list[Path]:
    """All paths that interrupted saves have left."""
    unused = directory / _NEW_LATEST
    return [*partials(directory), *([unused] if os.path.lexists(unused) else [])]


@dataclass(frozen=True)
class Attempt:
    """A save in progress: its temporary directory, and the final name of this directory."""

    partial: Path
    final: Path


def begin(directory: Path, step: int, overwrite: bool) -> Attempt:
    """Make the temporary directory of a save.

    A checkpoint with a higher step than the latest is replaced even without `overwrite`: either LATEST never named it,
    or the run was resumed from an earlier step and has now reached this step again.

    Raises:
        ShardConfigValueError: a checkpoint of the step exists, and `overwrite` is not set.
    """
    if _COMMITTED.fullmatch(directory.name) and (directory / NAME).is_file():
        raise ShardConfigValueError(f"directory: {directory} is itself a checkpoint; pass its parent directory")
    name = f"step-{step:08d}"
    same = [each.again for each in committed(directory) if each.step == step]
    if same and not overwrite:
        _refuse_again(directory, step)
    final = directory / (f"{name}-{max(same) + 1}" if same else name)
    if os.path.lexists(final):
        raise ShardConfigValueError(f"step: {final} exists and is not a committed checkpoint; move or delete it")
    attempt = Attempt(directory / f".{name}.tmp-{secrets.token_hex(6)}", final)
    files.make_directory(attempt.partial)
    return attempt


def _refuse_again(directory: Path, step: int) -> None:
    latest = newest(directory)
    if latest is not None and step <= latest.step:
        raise ShardConfigValueError(
            f"step: {directory} already has a checkpoint of step {step}; save another step, delete it (`prune`), or "
            "pass overwrite=True to replace it when the new one is committed"
        )


def commit(attempt: Attempt, manifest: Manifest) -> None:
    """Write the manifest, rename the directory to its final name, and update LATEST. All other files must be on disk.

    All operations that need disk space come before the rename. If one fails before LATEST names the directory, the
    rename is undone.

    Raises:
        CheckpointError: the manifest could not be loaded again.
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
            latest.unlink()  # raises if it does not exist: LATEST was already replaced, so keep the checkpoint
            if not os.path.lexists(attempt.partial):
                attempt.final.rename(attempt.partial)
        raise


def _readable(manifest: Manifest) -> bytes:
    """The bytes of a manifest, after a check that they can be loaded again."""
    data = manifest.to_json()
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(
                f"the manifest would have {len(data):,} bytes, and at most {MOST_BYTES:,} are read; save large arrays "
                "as tensors (torch.from_numpy)"
            )
        check(manifest)
        for values in (manifest.values, manifest.per_rank):  # values of the user, which may be nested too deeply
            json.loads(json.dumps(values))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint could not be loaded again, so it is not committed: {error}") from None
    return data


def removable(directory: Path, keep: int) -> Iterator[Path]:
    """Checkpoints to delete. The last saves of the `keep` newest steps and the latest checkpoint are kept."""
    checkpoints = committed(directory)
    latest = newest(directory)
    best = {each.step: each for each in checkpoints}  # the last save of each step
    kept = {best[step].path for step in sorted(best)[max(len(best) - keep, 0) :]}
    if latest is not None:
        kept.add(latest.path)
    yield from (each.path for each in checkpoints if each.path not in kept)
