"""The checkpoints of a run in a directory of a file system. A rename commits a checkpoint.

DIR/
  LATEST                       name of the latest checkpoint, replaced atomically
  step-00000100/               a committed checkpoint, renamed to this name when all files were on disk
    manifest.json
    rank-00000.safetensors     file of rank 0
  .step-00000200.tmp-3f1c/     an unfinished save: still running, or interrupted
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from ...errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointUnsafeError,
    ShardConfigValueError,
)
from .._io import files
from .._io.places import Place
from .manifest import NAME, Manifest
from .run import COMMITTED, Attempt, Committed, Run, numbered, readable, removable, step_of

LATEST = "LATEST"
_NEW_LATEST = ".LATEST.tmp"  # the new LATEST, before it replaces the old one
_REMEDY = f"pass the step to load, or delete {LATEST} to use the committed checkpoint with the highest step"
_PARTIAL = re.compile(r"\.step-[0-9]{8,18}\.tmp-[0-9a-f]+", re.ASCII)
_IN_STORE = re.compile(r"step-[0-9]{8,18}-[0-9]{6,9}", re.ASCII)  # the name of a save in an object store
_STEM = len("step-00000000")


class Directory(Run):
    """The checkpoints of a run in a directory."""

    path: Path

    def committed(self, step: int | None = None) -> list[Committed]:
        checkpoints = []
        for entry in self._entries():
            named = numbered(entry.name)
            if (
                named
                and step in (None, named[0])
                and entry.is_dir(follow_symlinks=False)
                and _is_whole(self.path / entry.name)
            ):
                checkpoints.append(Committed(*named, self.path / entry.name))
        return sorted(checkpoints)

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            return list(os.scandir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _refuse_links(self, names: Callable[[str], bool]) -> None:
        """Raise CheckpointUnsafeError if a matching name is a symbolic link, because its target is not checked."""
        for entry in self._entries():
            if entry.is_symlink() and names(entry.name):
                raise CheckpointUnsafeError(
                    f"{self.path / entry.name} is a symbolic link, which is not followed; replace it by the "
                    "checkpoint, or pass the path of its target"
                )

    def newest(self) -> Committed | None:
        """The checkpoint that LATEST names. Without LATEST, the committed checkpoint with the highest step.

        Raises:
            CheckpointUnsafeError: LATEST is a link, or names a link or a path outside of the directory.
            CheckpointCorruptError: LATEST does not contain the name of a checkpoint, or it does not exist.
        """
        path = self.path / LATEST
        checkpoints = self.committed()
        if not os.path.lexists(path):
            return checkpoints[-1] if checkpoints else None
        name = _named_in(path)
        for each in checkpoints:
            if each.path.name == name:
                return each
        self._refuse_links(name.__eq__)
        others = ", ".join(each.path.name for each in checkpoints) or "none"
        raise CheckpointCorruptError(
            f"{path} names {name}, which does not exist or has no manifest; committed checkpoints: {others}; {_REMEDY}"
        )

    def last_of(self, step: int) -> Committed | None:
        last = super().last_of(step)
        if last is None:
            self._refuse_links(lambda name: step_of(name) == step)
        return last

    def has_manifest(self, path: Place) -> bool:
        return _is_whole(_path(path))

    def is_partial(self) -> bool:
        return _PARTIAL.fullmatch(self.path.name) is not None

    def partials(self) -> list[Place]:
        return sorted(self.path / each.name for each in self._entries() if _PARTIAL.fullmatch(each.name))

    def begin(self, step: int, overwrite: bool) -> Attempt:
        """Make the temporary directory of a save."""
        name = f"step-{step:08d}"
        same = self.check_free(step, overwrite)
        final = self.path / (f"{name}-{max(each.again for each in same) + 1}" if same else name)
        if os.path.lexists(final):
            raise ShardConfigValueError(f"step: {final} exists and is not a committed checkpoint; move or delete it")
        identity = secrets.token_hex(6)
        attempt = Attempt(identity, self.path / f".{name}.tmp-{identity}", final)
        files.make_directory(_path(attempt.partial))
        return attempt

    def check_seen(self, attempt: Attempt) -> None:
        if not _path(attempt.partial).is_dir():
            raise ShardConfigValueError(
                f"directory: rank 0 has created {attempt.partial}, but this rank does not see it; all ranks must save "
                "to the same shared file system"
            )

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Write the manifest, rename the directory to its final name, and update LATEST. All other files are on disk.

        All operations that need disk space come before the rename. If one fails before LATEST names the directory, the
        rename is undone.
        """
        try:
            self._commit(attempt, manifest)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(attempt)  # does nothing if the directory has its final name
            raise

    def _commit(self, attempt: Attempt, manifest: Manifest) -> None:
        partial, final = _path(attempt.partial), _path(attempt.final)
        files.write_file(partial / NAME, readable(manifest))
        files.sync_directory(partial)
        latest = self.path / _NEW_LATEST
        if os.path.lexists(latest):
            files.remove_tree(latest)
        try:
            files.write_file(latest, final.name.encode())
            files.rename(partial, final)
            files.replace(latest, self.path / LATEST)
        except OSError:
            with contextlib.suppress(OSError):
                latest.unlink()  # raises if it does not exist: LATEST was already replaced, so keep the checkpoint
                if not os.path.lexists(partial):
                    final.rename(partial)
            raise

    def is_committed(self, attempt: Attempt) -> bool:
        return _is_whole(_path(attempt.final))

    def remove(self, attempt: Attempt) -> None:
        files.remove_tree(_path(attempt.partial))

    def prune(self, keep: int) -> list[Place]:
        unused = self.path / _NEW_LATEST
        removed: list[Place] = []
        for path in [
            *(each.path for each in removable(self.committed(), self.newest(), keep)),
            *self.partials(),
            *([unused] if os.path.lexists(unused) else []),
        ]:
            deleted = path = _path(path)
            if not path.name.startswith("."):  # rename it first, so that it is no checkpoint if this is interrupted
                deleted = path.with_name(f".{path.name[:_STEM]}.tmp-{secrets.token_hex(6)}")
                files.rename(path, deleted)
            files.remove_tree(deleted)
            removed.append(path)
        return removed


def _is_whole(path: Path) -> bool:
    """Whether a directory is a checkpoint: it has a manifest.

    In a copy of a run in an object store, an empty manifest is none; see `bucket.py`. Elsewhere, it is a damaged one.
    """
    manifest = path / NAME
    return manifest.is_file() and (_IN_STORE.fullmatch(path.name) is None or manifest.stat().st_size > 0)


def _path(place: Place) -> Path:
    assert isinstance(place, Path)
    return place


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
    if COMMITTED.fullmatch(name) is None:
        kind = CheckpointUnsafeError if "/" in name or "\\" in name or name == ".." else CheckpointCorruptError
        raise kind(f"{path} names {name[:200]!r}, which is not the name of a checkpoint; {_REMEDY}")
    return name
