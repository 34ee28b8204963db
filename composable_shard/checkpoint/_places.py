"""The directories and URLs that users pass, and directories that are written as a whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..errors import CheckpointError, ShardConfigTypeError, ShardConfigUnsupportedError, ShardConfigValueError
from ._format.huggingface import UNFINISHED
from ._io import files, objects
from ._io.objects import ObjectPath
from ._io.places import Place, place


def directory_of(given: str | os.PathLike[str], name: str = "directory") -> Place:
    """The directory that a user passes as a path or a URL.

    Args:
        given: the path or URL.
        name: name of the argument.

    Raises:
        ShardConfigTypeError: it is neither.
        ShardConfigValueError: a URL is not supported.
        ShardConfigUnsupportedError: a package for the URL is not installed.
        CheckpointError: the store cannot be reached.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise ShardConfigTypeError(f"{name}: {given!r} is a {type(given).__name__}; pass a path or a URL")
    try:
        return place(given)
    except ImportError as error:
        raise ShardConfigUnsupportedError(f"{name}: {error}") from None
    except ValueError as error:
        raise ShardConfigValueError(f"{name}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{name}: {error}") from None


def absolute(path: Place) -> str:
    """The path as a string that ranks with different working directories can compare."""
    return str(path) if isinstance(path, ObjectPath) else os.path.abspath(path)


def begin(directory: Place, name: str = "path") -> Place:
    """Begin to write a new directory, and return the place of its files until `commit`.

    In a file system, this is a temporary directory next to `directory`. In a store, it is `directory` itself, with an
    object that marks it as incomplete.

    Args:
        directory: the directory.
        name: name of the user's argument.

    Raises:
        ShardConfigValueError: `directory` already exists.
    """
    if isinstance(directory, ObjectPath):
        _begin(directory, name)
        return directory
    if os.path.lexists(directory):
        raise ShardConfigValueError(f"{name}: {directory} exists; pass a path that does not exist")
    partial = directory.with_name(f".{directory.name}.tmp-{secrets.token_hex(6)}")
    files.make_directory(partial)
    return partial


def _begin(directory: ObjectPath, name: str) -> None:
    try:
        objects.create_file(directory / UNFINISHED, secrets.token_bytes(6))
    except FileExistsError:
        raise ShardConfigValueError(
            f"{name}: an export to {directory} is running, or was interrupted; delete it, or pass another URL"
        ) from None
    try:
        is_used = len(objects.sizes(directory)) > 1  # not before: another job may end between the two requests
    except OSError:
        objects.remove(directory, [UNFINISHED])
        raise
    if is_used:
        objects.remove(directory, [UNFINISHED])
        raise ShardConfigValueError(f"{name}: {directory} has files; pass a URL without any")


def commit(partial: Place, directory: Place) -> None:
    """Finish a directory when all its files are written."""
    if isinstance(partial, ObjectPath):
        objects.remove(partial, [UNFINISHED])
        return
    assert isinstance(directory, Path)
    files.sync_directory(partial)
    files.rename(partial, directory)
