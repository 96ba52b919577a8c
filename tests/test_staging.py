from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import panelflow as pf
from panelflow.files import Folder
from panelflow.staging import _exchange, _lease_text, stage

RUN = "ab" * 32


def lease(path: Path, **changes: object) -> None:
    (path / ".out.zarr.partial").mkdir()
    text = json.loads(_lease_text("theirs")) | changes
    (path / ".out.zarr.partial" / "lease.json").write_text(json.dumps(text))


def take(path: Path) -> None:
    with stage(Folder(str(path / "out.zarr")), None, RUN, False):
        pass


def test_a_live_writer_keeps_others_out(tmp_path: Path) -> None:
    lease(tmp_path)
    with pytest.raises(pf.DatasetBusyError, match=rf"process {os.getpid()} on {socket.gethostname()}"):
        take(tmp_path)
    with stage(Folder(str(tmp_path / "b.zarr")), None, RUN, False), pytest.raises(pf.DatasetBusyError):
        with stage(Folder(str(tmp_path / "b.zarr")), None, RUN, False):
            pass


def test_a_dead_one_of_this_host_is_freed_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    lease(tmp_path, pid=gone.pid)
    take(tmp_path)


def test_a_process_number_used_again_is_not_the_writer(tmp_path: Path) -> None:
    lease(tmp_path, started=psutil.Process().create_time() - 1000)
    take(tmp_path)


def test_elsewhere_it_ends_by_expiry(tmp_path: Path) -> None:
    lease(tmp_path, host="elsewhere")
    with pytest.raises(pf.DatasetBusyError, match="elsewhere"):
        take(tmp_path)
    (tmp_path / ".out.zarr.partial" / "lease.json").unlink()
    (tmp_path / ".out.zarr.partial").rmdir()
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
        assert [p.name for p in (tmp_path / "fast").iterdir()] == ["panelflow-" + RUN[:16]]
    assert list((tmp_path / "fast").iterdir()) == []


def test_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    _exchange(str(tmp_path / "new"), str(tmp_path / "old"))
    assert (tmp_path / "old" / "new").exists()
