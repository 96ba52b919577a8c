"""Folders on a local disk or any fsspec URL: files that exist whole or not at all.

A file is written under a temporary name and renamed, so that a reader never sees half of it; object stores, which have no
rename, make an upload appear whole by themselves. Local reads are plain ``pread`` calls: they take no lock and survive a
fork, which threads of an event loop do not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from panelflow.errors import PanelflowError, StorageError

_WRITE_BYTES = 2**19
"""Bytes of one write call: for much larger ones Linux caches a file in huge pages, which take longer to find than to fill."""


@dataclass(frozen=True)
class Folder:
    """A folder by its URL (or local path) and the fsspec options that open it; cheap to pickle."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _opened(self) -> tuple[fsspec.AbstractFileSystem, str]:
        filesystem, path = url_to_fs(os.fspath(self.url), **self.options)
        return filesystem, path.rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options}

    @property
    def is_local(self) -> bool:
        """Whether renames are atomic here, as on a POSIX file system."""
        protocol = self._opened[0].protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def path(self, name: str = "") -> str:
        """Full path of a file in this folder, as messages show it."""
        root = self._opened[1]
        return f"{root}/{name}" if name else root

    def sub(self, name: str) -> Folder:
        return Folder(f"{str(self.url).rstrip('/')}/{name}", self.options)

    @property
    def name(self) -> str:
        return self.path().rsplit("/", 1)[-1]

    def sibling(self, name: str) -> Folder:
        """Folder beside this one."""
        return Folder(f"{str(self.url).rstrip('/')[: -len(self.name)]}{name}", self.options)

    def size(self, name: str = "") -> int | None:
        """Bytes of a file, ``None`` where there is none."""
        try:
            if self.is_local:
                return os.stat(self.path(name)).st_size
            self._opened[0].invalidate_cache()
            return int(self._opened[0].size(self.path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, name: str = "") -> bool:
        if self.is_local:
            return os.path.lexists(self.path(name))
        self._opened[0].invalidate_cache()
        return bool(self._opened[0].exists(self.path(name)))

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, all or a range; fewer than asked where the file ends.

        Raises
        ------
        FileNotFoundError
        """
        path = self.path(name)
        if not self.is_local:
            end = None if length is None else start + length
            return bytes(self._opened[0].cat_file(path, start=start, end=end))
        with open(path, "rb", buffering=0) as file:
            length = os.fstat(file.fileno()).st_size - start if length is None else length
            return os.pread(file.fileno(), max(length, 0), start)

    def read_into(self, name: str, start: int, target: npt.NDArray[Any]) -> int:
        """Fill a contiguous array from a file, without a copy in between where the file is local.

        Returns
        -------
        int
            Bytes read, fewer than the array has where the file ends.

        Raises
        ------
        FileNotFoundError
        """
        view = _flat(target)
        if not self.is_local:
            content = self.read(name, start, len(view))
            view[: len(content)] = content
            return len(content)
        filled = 0
        with open(self.path(name), "rb", buffering=0) as file:
            while filled < len(view) and (count := os.preadv(file.fileno(), [view[filled:]], start + filled)):
                filled += count
        return filled

    def write(self, name: str, parts: Iterable[bytes | memoryview | npt.NDArray[Any]]) -> int:
        """Write a file into this existing folder so that it appears whole or not at all; returns its bytes.

        Raises
        ------
        StorageError
            The file system refused, for example because it is full.
        """
        if self.is_local:
            return self._write_local(self.path(name), parts)
        content = b"".join(_flat(part) for part in parts)
        try:
            self._opened[0].pipe_file(self.path(name), content)
        except OSError as error:
            raise _refused(error, self.path(name), 0) from error
        return len(content)

    def _write_local(self, path: str, parts: Iterable[bytes | memoryview | npt.NDArray[Any]]) -> int:
        target, written = f"{path}.{uuid.uuid4().hex}.tmp", 0
        try:
            self._make_parents(path)
            with open(target, "wb", buffering=0) as file:
                for part in parts:
                    view = _flat(part)
                    while view:
                        count = file.write(view[:_WRITE_BYTES])
                        written, view = written + count, view[count:]
            os.replace(target, path)
        except OSError as error:
            raise _refused(error, path, written) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
        return written

    def _make_parents(self, path: str) -> None:
        """Make the folders between this one and a file; this one, once removed, is not made again by a late writer."""
        level = self.path()
        for segment in path[len(level) :].split("/")[1:-1]:
            level = f"{level}/{segment}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(level)

    def remove(self, name: str = "") -> None:
        """Delete a file or a whole folder, if it is there."""
        path = self.path(name)
        if not self.is_local:
            with contextlib.suppress(FileNotFoundError):
                self._opened[0].rm(path, recursive=True)
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)

    def make(self) -> None:
        """Create the folder where that means anything."""
        if self.is_local:
            try:
                os.makedirs(self.path(), exist_ok=True)
            except OSError as error:
                raise _refused(error, self.path(), 0) from error


def _flat(part: bytes | memoryview | npt.NDArray[Any]) -> memoryview:
    view = part.data if isinstance(part, np.ndarray) else memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _refused(error: OSError, path: str, written: int) -> StorageError:
    reason = error.strerror or str(error)
    remedy = "Free space there (finished pieces are kept) and run the same call again." if error.errno in _FULL else ""
    return StorageError(f"Writing {path} stopped after {written:,} bytes: {reason}. {remedy}".rstrip())


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Errors of whatever library reaches an object store, in words; a local path has none.

    Raises
    ------
    StorageError
    """
    try:
        yield
    except (PanelflowError, FileNotFoundError):
        raise
    except Exception as error:
        if "://" not in url:
            raise
        raise StorageError(
            f"{url} cannot be reached ({type(error).__name__}: {error}). Check the address, the network, and the credentials "
            f"(storage_options for the source, output_options for the output)."
        ) from error


@contextlib.contextmanager
def open_native(path: str, options: dict[str, Any]) -> Iterator[Any]:
    """What Arrow reads from: a local file by its own means, anything else through fsspec."""
    if "://" not in path:
        with pa.OSFile(path) as native:
            yield native
    else:
        with open_input(path, options) as stream:
            yield stream


@contextlib.contextmanager
def open_input(path: str, options: dict[str, Any]) -> Iterator[Any]:
    """Open a source file for binary reading, decompressed where ``options`` say so; a local path costs no layer in between."""
    plain = "://" not in path and ("compression" not in options or infer_compression(path) is None)
    with open(path, "rb") if plain else fsspec.open(path, "rb", **options) as file:
        yield file
