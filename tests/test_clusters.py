"""Clusters as users start them: from the command line, in another place, of another version, growing and shrinking."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from panels import OPTIONS, make_panel

import panelflow as pf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "panel.parquet"
    make_panel().to_parquet(path, index=False, row_group_size=300)
    return path


@contextmanager
def command_line_cluster(folder: Path, prefix: tuple[str, ...] = (), preload: str = "") -> Iterator[str]:
    """A scheduler and two workers, each a process of its own, started by Dask's commands; yields the scheduler's address."""
    file = folder / "scheduler.json"
    folder.mkdir(exist_ok=True)
    (folder / "preload.py").write_text(preload)
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1"]
    worker += ["--host", "127.0.0.1", "--no-dashboard", "--local-directory", str(folder), "--preload", str(folder / "preload.py")]
    commands = [[*scheduler, "--scheduler-file", str(file)], [*prefix, *worker], worker]
    log = (folder / "log").open("wb")
    processes = []
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            deadline = time.monotonic() + 60
            while not file.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
        log.close()


def prepare_by_command(source: Path, output: Path, scheduler: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "panelflow", "prepare", str(source), str(output), "--scheduler", scheduler]
    command += ["--entity", "stock", "--date", "date", "--features", "f*", "--target", "ret", "--horizon", "3"]
    command += ["--train", ":2015-03-01", "--validation", "2015-03-01:2015-05-01", "--test", "2015-05-01:"]
    command += ["--chunk-rows", "64", "--shard-bytes", str(64 * 4 * 32), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_cluster_started_from_the_command_line(source: Path, unweighted: pf.Dataset, tmp_path: Path) -> None:
    with command_line_cluster(tmp_path / "cluster") as address:
        done = prepare_by_command(source, tmp_path / "out.zarr", address, "--scratch", str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stderr
    assert pf.open(tmp_path / "out.zarr").dataset_id == unweighted.dataset_id
    assert "source rows = written" in done.stdout.replace("\n", " ")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_worker_of_another_version_is_named(source: Path, tmp_path: Path) -> None:
    """The worker says what a worker says whose installed panelflow is older, or which has none."""
    preload = """
import importlib.metadata as metadata, os
real = metadata.version
def version(name):
    if name != "panelflow":
        return real(name)
    raise metadata.PackageNotFoundError(name)
metadata.version = version
"""
    with command_line_cluster(tmp_path / "cluster", preload=preload) as address:
        done = prepare_by_command(source, tmp_path / "out.zarr", address)
    assert done.returncode == 1
    assert "2 Dask workers have another panelflow than" in done.stderr
    assert "(none)" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cluster"]


def can_mount() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this system lets no process mount a file system of its own")
def test_storage_that_a_worker_does_not_share_is_refused_before_work(source: Path, tmp_path: Path) -> None:
    """One worker has another file system where the client has its output."""
    place = tmp_path / "place"
    place.mkdir()
    mounted = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'mount -t tmpfs none "{place}" && exec "$@"', "sh")
    with command_line_cluster(tmp_path / "cluster", prefix=mounted) as address:
        done = prepare_by_command(source, place / "out.zarr", address)
    assert done.returncode == 2, done.stderr
    assert "1 Dask workers do not see" in done.stderr
    assert "--scratch" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(place) == []


def test_an_adaptive_cluster_starts_from_nothing_and_changes_as_it_likes(
    source: Path, unweighted: pf.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 20_000)
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=1, target_duration="100ms")
        ds = pf.prepare(source, tmp_path / "out.zarr", client=client, **OPTIONS)
    assert ds.dataset_id == unweighted.dataset_id
