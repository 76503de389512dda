"""A stream's files on a disk or in an object store, and how they become visible.

A file becomes visible completely or not at all. On a disk, it is written under a name that begins
with ``_``, which Spark and other programs skip. Then it is synced, checked by the caller, and
renamed. Object stores cannot rename. For them, the file is built and checked in a local temporary
directory and sent in one upload, which becomes visible only when it completes. Then the size is
read back. On other filesystems (HDFS), the file is sent under a name that begins with ``_`` and
renamed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    import pyarrow.fs as fs

#: Prefix for the names of unfinished files.
UNFINISHED = "_"
#: Two changes to a folder within this many seconds may leave it with the same modification time.
_COARSE_S = 3.0
#: The pyarrow filesystems in which an upload becomes visible only when it completes.
_OBJECT_STORES = ("s3", "gcs", "abfs")


class Entry(NamedTuple):
    """A file in a folder."""

    name: str
    size: int
    #: Seconds since it was written.
    age_s: float


class LocalStorage:
    """One stream's files on a disk. Paths are relative to its folder. Methods raise ``OSError``."""

    def __init__(self, root: str, name: str) -> None:
        self._path = Path(root, name)
        self._root = Path(root)

    @property
    def filesystem(self) -> fs.FileSystem:
        """The pyarrow filesystem that holds these files."""
        import pyarrow.fs as fs

        return fs.LocalFileSystem()

    def full_path(self, path: str) -> str:
        """Return a file's path in ``filesystem``."""
        return str(self._path / path)

    def entries(self, path: str) -> list[Entry]:
        """Return the files in a folder; an empty list if it does not exist."""
        now = time.time()
        found: list[Entry] = []
        for entry in self._scan(path):
            with suppress(FileNotFoundError):  # removed in the meantime
                if entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    found.append(Entry(entry.name, info.st_size, now - info.st_mtime))
        return found

    def version(self, path: str) -> object | None:
        """Return a value that changes with the list of files in a folder.

        Return None if the folder does not exist, or has changed so recently that another change
        might go unnoticed: the filesystem's clock is coarse, so both may happen within one tick.
        """
        try:
            # Opening the folder makes a network filesystem ask its server.
            descriptor = os.open(self._inside(path), os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            info = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if time.time() - info.st_mtime < _COARSE_S:
            return None
        return info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns

    def is_newer_than_folder(self, path: str) -> bool:
        """Return whether a file is newer than its folder, which makes folder times unreliable."""
        file = self._inside(path)
        try:
            return file.stat().st_mtime_ns > file.parent.stat().st_mtime_ns
        except FileNotFoundError:
            return False  # removed in the meantime

    def names(self, path: str) -> list[str]:
        """Return the names of the files in a folder. Can be faster than ``entries``."""
        return [entry.name for entry in self._scan(path) if entry.is_file(follow_symlinks=False)]

    def size(self, path: str) -> int:
        """Return a file's size in bytes; 0 if it does not exist."""
        try:
            return self._inside(path).stat().st_size
        except FileNotFoundError:
            return 0

    def folders(self) -> list[str]:
        """Return the names of the stream's folders."""
        return [entry.name for entry in self._scan("") if entry.is_dir(follow_symlinks=False)]

    def open(self, path: str) -> Any:
        """Open a file for pyarrow to read."""
        # Do not map the file into memory: if it is truncated, access through the map kills the
        # process.
        return pa.OSFile(str(self._inside(path)))

    def read(self, path: str) -> bytes | None:
        """Return a file's contents; None if it does not exist."""
        try:
            return self._inside(path).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small file, creating the stream's folder. Keep an existing file by default."""
        folder = self._inside("")
        missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            _sync_folder(each.parent)
        with self.build(path) as built:
            with built.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(built, self._inside(path))
            else:
                _link(built, self._inside(path))
        _sync_folder(folder)

    @contextmanager
    def build(self, path: str) -> Iterator[Path]:
        """Provide a path for a temporary file, which is removed at the end of the block."""
        folder = self._inside(path).parent
        if not folder.is_dir():
            # Never create the parent folder: if it is missing, this may be the wrong disk.
            folder.mkdir(exist_ok=True)
            _sync_folder(folder.parent)
        built = folder / f"{UNFINISHED}{secrets.token_hex(8)}.tmp"
        try:
            yield built
        finally:
            built.unlink(missing_ok=True)

    def publish(self, built: Path, path: str) -> None:
        """Make a finished file visible, durably."""
        target = self._inside(path)
        os.rename(built, target)
        _sync_folder(target.parent)

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        self._inside(path).unlink(missing_ok=True)

    def remove_all(self, path: str) -> None:
        """Remove a folder and all its files, if the folder exists."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._inside(path))

    def _scan(self, path: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._inside(path)) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def _inside(self, path: str) -> Path:
        """Return the full path.

        Raises:
            PermissionError: A symbolic link points outside the root.
        """
        full = self._path / path
        root = os.path.realpath(self._root)
        if os.path.commonpath([root, os.path.realpath(full)]) != root:
            raise PermissionError(f"{str(full)!r} is outside the store {root!r}.")
        return full


class RemoteStorage:
    """Like ``LocalStorage``, but in an object store or any filesystem that pyarrow supports."""

    def __init__(self, filesystem: fs.FileSystem, root: str, name: str) -> None:
        self._filesystem = filesystem
        self._path = f"{root.rstrip('/')}/{name}"

    @property
    def filesystem(self) -> fs.FileSystem:
        return self._filesystem

    def full_path(self, path: str) -> str:
        return f"{self._path}/{path}"

    def entries(self, path: str) -> list[Entry]:
        now = time.time()
        return [
            Entry(info.base_name, info.size or 0, now - (info.mtime_ns or 0) / 1e9)
            for info in self._infos(path)
            if info.is_file
        ]

    def version(self, path: str) -> object | None:
        return None

    def is_newer_than_folder(self, path: str) -> bool:
        return True

    def names(self, path: str) -> list[str]:
        return [entry.name for entry in self.entries(path)]

    def size(self, path: str) -> int:
        return self._filesystem.get_file_info(f"{self._path}/{path}").size or 0

    def folders(self) -> list[str]:
        return [info.base_name for info in self._infos("") if not info.is_file]

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
            raise OSError(f"Only {found.size} of {len(data)} bytes of {path} arrived.")

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.delete_file(f"{self._path}/{path}")

    def remove_all(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.delete_dir(f"{self._path}/{path}".rstrip("/"))

    def _upload(self, data: bytes, target: str) -> None:
        sent_to = target
        if self._filesystem.type_name not in _OBJECT_STORES:
            sent_to = f"{target.rpartition('/')[0]}/{UNFINISHED}{secrets.token_hex(8)}.tmp"
        # Do not use a with block: after an error, leaving it would publish the part written so far.
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
            return []  # created or removed in the meantime
        return infos


Storage = LocalStorage | RemoteStorage


def _link(built: Path, target: Path) -> None:
    """Give a file its final name, unless the name is taken."""
    try:
        os.link(built, target)  # unlike a rename, it overwrites nothing
    except FileExistsError:
        pass
    except OSError:  # the filesystem does not support hard links
        if not target.exists():
            os.rename(built, target)


def _sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
