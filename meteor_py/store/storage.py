"""The files of a stream on a disk or in an object store, and how they become visible.

A file appears whole or not at all. On a disk, it is written under a name that begins with ``_``,
which Spark and others skip. It is forced to the disk, checked by the caller, and renamed. An object
store cannot rename: the file is built and checked in a local temporary directory, then sent in one
upload, which shows nothing before its end, and its size is read back. Elsewhere (HDFS) it is sent
under a name with ``_`` and renamed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    import pyarrow.fs as fs

#: How a file begins that is not finished.
UNFINISHED = "_"
#: The filesystems of pyarrow in which an upload is not seen before its end.
_OBJECT_STORES = ("s3", "gcs", "abfs")


class Entry(NamedTuple):
    """A file in a folder."""

    name: str
    size: int
    #: Seconds since it was written.
    age_s: float


class Storage(Protocol):
    """A folder with the files of one stream.

    Paths are relative to it. All errors are ``OSError``.
    """

    def entries(self, path: str) -> list[Entry]:
        """The files at a path; none if it does not exist."""

    def names(self, path: str) -> list[str]:
        """Their names alone, which may be had faster."""

    def folders(self) -> list[str]:
        """The names of the folders in it."""

    def open(self, path: str) -> Any:
        """A file to read from, as pyarrow likes them."""

    def read(self, path: str) -> bytes | None:
        """A small file as a whole; None if there is none."""

    def create(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small file, with the folder itself; one that is there stays, or is replaced."""

    def build(self, path: str) -> AbstractContextManager[Path]:
        """A file to write to; removed at the end of the block."""

    def publish(self, built: Path, path: str) -> None:
        """Make a file that was built visible, for good."""

    def remove(self, path: str) -> None:
        """Remove a file; that it is gone already is fine."""

    def remove_all(self, path: str) -> None:
        """Remove a folder with all files in it."""


class LocalStorage:
    """Files on a disk."""

    def __init__(self, root: str, name: str) -> None:
        self._path = Path(root, name)
        self._root = Path(root)

    def entries(self, path: str) -> list[Entry]:
        now = time.time()
        found: list[Entry] = []
        try:
            with os.scandir(self._inside(path)) as entries:
                for entry in entries:
                    try:
                        if entry.is_file(follow_symlinks=False):
                            state = entry.stat(follow_symlinks=False)
                            found.append(Entry(entry.name, state.st_size, now - state.st_mtime))
                    except FileNotFoundError:
                        continue  # removed meanwhile
        except FileNotFoundError:
            pass
        return found

    def names(self, path: str) -> list[str]:
        try:
            with os.scandir(self._inside(path)) as entries:
                return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._inside("")) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def open(self, path: str) -> Any:
        # Not mapped into memory: a file that is cut short under a map ends the process.
        return pa.OSFile(str(self._inside(path)))

    def read(self, path: str) -> bytes | None:
        try:
            return self._inside(path).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes, *, replace: bool = False) -> None:
        folder = self._inside("")
        missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            _sync_folder(each.parent)
        built = folder / f"{UNFINISHED}{secrets.token_hex(8)}.tmp"
        try:
            with built.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(built, self._inside(path))
            else:
                _link(built, self._inside(path))
        finally:
            built.unlink(missing_ok=True)
        _sync_folder(folder)

    @contextmanager
    def build(self, path: str) -> Iterator[Path]:
        folder = self._inside(path).parent
        if not folder.is_dir():
            # Not its parent: where that is missing, the disk is not the one that it should be.
            folder.mkdir(exist_ok=True)
            _sync_folder(folder.parent)
        built = folder / f"{UNFINISHED}{secrets.token_hex(8)}.tmp"
        try:
            yield built
        finally:
            built.unlink(missing_ok=True)

    def publish(self, built: Path, path: str) -> None:
        target = self._inside(path)
        os.rename(built, target)
        _sync_folder(target.parent)

    def remove(self, path: str) -> None:
        self._inside(path).unlink(missing_ok=True)

    def remove_all(self, path: str) -> None:
        try:
            shutil.rmtree(self._inside(path))
        except FileNotFoundError:
            pass

    def _inside(self, path: str) -> Path:
        """The full path, if no link leads out of the root.

        Raises:
            PermissionError: One does.
        """
        full = self._path / path
        root = os.path.realpath(self._root)
        if os.path.commonpath([root, os.path.realpath(full)]) != root:
            raise PermissionError(f"{str(full)!r} lies outside of the store {root!r}.")
        return full


class RemoteStorage:
    """Files in an object store, or in another filesystem that pyarrow can reach."""

    def __init__(self, filesystem: fs.FileSystem, root: str, name: str) -> None:
        self._filesystem = filesystem
        self._path = f"{root.rstrip('/')}/{name}"

    def entries(self, path: str) -> list[Entry]:
        now = time.time()
        return [
            Entry(info.base_name, info.size or 0, now - (info.mtime_ns or 0) / 1e9)
            for info in self._infos(path)
            if info.is_file
        ]

    def names(self, path: str) -> list[str]:
        return [entry.name for entry in self.entries(path)]

    def folders(self) -> list[str]:
        infos = self._infos("")
        return [info.base_name for info in infos if not info.is_file]

    def open(self, path: str) -> Any:
        return self._filesystem.open_input_file(f"{self._path}/{path}")

    def read(self, path: str) -> bytes | None:
        try:
            with self.open(path) as file:
                data: bytes = file.read()
                return data
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if replace or self.read(path) is None:
            self._filesystem.create_dir(self._path, recursive=True)
            self._upload(data, f"{self._path}/{path}")

    @contextmanager
    def build(self, path: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="meteor-segment-") as folder:
            yield Path(folder, "segment")

    def publish(self, built: Path, path: str) -> None:
        data = built.read_bytes()
        target = f"{self._path}/{path}"
        self._filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        self._upload(data, target)
        found = self._filesystem.get_file_info(target)
        if found.size != len(data):
            raise OSError(f"{found.size} of the {len(data)} bytes of {path} have arrived.")

    def remove(self, path: str) -> None:
        try:
            self._filesystem.delete_file(f"{self._path}/{path}")
        except FileNotFoundError:
            pass

    def remove_all(self, path: str) -> None:
        try:
            self._filesystem.delete_dir(f"{self._path}/{path}".rstrip("/"))
        except FileNotFoundError:
            pass

    def _upload(self, data: bytes, target: str) -> None:
        sent_to = target
        if self._filesystem.type_name not in _OBJECT_STORES:
            sent_to = f"{target.rpartition('/')[0]}/{UNFINISHED}{secrets.token_hex(8)}.tmp"
        # In one piece: leaving a block by an error in the middle would publish what was written.
        out = self._filesystem.open_output_stream(sent_to)
        out.write(data)
        out.close()
        if sent_to != target:
            self._filesystem.move(sent_to, target)

    def _infos(self, path: str) -> list[fs.FileInfo]:
        import pyarrow.fs as fs

        full = f"{self._path}/{path}".rstrip("/")
        try:
            infos: list[fs.FileInfo] = self._filesystem.get_file_info(
                fs.FileSelector(full, allow_not_found=True)
            )
        except FileNotFoundError:
            return []  # it came or went meanwhile
        return infos


def _link(built: Path, target: Path) -> None:
    """Give a file its name, unless there is one of that name."""
    try:
        os.link(built, target)  # unlike a rename, this overwrites nothing
    except FileExistsError:
        pass
    except OSError:  # a filesystem without links
        if not target.exists():
            os.rename(built, target)


def _sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
