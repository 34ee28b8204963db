"""The checkpoints of a run in an object store. The manifest, which is written last, commits a checkpoint.

URL/
  step-00000100-000001/                     the first save of the run, of step 100
    rank-00000-3f1c.safetensors             file of rank 0; 3f1c stands for the identifier of the save
    manifest.json                           names the files; without it, this is an unfinished save
  step-00000200-000002/                     the second one

Nothing is renamed. The save with the highest number is the latest one. If two jobs save the same step at the same
time, their files have different names, and only one of them can write the manifest. An empty manifest is no commit: it
prevents one, while the files of the save are deleted.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from ...errors import CheckpointError
from .._io import objects
from .._io.objects import ObjectPath
from .._io.places import Place
from .manifest import MOST_BYTES, NAME, Manifest, read_manifest
from .run import COMMITTED, Attempt, Committed, Run, numbered, readable, removable

_T = TypeVar("_T")
_OF_ATTEMPT = re.compile(r"rank-[0-9]{5,9}-([0-9a-f]+)\.safetensors", re.ASCII)


class Bucket(Run):
    """The checkpoints of a run in an object store."""

    path: ObjectPath

    def _named(self, step: int | None = None) -> list[Committed]:
        """The saves of a step, or of all steps, committed or not, lowest number first."""
        entries = _reached(lambda: objects.entries(self.path))
        named = ((name, numbered(name)) for name, is_directory in entries.items() if is_directory)
        saves = [Committed(*number, self.path / name) for name, number in named if number is not None]
        return sorted((save for save in saves if step in (None, save.step)), key=_by_number)

    def committed(self, step: int | None = None) -> list[Committed]:
        return sorted(self._split(step)[0])

    def partials(self) -> list[Place]:
        return [save.path for save in self._split()[1]]

    def _split(self, step: int | None = None) -> tuple[list[Committed], list[Committed]]:
        """The committed and the unfinished saves."""
        saves = self._named(step)
        sizes = _reached(lambda: objects.sizes_of(_path(save.path) / NAME for save in saves))
        pairs = [*zip(saves, sizes, strict=True)]
        return [save for save, size in pairs if size], [save for save, size in pairs if not size]

    def newest(self) -> Committed | None:
        """The committed checkpoint with the highest number."""
        return next((save for save in reversed(self._named()) if self.has_manifest(save.path)), None)

    def has_manifest(self, path: Place) -> bool:
        [size] = _reached(lambda: objects.sizes_of([_path(path) / NAME]))
        return bool(size)

    def is_partial(self) -> bool:
        named = COMMITTED.fullmatch(self.path.name) is not None
        return named and not self.has_manifest(self.path) and not self._named()

    def begin(self, step: int, overwrite: bool) -> Attempt:
        """Choose the next number."""
        self.check_free(step, overwrite)
        number = max((save.again for save in self._named()), default=0) + 1
        final = self.path / f"step-{step:08d}-{number:06d}"
        identity = secrets.token_hex(6)
        return Attempt(identity, final, final, f"-{identity}")

    def check_seen(self, attempt: Attempt) -> None:
        """Do nothing: `commit` checks that the files of all ranks are in the same store."""

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Check that all files are in the store, and write the manifest.

        The request for the manifest may succeed although its answer is lost, even later. So nothing is deleted after it
        was sent, unless an empty manifest prevents that.
        """
        path = _path(attempt.final)
        try:
            data = readable(manifest)
            _check_files(path, manifest)
        except BaseException:
            self._remove_quietly(attempt)
            raise
        try:
            objects.create_file(path / NAME, data)
        except FileExistsError:
            self._remove_quietly(attempt)
            raise CheckpointError(
                f"another job has committed or pruned {path} at the same time, so this save is not committed; save to "
                "another directory, or stop one of the jobs"
            ) from None
        except OSError as error:
            if self._is_prevented(attempt, error):
                self._remove_quietly(attempt)
                raise
        self._check_again(attempt, manifest)

    def _is_prevented(self, attempt: Attempt, failed: OSError) -> bool:
        """Prevent a commit whose request has failed. Returns False if it has succeeded nevertheless."""
        path = _path(attempt.final)
        try:
            return _prevented(path) or not self.is_committed(attempt)
        except OSError as error:
            raise CheckpointError(
                f"the store cannot be reached, so {path} may be committed or not; `latest` returns its step if it is: "
                f"{failed}"
            ) from error

    def _check_again(self, attempt: Attempt, manifest: Manifest) -> None:
        """Raise CheckpointError if another job has pruned this save before its commit, and undo the commit."""
        path = _path(attempt.final)
        try:
            _check_files(path, manifest)
        except CheckpointError:
            objects.remove(path, [NAME])
            self._remove_quietly(attempt)
            raise
        except OSError:  # it is committed
            return

    def _remove_quietly(self, attempt: Attempt) -> None:
        """Delete the files of a save if the store can be reached. Otherwise they are left to `prune`."""
        with contextlib.suppress(OSError):
            self.remove(attempt)

    def is_committed(self, attempt: Attempt) -> bool:
        path = _path(attempt.final) / NAME
        try:
            data = objects.read_file(path, MOST_BYTES)
        except FileNotFoundError:
            return False
        return bool(data) and read_manifest(data, str(path)).identity == attempt.identity

    def remove(self, attempt: Attempt) -> None:
        """Delete the files of this save only: another job may save to the same directory."""
        path = _path(attempt.final)
        objects.remove(path, (name for name in objects.sizes(path) if attempt.suffix in name))

    def prune(self, keep: int) -> list[Place]:
        """Delete saves and what others have left. The empty manifests of unfinished saves stay until the next time.

        They still prevent a commit whose request arrives late, and keep the number of the save from being used again.
        """
        saves = self._sizes()
        committed = sorted(save for save, sizes in saves.items() if sizes.get(NAME))
        latest = max(committed, key=_by_number, default=None)
        removed: list[Place] = []
        for save in sorted(removable(committed, latest, keep), key=_by_number):
            objects.write_file(
                _path(save.path) / NAME, b""
            )  # first, so that it is no checkpoint if this is interrupted
            removed.append(_remove_save(save, saves[save]))
        for save in saves:
            if save in committed and save.path not in removed:
                removed += _remove_others(save, saves[save])
            elif save not in committed:
                removed += _remove_unfinished(save, saves[save], latest)
        uploads = objects.abort_uploads(self.path, COMMITTED)  # of saves that may have no object yet
        removed += (self.path / name.partition("/")[0] for name in uploads)
        return [*dict.fromkeys(removed)]

    def _sizes(self) -> dict[Committed, dict[str, int]]:
        """The sizes of all objects of each save, committed or not, by name."""
        saves: dict[Committed, dict[str, int]] = {}
        for name, size in sorted(objects.sizes(self.path).items()):
            directory, _, file = name.partition("/")
            if (number := numbered(directory)) is not None:
                saves.setdefault(Committed(*number, self.path / directory), {})[file] = size
        return saves


