"""The checkpoints of a run in an object store. The manifest, which is written last, commits a checkpoint.

URL/
  step-00000100-000001/                     the first save of the run, of step 100
    rank-00000-3f1c.safetensors             file of rank 0; 3f1c stands for the identifier of the save
    manifest.json                           names the files; without it, this is an unfinished save
  step-00000200-000002/                     the second one

Nothing is renamed or replaced. The save with the highest number is the latest one. If two jobs save the same step at
the same time, their files have different names, and only one of them can write the manifest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import TypeVar

from ...errors import CheckpointError
from .._io import objects
from .._io.objects import ObjectPath
from .._io.places import Place
from .manifest import MOST_BYTES, NAME, Manifest, read_manifest
from .run import COMMITTED, Attempt, Committed, Run, numbered, readable

_T = TypeVar("_T")
_OF_ATTEMPT = re.compile(r"rank-[0-9]{5,9}-([0-9a-f]+)\.safetensors", re.ASCII)


class Bucket(Run):
    """The checkpoints of a run in an object store."""

    path: ObjectPath

    def _named(self) -> list[Committed]:
        """All saves, committed or not, lowest number first."""
        entries = _reached(lambda: objects.entries(self.path))
        named = ((entry.name, numbered(entry.name)) for entry in entries if entry.is_directory)
        saves = [Committed(*number, self.path / name) for name, number in named if number is not None]
        return sorted(saves, key=lambda save: (save.again, save.step))

    def _split(self, step: int | None = None) -> tuple[list[Committed], list[Committed]]:
        """The committed and the unfinished saves of a step, or of all steps, lowest number first."""
        saves = [save for save in self._named() if step in (None, save.step)]
        whole = _reached(lambda: objects.exist([_path(save.path) / NAME for save in saves]))
        pairs = [*zip(saves, whole, strict=True)]
        return [save for save, is_whole in pairs if is_whole], [save for save, is_whole in pairs if not is_whole]

    def committed(self, step: int | None = None) -> list[Committed]:
        return sorted(self._split(step)[0])

    def newest(self) -> Committed | None:
        """The committed checkpoint with the highest number."""
        return next((save for save in reversed(self._named()) if self.has_manifest(save.path)), None)

    def has_manifest(self, path: Place) -> bool:
        return _reached(lambda: objects.exist([_path(path) / NAME]))[0]

    def is_partial(self) -> bool:
        return COMMITTED.fullmatch(self.path.name) is not None and not self.has_manifest(self.path)

    def partials(self) -> list[Place]:
        return [save.path for save in self._split()[1]]

    def begin(self, step: int, overwrite: bool) -> Attempt:
        """Choose the next number."""
        self.check_free(step, overwrite)
        number = max((save.again for save in self._named()), default=0) + 1
        final = self.path / f"step-{step:08d}-{number:06d}"
        identity = secrets.token_hex(6)
        return Attempt(identity, final, final, f"-{identity}")

    def check_seen(self, attempt: Attempt) -> None:
        """Do nothing: `commit` finds out whether all ranks have written to the same store."""

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Check that all files are in the store, and write the manifest."""
        path = _path(attempt.final)
        data = readable(manifest)
        sizes = objects.sizes(path)
        for name, file in manifest.files.items():
            if sizes.get(name) != file.size:
                seen = f"has {sizes[name]:,} of {file.size:,} bytes" if name in sizes else "is missing"
                raise CheckpointError(
                    f"{path / name} {seen}, so the checkpoint is not committed; all ranks must save to the same store"
                )
        try:
            objects.create_file(path / NAME, data)
        except FileExistsError:
            raise CheckpointError(
                f"another job has committed {path} at the same time, so this save is not committed; save to another "
                "directory, or stop one of the jobs"
            ) from None

    def is_committed(self, attempt: Attempt) -> bool:
        path = _path(attempt.final) / NAME
        try:
            return read_manifest(objects.read_file(path, MOST_BYTES), str(path)).identity == attempt.identity
        except FileNotFoundError:
            return False

    def remove(self, attempt: Attempt) -> None:
        """Delete the files of this save only: another job may save to the same directory."""
        path = _path(attempt.final)
        objects.remove(path / name for name in objects.sizes(path) if attempt.suffix in name)

    def prune(self, keep: int) -> list[Place]:
        removable = {save.path for save in self.removable(keep)}
        committed, unfinished = self._split()
        removed: list[Place] = []
        for save in committed:
            path = _path(save.path)
            if path in removable:
                objects.remove([path / NAME])  # first, so that it is no checkpoint if this is interrupted
                objects.remove_objects(path)
                removed.append(path)
            else:
                removed += _left_in(path)
        for save in unfinished:
            objects.remove_objects(_path(save.path))
            removed.append(save.path)
        for name in objects.abort_uploads(self.path, COMMITTED):  # of saves that may have no object yet
            path = self.path / name.partition("/")[0]
            if path not in removed:
                removed.append(path)
        return removed


def _reached(request: Callable[[], _T]) -> _T:
    """Send a request to the store.

    Raises:
        CheckpointError: it has failed.
    """
    try:
        return request()
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def _left_in(path: ObjectPath) -> list[ObjectPath]:
    """Delete files in a checkpoint that another save has left, and return their paths."""
    identities = {name: named[1] for name in objects.sizes(path) if (named := _OF_ATTEMPT.fullmatch(name))}
    if len(set(identities.values())) < 2:
        return []
    own = read_manifest(objects.read_file(path / NAME, MOST_BYTES), str(path / NAME)).files
    left = [path / name for name in identities if name not in own]
    objects.remove(left)
    return left


def _path(place: Place) -> ObjectPath:
    assert isinstance(place, ObjectPath)
    return place
