"""The checkpoints of a run, wherever they are."""

from __future__ import annotations

from .._io.objects import ObjectPath
from .._io.places import Place
from .bucket import Bucket
from .directory import Directory
from .run import Attempt as Attempt
from .run import Committed as Committed
from .run import Run as Run
from .run import manifest_of as manifest_of


def run_at(path: Place) -> Run:
    """The checkpoints of the run whose directory is `path`."""
    return Bucket(path) if isinstance(path, ObjectPath) else Directory(path)