def _by_number(save: Committed) -> tuple[int, int]:
    return save.again, save.step


def _check_files(path: ObjectPath, manifest: Manifest) -> None:
    """Raise CheckpointError if a file of a save is not in the store."""
    sizes = objects.sizes(path)
    for name, file in manifest.files.items():
        if sizes.get(name) != file.size:
            seen = f"has {sizes[name]:,} of {file.size:,} bytes" if name in sizes else "is missing"
            raise CheckpointError(
                f"{path / name} {seen}, so the checkpoint is not committed; all ranks must save to the same store, and "
                "no other job may prune the run"
            )


def _prevented(path: ObjectPath) -> bool:
    """Prevent the commit of a save by an empty manifest. Returns False if it has a manifest."""
    try:
        objects.create_file(path / NAME, b"")
    except FileExistsError:
        return False
    return True


def _remove_save(save: Committed, names: Iterable[str]) -> Place:
    """Delete objects of a save, which has an empty manifest. The manifest is deleted last."""
    objects.remove(_path(save.path), (name for name in names if name != NAME))
    objects.remove(_path(save.path), [NAME])
    return save.path


def _remove_unfinished(save: Committed, names: Collection[str], latest: Committed | None) -> list[Place]:
    """Delete the objects of an unfinished save, except its empty manifest; later, also this one."""
    if {*names} == {NAME}:
        is_old = latest is not None and _by_number(save) < _by_number(latest)
        return [_remove_save(save, names)] if is_old else []
    if not _prevented(_path(save.path)):
        return []  # it was committed meanwhile
    objects.remove(_path(save.path), (name for name in names if name != NAME))
    return [save.path]


def _remove_others(save: Committed, names: Iterable[str]) -> list[Place]:
    """Delete files in a checkpoint that another save has left, and return their paths."""
    path = _path(save.path)
    names = [name for name in names if _OF_ATTEMPT.fullmatch(name)]
    if len({name.rpartition("-")[2] for name in names}) < 2:
        return []
    own = read_manifest(objects.read_file(path / NAME, MOST_BYTES), str(path / NAME)).files
    left = [name for name in names if name not in own]
    objects.remove(path, left)
    return [path / name for name in left]


def _reached(request: Callable[[], _T]) -> _T:
    """Send a request to the store.

    Raises:
        CheckpointError: it has failed.
    """
    try:
        return request()
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def _path(place: Place) -> ObjectPath:
    assert isinstance(place, ObjectPath)
    return place
