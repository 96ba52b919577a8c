"""Who may write an output: one writer at a time, a dead one's right being free again.

On a local file system a lock of the kernel tells writers of one host apart, and ends with its process. A lease beside it,
renewed by a thread, tells hosts apart where the lock does not reach, and is all there is on object stores; it ends by expiry, or
at once where its holder is a dead process of this host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import psutil

from panelflow.errors import DatasetBusyError
from panelflow.files import Folder

LEASE = "lease.json"
_LOCK = "lock"
_HEARTBEAT_SECONDS = 10.0
_EXPIRY_SECONDS = 60.0


@dataclass
class Lease:
    """A lease that is held; ``release`` gives it back, ``check`` raises if another process took it over."""

    root: Folder
    token: str
    lock: int | None
    lost: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._heartbeat = threading.Thread(target=self._beat, name="panelflow-lease", daemon=True)
        self._heartbeat.start()

    def check(self) -> None:
        """Raise before a commit if the lease is no longer ours.

        Raises
        ------
        DatasetBusyError
        """
        holder = _read(self.root)
        if self.lost.is_set() or holder is None or holder["token"] != self.token:
            raise DatasetBusyError(f"The lease of {self.root.path()} was taken over by another process; nothing was committed.")

    def stop(self) -> None:
        """End the heartbeat; the lease stays until :meth:`release`."""
        self._stopped.set()
        self._heartbeat.join()

    def release(self) -> None:
        """Give back the lease, if it is still ours, and the lock."""
        holder = _read(self.root)
        if holder is not None and holder["token"] == self.token:
            self.root.remove(LEASE)
        if self.lock is not None:
            os.close(self.lock)

    def _beat(self) -> None:
        while not self._stopped.wait(_HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # what a disk or a network refuses now, it may allow at the next beat
                holder = _read(self.root)
                if holder is not None and holder["token"] != self.token:
                    self.lost.set()
                    return
                self.root.write(LEASE, [lease_text(self.token)])


def take_lease(root: Folder, shown: str) -> Lease:
    """Take the right to write, in the existing folder ``root``; ``shown`` names the output in messages.

    Raises
    ------
    DatasetBusyError
        A live process has it.
    """
    lock = _lock(root, shown) if root.is_local else None
    try:
        return Lease(root, _write_token(root, shown, locked=lock is not None), lock)
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise


def _write_token(root: Folder, shown: str, *, locked: bool) -> str:
    holder = _read(root)
    if holder is not None and _is_alive(holder, locked=locked):
        raise _busy(shown, holder)
    token = uuid.uuid4().hex
    root.write(LEASE, [lease_text(token)])
    holder = _read(root)
    if holder is None or holder["token"] != token:
        raise DatasetBusyError(f"{shown} was taken by another process in this moment; wait for it.")
    return token


def _lock(root: Folder, shown: str) -> int:
    """Lock a file of the folder; one that was removed in between is not the file that others see."""
    while True:
        root.make()
        descriptor = os.open(root.path(_LOCK), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(root.path(_LOCK)).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise _busy(shown, _read(root) or {"pid": "unknown", "host": "this host"}) from None
        os.close(descriptor)


def _busy(shown: str, holder: dict[str, Any]) -> DatasetBusyError:
    return DatasetBusyError(
        f"{shown} is being written by process {holder['pid']} on {holder['host']}; wait for it, or stop it (on another host its "
        f"lease then ends within {_EXPIRY_SECONDS:.0f} seconds)."
    )


def lease_text(token: str) -> bytes:
    """What a lease says: who holds it, and since when it was renewed."""
    process = psutil.Process()
    lease = {
        "token": token,
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "beat": time.time(),
    }
    return json.dumps(lease).encode()


def _read(root: Folder) -> dict[str, Any] | None:
    try:
        lease: dict[str, Any] = json.loads(root.read(LEASE))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return lease


def _is_alive(lease: dict[str, Any], *, locked: bool) -> bool:
    """Whether the holder may still write; one of this host cannot, where its lock is ours now."""
    if lease["host"] != socket.gethostname():
        return time.time() - float(lease["beat"]) < _EXPIRY_SECONDS
    if locked:
        return False
    try:
        started = psutil.Process(int(lease["pid"])).create_time()
    except psutil.NoSuchProcess:
        return False
    return bool(abs(started - float(lease["started"])) < 1.0)
