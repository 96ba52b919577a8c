"""Where a run is written before it is a dataset: one folder beside the output, a lease, and one rename at the end.

::

    .sp500.zarr.partial/
      lease.json     who is writing: host, process, last heartbeat
      run            digest of options and source; another digest starts afresh
      spool/         a data frame source, written down once
      units/         scratch files
      shards/        one note for each finished shard
      dataset/       the dataset, renamed to sp500.zarr when it is whole

On storage that cannot rename, the dataset is written in place and the manifest, its last file, is the commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from panelflow.errors import DatasetBusyError, DatasetExistsError, DatasetNotFoundError, OptionError, PanelError
from panelflow.files import Folder
from panelflow.format import ROOT, read_manifest

_HEARTBEAT_SECONDS = 10.0
_EXPIRY_SECONDS = 60.0
_LEASE = "lease.json"


@dataclass(frozen=True)
class Staging:
    """The folders of one run."""

    output: Folder
    root: Folder
    scratch: Folder
    dataset: Folder

    def commit(self, overwrite: bool) -> None:
        """Make the whole dataset appear at the output in one step (the manifest is written already)."""
        if not self.output.is_local:
            return
        if self.output.exists():
            _check_replaceable(self.output, overwrite)
            _exchange(self.dataset.path(), self.output.path())
        else:
            os.rename(self.dataset.path(), self.output.path())


@contextlib.contextmanager
def stage(output: Folder, scratch: Folder | None, run: str, overwrite: bool) -> Iterator[Staging]:
    """Hold the lease of an output and its folders; they are removed on success and where the source is at fault.

    Raises
    ------
    DatasetExistsError
        There is a dataset and it may not be replaced.
    DatasetBusyError
        Another live process writes it.
    """
    check_output(output, overwrite)
    root = output.sibling(f".{output.name}.partial")
    root.make()
    stop_lease = _take_lease(root, output)
    finished = False
    staging = _prepare_folders(output, root, scratch, run)
    try:
        yield staging
        finished = True
    except (PanelError, OptionError):
        finished = True
        raise
    finally:
        stop_lease()
        if finished:
            _remove(staging)
        root.remove(_LEASE)


def check_output(output: Folder, overwrite: bool) -> None:
    """Refuse an output that exists, before any work."""
    if output.exists(ROOT) or (output.is_local and output.exists()):
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


def _prepare_folders(output: Folder, root: Folder, scratch: Folder | None, run: str) -> Staging:
    own = root if scratch is None else scratch.sub(f"panelflow-{run[:16]}")
    dataset = root.sub("dataset") if output.is_local else output
    before = root.read("run").decode() if root.exists("run") else ""
    if before != run:
        for name in ("spool", "units", "shards"):
            own.remove(name)
        if before and scratch is not None:
            scratch.remove(f"panelflow-{before[:16]}")
        dataset.remove()
        root.write("run", [run.encode()])
    own.make()
    return Staging(output, root, own, dataset)


def _remove(staging: Staging) -> None:
    if staging.scratch != staging.root:
        staging.scratch.remove()
    staging.root.remove()


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


def _take_lease(root: Folder, output: Folder) -> Callable[[], None]:
    """Take the right to write here, renewed by a thread so that a process that stopped loses it; returns its end."""
    token = uuid.uuid4().hex
    holder = _read_lease(root)
    if holder is not None and _is_alive(holder):
        raise DatasetBusyError(
            f"{output.path()} is being written by process {holder['pid']} on {holder['host']}; wait for it, or stop it "
            f"(on another host its lease then ends within {_EXPIRY_SECONDS:.0f} seconds)."
        )
    root.remove(_LEASE)
    if root.is_local:
        with contextlib.suppress(FileExistsError), open(root.path(_LEASE), "xb") as file:
            file.write(_lease_text(token))
    else:
        root.write(_LEASE, [_lease_text(token)])
    holder = _read_lease(root)
    if holder is None or holder["token"] != token:
        raise DatasetBusyError(f"{output.path()} was taken by another process in this moment; wait for it.")
    stopped = threading.Event()
    heartbeat = threading.Thread(target=_beat, args=(root, token, stopped), name="panelflow-lease", daemon=True)
    heartbeat.start()

    def stop() -> None:
        stopped.set()
        heartbeat.join()

    return stop


def _lease_text(token: str) -> bytes:
    process = psutil.Process()
    lease = {
        "token": token,
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "beat": time.time(),
    }
    return json.dumps(lease).encode()


def _read_lease(root: Folder) -> dict[str, str] | None:
    try:
        lease: dict[str, str] = json.loads(root.read(_LEASE))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return lease


def _is_alive(lease: dict[str, str]) -> bool:
    if lease["host"] != socket.gethostname():
        return time.time() - float(lease["beat"]) < _EXPIRY_SECONDS
    try:
        started = psutil.Process(int(lease["pid"])).create_time()
    except psutil.NoSuchProcess:
        return False
    return bool(abs(started - float(lease["started"])) < 1.0)


def _beat(root: Folder, token: str, stopped: threading.Event) -> None:
    while not stopped.wait(_HEARTBEAT_SECONDS):
        root.write(_LEASE, [_lease_text(token)])
