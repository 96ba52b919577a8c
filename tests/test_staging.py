from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import panelflow as pf
from panelflow.files import Folder
from panelflow.lease import _is_alive, lease_text
from panelflow.staging import _exchange, stage

RUN = "ab" * 32


def lease(path: Path, **changes: object) -> None:
    (path / ".out.zarr.partial").mkdir()
    text = json.loads(lease_text("theirs")) | changes
    (path / ".out.zarr.partial" / "lease.json").write_text(json.dumps(text))


def take(path: Path) -> None:
    with stage(Folder(str(path / "out.zarr")), None, RUN, False):
        pass


def test_a_live_writer_keeps_others_out(tmp_path: Path) -> None:
    output = Folder(str(tmp_path / "out.zarr"))
    with stage(output, None, RUN, False) as staging:
        with pytest.raises(pf.DatasetBusyError, match=rf"process {os.getpid()} on {socket.gethostname()}"):
            take(tmp_path)
        staging.lease.check()
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys, time
from panelflow.files import Folder
from panelflow.staging import stage
with stage(Folder(sys.argv[1]), None, "ab" * 32, False):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_writer_is_freed_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out.zarr")]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "held\n"
    with pytest.raises(pf.DatasetBusyError, match=f"process {writer.pid} on"):
        take(tmp_path)
    writer.kill()
    writer.wait()
    take(tmp_path)


def test_two_takers_of_a_dead_lease_are_told_apart(tmp_path: Path) -> None:
    lease(tmp_path, pid=2**22 + 1)
    held, refused, start, leave = [], [], threading.Barrier(8), threading.Event()

    def contend() -> None:
        start.wait()
        try:
            with stage(Folder(str(tmp_path / "out.zarr")), None, RUN, False):
                held.append(1)
                leave.wait(20)
        except pf.DatasetBusyError:
            refused.append(1)
            if len(refused) == 7:
                leave.set()

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 7)


def test_a_lease_that_was_taken_over_is_not_committed(tmp_path: Path) -> None:
    with (
        pytest.raises(pf.DatasetBusyError, match="taken over"),
        stage(Folder(str(tmp_path / "out.zarr")), None, RUN, False) as held,
    ):
        held.root.write("lease.json", [lease_text("another")])
        held.commit(False)
    assert json.loads((tmp_path / ".out.zarr.partial" / "lease.json").read_text())["token"] == "another"


def test_a_scratch_that_cannot_be_leaves_no_lease(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(pf.StorageError, match="file"),
        stage(Folder(str(tmp_path / "o")), Folder(str(tmp_path / "file" / "s")), RUN, False),
    ):
        pass
    with stage(Folder(str(tmp_path / "o")), None, RUN, False):
        pass


def test_what_was_removed_is_not_made_again_by_a_late_writer(tmp_path: Path) -> None:
    with stage(Folder(str(tmp_path / "out.zarr")), None, RUN, False) as staging:
        pass
    with pytest.raises(pf.StorageError):
        staging.scratch.write("units/late", [b"x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("locked", [True, False])
def test_where_there_is_no_lock_a_process_is_known_by_number_and_start(locked: bool) -> None:
    mine = json.loads(lease_text("mine"))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert _is_alive(mine, locked=locked) is not locked  # one who holds the lock here is the only one here
    assert not _is_alive(mine | {"pid": gone.pid}, locked=locked)
    assert not _is_alive(mine | {"started": psutil.Process().create_time() - 1000}, locked=locked)
    assert _is_alive(mine | {"host": "elsewhere"}, locked=locked)


def test_elsewhere_it_ends_by_expiry(tmp_path: Path) -> None:
    lease(tmp_path, host="elsewhere")
    with pytest.raises(pf.DatasetBusyError, match="elsewhere"):
        take(tmp_path)
    shutil.rmtree(tmp_path / ".out.zarr.partial")
    lease(tmp_path, host="elsewhere", beat=time.time() - 61)
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_run_starts_afresh_and_the_same_continues(tmp_path: Path) -> None:
    output = Folder(str(tmp_path / "out.zarr"))
    with pytest.raises(KeyboardInterrupt), stage(output, None, RUN, False) as staging:
        staging.scratch.write("units/1", [b"done"])
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), stage(output, None, RUN, False) as staging:
        assert staging.scratch.exists("units/1")
        raise KeyboardInterrupt
    with stage(output, None, "cd" * 32, False) as staging:
        assert not staging.scratch.exists("units/1")


def test_scratch_elsewhere_is_used_and_removed(tmp_path: Path) -> None:
    with stage(Folder(str(tmp_path / "out.zarr")), Folder(str(tmp_path / "fast")), RUN, False) as staging:
        staging.scratch.write("units/1", [b"x"])
        assert next((tmp_path / "fast").iterdir()).name.endswith(RUN[:16])
    assert list((tmp_path / "fast").iterdir()) == []


def test_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    _exchange(str(tmp_path / "new"), str(tmp_path / "old"))
    assert (tmp_path / "old" / "new").exists()


def test_a_late_task_of_another_run_finds_its_folder_gone(tmp_path: Path) -> None:
    """It stood still through the interruption of its run, and writes while the next one is under way."""
    output = Folder(str(tmp_path / "out.zarr"))
    with contextlib.suppress(KeyboardInterrupt), stage(output, None, "a" * 64, False) as first:
        first.scratch.sub("units").make()
        raise KeyboardInterrupt
    with stage(output, None, "b" * 64, False) as second:
        second.scratch.sub("units").make()
        for late in (first.scratch.sub("units"), first.dataset):
            with pytest.raises((pf.StorageError, FileNotFoundError)):
                late.write("0", [b"values of the first run"])
        assert not second.scratch.exists("units/0")


def test_a_full_disk_while_the_lease_is_taken_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Folder(str(tmp_path / "out.zarr"))

    def refuse(*_: Any) -> None:
        raise pf.StorageError("no space")

    with monkeypatch.context() as full:
        full.setattr(Folder, "write", refuse)
        with pytest.raises(pf.StorageError), stage(output, None, "a" * 64, False):
            pass
    with stage(output, None, "a" * 64, False):
        pass


def test_a_heartbeat_outlives_an_error_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panelflow.lease._HEARTBEAT_SECONDS", 0.02)
    failing = threading.Event()
    read = Folder.read

    def stale(self: Folder, *args: Any) -> bytes:
        if failing.is_set():
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, *args)

    monkeypatch.setattr(Folder, "read", stale)
    with stage(Folder(str(tmp_path / "out.zarr")), None, "a" * 64, False) as staging:
        failing.set()
        time.sleep(0.1)
        failing.clear()
        before = json.loads(staging.root.read("lease.json"))["beat"]
        deadline = time.monotonic() + 10
        while json.loads(staging.root.read("lease.json"))["beat"] == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
