"""The checkpoints of a run, wherever they are."""

from __future__ import annotations

from ...errors import CheckpointIncompleteError
from .._io.objects import ObjectPath
from .._io.places import Place
from .bucket import Bucket
from .directory import Directory
from .reading import manifest_bytes
from .run import Attempt as Attempt
from .run import Committed as Committed
from .run import Run as Run
from .run import manifest_of as manifest_of


def run_at(path: Place) -> Run:
    """The checkpoints of the run whose directory is `path`."""
    return Bucket(path) if isinstance(path, ObjectPath) else Directory(path)


def find(path: Place, step: int | None) -> tuple[Committed, bytes]:
    """Find the checkpoint of a step, or the latest one, and read its manifest.

    Raises:
        CheckpointError: as in `Run.find` and `manifest_bytes`.
    """
    run = run_at(path)
    checkpoint = run.find(step)
    try:
        return checkpoint, manifest_bytes(checkpoint.path)
    except CheckpointIncompleteError:  # another job may have deleted it after a later save
        again = run.find(step)
        if again == checkpoint:
            raise
        return again, manifest_bytes(again.path)
