"""Where a run is written before it is a dataset: one folder beside the output, a lease, and one rename at the end.

::

    .sp500.zarr.partial/
      lease.json     who is writing: host, process, last heartbeat
      lock           held by the kernel for the writer on this host
      run            digest of options and source; another digest starts afresh
      0f3a.../       named by the run, so that a late task of an earlier one finds its folder gone
        spool/       a data frame source, written down once
        units/       scratch files
        groups/      scratch files of a second pass, where there is one
        shards/      one note for each finished shard
        dataset/     the dataset, renamed to sp500.zarr when it is whole

On storage that cannot rename, the dataset is written in place and the manifest, its last file, is the commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from panelflow.errors import DatasetExistsError, DatasetNotFoundError, OptionError, PanelError
from panelflow.files import Folder, reaching
from panelflow.format import read_manifest
from panelflow.lease import Lease, take_lease

_RUN_CHARS = 16  # of a run's digest, in the names of its folders


@dataclass(frozen=True)
class Staging:
    """The folders of one run."""

    output: Folder
    root: Folder
    scratch: Folder
    dataset: Folder

    lease: Lease

    def commit(self, overwrite: bool) -> None:
        """Make the whole dataset appear at the output in one step (the manifest is written already)."""
        self.lease.check()
        if not self.output.is_local:
            return
        for stray in Path(self.dataset.path()).rglob("*.tmp"):  # left by a process that was killed
            stray.unlink()
        if self.output.exists():
            _check_replaceable(self.output, overwrite)
            _exchange(self.dataset.path(), self.output.path())
        else:
            os.rename(self.dataset.path(), self.output.path())


@contextlib.contextmanager
def stage(output: Folder, scratch: Folder | None, run: str, overwrite: bool, *, resume: bool = True) -> Iterator[Staging]:
    """Hold the lease of an output and its folders; they are removed on success and where the source is at fault.

    Without ``resume`` they are removed in any case, and what an earlier run left is not used.

    Raises
    ------
    DatasetExistsError
        There is something at the output that may not be replaced.
    DatasetBusyError
        Another live process writes it.
    """
    check_output(output, overwrite)
    root = output.sibling(f".{output.name}.partial")
    root.make()
    lease = take_lease(root, output.path())
    staging = _folders_of(output, root, scratch, run, lease)
    keep = resume
    try:
        _prepare_folders(staging, scratch, run, resume)
        yield staging
        keep = False
    except BaseException as error:
        keep = resume and not isinstance(error, PanelError | OptionError)
        if not keep and not output.is_local:
            staging.dataset.remove()  # it was written in place
        raise
    finally:
        lease.stop()
        if not keep:
            _remove(staging)
        lease.release()


def check_output(output: Folder, overwrite: bool) -> None:
    """Refuse an output that exists, before any work."""
    with reaching(str(output.url)):
        _check_output(output, overwrite)


def _check_output(output: Folder, overwrite: bool) -> None:
    if output.is_local:
        if output.exists():
            _check_replaceable(output, overwrite)
        return
    try:
        read_manifest(output)
    except DatasetNotFoundError:
        if output.exists() and not output.sibling(f".{output.name}.partial").exists("run"):
            raise DatasetExistsError(f"{output.url} holds other files; name a place of its own for the dataset.") from None
        return
    _check_replaceable(output, overwrite)


def _check_replaceable(output: Folder, overwrite: bool) -> None:
    if not overwrite:
        raise DatasetExistsError(f"{output.path()} exists; choose another place or pass overwrite=True (--overwrite).")
    if not output.is_local:
        raise DatasetExistsError(
            f"{output.url} exists, and storage that cannot rename cannot replace it in one step; write to a new URL."
        )
    try:
        read_manifest(output)
    except DatasetNotFoundError:
        raise DatasetExistsError(f"{output.path()} is no panelflow dataset; it is not replaced. Move it away.") from None


def _folders_of(output: Folder, root: Folder, scratch: Folder | None, run: str, lease: Lease) -> Staging:
    inside = root.sub(run[:_RUN_CHARS])
    own = inside if scratch is None else scratch.sub(_scratch_name(output, run))
    return Staging(output, root, own, inside.sub("dataset") if output.is_local else output, lease)


def _scratch_name(output: Folder, run: str) -> str:
    """Two outputs may share a scratch folder."""
    return f"panelflow-{hashlib.sha256(output.path().encode()).hexdigest()[:8]}-{run[:_RUN_CHARS]}"


def _prepare_folders(staging: Staging, scratch: Folder | None, run: str, resume: bool) -> None:
    root = staging.root
    before = root.read("run").decode() if root.exists("run") else ""
    if before != run or not resume:
        for old in {before, run} - {""}:
            root.remove(old[:_RUN_CHARS])
            if scratch is not None:
                scratch.remove(_scratch_name(staging.output, old))
        staging.dataset.remove()
        root.write("run", [run.encode()])
    staging.scratch.make()
    staging.dataset.make()


def _remove(staging: Staging) -> None:
    """Remove both folders at once for whoever still writes there: a name that is gone cannot be written to."""
    if not str(staging.scratch.url).startswith(f"{str(staging.root.url).rstrip('/')}/"):
        staging.scratch.remove()
    if not staging.root.is_local:
        staging.root.remove()
        return
    gone = f"{staging.root.path()}.{uuid.uuid4().hex}"
    os.rename(staging.root.path(), gone)
    shutil.rmtree(gone, ignore_errors=True)


_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def _exchange(new: str, old: str) -> None:
    """Swap two folders in one step where the kernel can (Linux ``renameat2``); elsewhere by two renames."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        result = library.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
        if result == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), old)
    aside = f"{new}.replaced"
    os.rename(old, aside)
    os.rename(new, old)
