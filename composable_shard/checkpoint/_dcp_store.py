"""A writer of `torch.distributed.checkpoint` for object stores.

Torch's `FsspecWriter` renames `.metadata`, which copies it in an object store, and uploads one part at a time.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter

from ._io import objects
from ._io.objects import ObjectPath


class StoreWriter(FileSystemWriter):
    """Writes the files of a DCP checkpoint to a directory of a store, `.metadata` last.

    Args:
        path: the directory.
    """

    def __init__(self, path: ObjectPath) -> None:
        super().__init__(str(path), sync_files=False)
        self.fs = _Store(path)  # type: ignore[assignment]
        self.path = path.url


class _Store(FileSystemBase):
    """The operations of a `FileSystemWriter`. Paths are URLs."""

    def __init__(self, root: ObjectPath) -> None:
        self._root = root
        self._kept: dict[str, bytes] = {}  # content of files that will be renamed

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return self._root.url

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: stores have no directories."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = os.fspath(path)
        if name.endswith(".tmp"):
            with io.BytesIO() as kept:
                yield kept
                self._kept[name] = kept.getvalue()
            return
        file = objects.NewObject(self._root / name)
        try:
            yield _Stream(file)
            file.commit()
        finally:
            file.close()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        objects.write_file(self._root / os.fspath(new_path), self._kept.pop(os.fspath(path)))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return objects.sizes_of([self._root / os.fspath(path)]) != [None]

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        objects.remove(self._root, [os.fspath(path).removeprefix(f"{self._root.url}/")])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Stream(io.RawIOBase):
    """A file object that writes an object."""

    def __init__(self, file: objects.NewObject) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        return len(view)

    def tell(self) -> int:
        return self._file.size
