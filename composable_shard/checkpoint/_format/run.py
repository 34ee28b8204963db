"""The checkpoints of a run: their names, and how they are selected to be loaded or deleted.

`directory.py` keeps them in a directory of a file system, and `bucket.py` in an object store.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import CheckpointCorruptError, CheckpointError, CheckpointIncompleteError, ShardConfigValueError
from .._io.places import Place
from .manifest import MOST_BYTES, NAME, Manifest, check, read_manifest

COMMITTED = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True, order=True)
class Committed:
    """A committed checkpoint: its step, its number, and its path.

    In a directory, saves of the same step are numbered; in an object store, all saves of the run.
    """

    step: int
    again: int
    path: Place


@dataclass(frozen=True)
class Attempt:
    """A save in progress.

    Attributes:
        identity: unique identifier.
        partial: where its files are written.
        final: path of the checkpoint.
        suffix: end of the names of its files, before the extension.
    """

    identity: str
    partial: Place
    final: Place
    suffix: str = ""

    def named(self, name: str) -> str:
        """The name of one of its files."""
        stem, dot, extension = name.rpartition(".")
        return f"{stem}{self.suffix}{dot}{extension}"


class Run(abc.ABC):
    """The checkpoints of a run.

    Args:
        path: the path that users pass to `save` and `load`. It may also be one checkpoint.
    """

    def __init__(self, path: Place) -> None:
        self.path = path

    @abc.abstractmethod
    def committed(self, step: int | None = None) -> list[Committed]:
        """The committed checkpoints of a step, or of all steps, lowest step first. Empty if there is no directory."""

    @abc.abstractmethod
    def newest(self) -> Committed | None:
        """The checkpoint that is loaded by default.

        Raises:
            CheckpointUnsafeError, CheckpointCorruptError: the directory is inconsistent.
        """

    @abc.abstractmethod
    def partials(self) -> list[Place]:
        """Directories of saves that are running or were interrupted."""

    @abc.abstractmethod
    def begin(self, step: int, overwrite: bool) -> Attempt:
        """Begin a save.

        A checkpoint with a higher step than the latest is replaced even without `overwrite`: the run was resumed from
        an earlier step and has now reached this step again, or an interrupted save has left it.

        Raises:
            ShardConfigValueError: a checkpoint of the step exists, and `overwrite` is not set.
        """

    @abc.abstractmethod
    def check_seen(self, attempt: Attempt) -> None:
        """Raise ShardConfigValueError if this rank does not see what rank 0 has begun."""

    @abc.abstractmethod
    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Make a checkpoint of the files of a save, which are all written. If it fails, the files are deleted.

        Raises:
            CheckpointError: the manifest could not be loaded again, a file is missing, or another job has committed.
        """

    @abc.abstractmethod
    def is_committed(self, attempt: Attempt) -> bool:
        """Whether a save was committed."""

    @abc.abstractmethod
    def remove(self, attempt: Attempt) -> None:
        """Delete the files of a save that is not committed, and whose commit has not begun.

        Raises:
            OSError: a file could not be deleted.
        """

    @abc.abstractmethod
    def prune(self, keep: int) -> list[Place]:
        """Delete all except the last saves of the `keep` newest steps and the latest checkpoint; return what it was.

        Raises:
            OSError: a file could not be deleted.
        """

    # ---- selection

    def find(self, step: int | None) -> Committed:
        """Find the committed checkpoint of a step, or the latest one. `path` may also be a checkpoint itself.

        Raises:
            CheckpointIncompleteError: there is no such checkpoint.
        """
        if self.is_partial():
            raise CheckpointIncompleteError(f"{self.path} is not a checkpoint: its save is running or was interrupted")
        if self.has_manifest(self.path):
            return self._itself(step)
        checkpoint = self.newest() if step is None else self.last_of(step)
        if checkpoint is not None:
            return checkpoint
        steps = ", ".join(str(each.step) for each in self.committed()) or "none"
        partial = "; it has an unfinished save, which is not a checkpoint" if self.partials() else ""
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointIncompleteError(f"{self.path} has {wanted}; committed steps: {steps}{partial}")

    def _itself(self, step: int | None) -> Committed:
        """`path` as a checkpoint."""
        own = step_of(self.path.name)
        if None not in (step, own) and step != own:
            raise CheckpointIncompleteError(f"{self.path} is not a checkpoint of step {step}")
        return Committed(own or 0, 0, self.path)

    @abc.abstractmethod
    def has_manifest(self, path: Place) -> bool:
        """Whether `path` is a checkpoint.

        Raises:
            CheckpointError: a store cannot be reached.
        """

    @abc.abstractmethod
    def is_partial(self) -> bool:
        """Whether `path` is an unfinished save."""

    def last_of(self, step: int) -> Committed | None:
        """The last committed save of a step."""
        return next(reversed(self.committed(step)), None)

    def check_free(self, step: int, overwrite: bool) -> list[Committed]:
        """The committed saves of a step, which a new save replaces.

        Raises:
            ShardConfigValueError: see `begin`.
        """
        if COMMITTED.fullmatch(self.path.name) and self.has_manifest(self.path):
            raise ShardConfigValueError(f"directory: {self.path} is itself a checkpoint; pass its parent directory")
        same = self.committed(step)
        latest = self.newest() if same and not overwrite else None
        if latest is not None and step <= latest.step:
            raise ShardConfigValueError(
                f"step: {self.path} already has a checkpoint of step {step}; save another step, delete it (`prune`), "
                "or pass overwrite=True to replace it when the new one is committed"
            )
        return same


def removable(checkpoints: Sequence[Committed], latest: Committed | None, keep: int) -> list[Committed]:
    """The checkpoints that `prune` deletes.

    Args:
        checkpoints: all committed checkpoints, lowest step first.
        latest: the latest checkpoint, which is kept.
        keep: number of steps to keep.
    """
    best = {each.step: each for each in checkpoints}  # the last save of each step
    kept = {best[step].path for step in sorted(best)[max(len(best) - keep, 0) :]}
    if latest is not None:
        kept.add(latest.path)
    return [each for each in checkpoints if each.path not in kept]


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint."""
    named = COMMITTED.fullmatch(name)
    return int(named[1]) if named else None


def numbered(name: str) -> tuple[int, int] | None:
    """The step and the number in the name of a checkpoint."""
    named = COMMITTED.fullmatch(name)
    return (int(named[1]), int(named[2] or 0)) if named else None


def manifest_of(checkpoint: Committed, data: bytes) -> Manifest:
    """Parse the manifest of a checkpoint.

    Raises:
        CheckpointCorruptError: as in `read_manifest`, or the manifest has another step than the directory.
        CheckpointUnsafeError: as in `read_manifest`.
    """
    where = str(checkpoint.path / NAME)
    manifest = read_manifest(data, where)
    if COMMITTED.fullmatch(checkpoint.path.name) and manifest.step != checkpoint.step:
        raise CheckpointCorruptError(f"{where} is of step {manifest.step}, but its directory is of another step")
    return manifest


def readable(manifest: Manifest) -> bytes:
    """The bytes of a manifest, after a check that they can be loaded again.

    Raises:
        CheckpointError: they cannot.
    """
    data = manifest.to_json()
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(
                f"the manifest would have {len(data):,} bytes, and at most {MOST_BYTES:,} are read; save large arrays "
                "as tensors (torch.from_numpy)"
            )
        check(manifest)
        values: Mapping[str, object]
        for values in (manifest.values, manifest.per_rank):  # values of the user, which may be nested too deeply
            json.loads(json.dumps(values))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint could not be loaded again, so it is not committed: {error}") from None
    return data
