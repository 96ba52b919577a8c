"""Workers that are killed, disks that are full, clusters without workers: real processes, real signals."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from panels import OPTIONS, make_panel

import panelflow as pf

ROWS_PER_GROUP = 200


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "panel.parquet"
    make_panel(num_stocks=60).to_parquet(path, index=False, row_group_size=ROWS_PER_GROUP)
    return path


@pytest.fixture(scope="module")
def expected(source: Path, client: Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("expected") / "out.zarr"
    return pf.prepare(source, output, client=client, **OPTIONS).dataset_id


@pytest.fixture
def fragile() -> Iterator[Client]:
    """A cluster of its own, to be hurt."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def kill_workers_once(client: Client, folder: Path, pattern: str, count: int) -> threading.Thread:
    """Kill workers as soon as a file of the phase appears."""
    pids = list(client.run(os.getpid).values())

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not any(folder.glob(pattern)) and time.monotonic() < deadline:
            time.sleep(0.001)
        for pid in pids[:count]:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("count", [1, 2], ids=["one worker", "all workers"])
@pytest.mark.parametrize("phase", ["*/units/*.rows", "*/shards/*.json"], ids=["scatter", "gather"])
def test_workers_killed_in_the_middle_cost_only_what_was_under_way(
    source: Path, expected: str, fragile: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, count: int
) -> None:
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: ROWS_PER_GROUP * 64)
    killer = kill_workers_once(fragile, tmp_path / ".out.zarr.partial", phase, count)
    ds = pf.prepare(source, tmp_path / "out.zarr", client=fragile, **OPTIONS)
    killer.join()
    assert ds.dataset_id == expected
    assert pf.verify(ds)
    assert ds.manifest["provenance"]["units"] > 10
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]


def test_a_killed_client_continues(source: Path, expected: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import panelflow as pf, panelflow.shuffle
from panels import OPTIONS
panelflow.shuffle.unit_bytes_for = lambda *_: {ROWS_PER_GROUP * 64}
if __name__ == "__main__":
    print(pf.prepare({str(source)!r}, {str(tmp_path / "out.zarr")!r}, workers=1, **OPTIONS).manifest["provenance"])
"""
    )
    job = subprocess.Popen([sys.executable, str(script)])
    partial = tmp_path / ".out.zarr.partial"
    deadline = time.monotonic() + 60
    while len(list(partial.glob("*/units/*.rows"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    job.kill()
    job.wait()
    assert not (tmp_path / "out.zarr").exists()
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert "'reused_units': 0" not in done.stdout
    assert pf.open(tmp_path / "out.zarr").dataset_id == expected


def test_a_full_disk_is_named_and_the_run_continues_after(source: Path, expected: str, tmp_path: Path) -> None:
    """Workers that may not write files beyond a size meet the same error as on a full disk."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.run(_limit_file_size, 4096)
        with pytest.raises(pf.StorageError, match=r"Writing .*\.out\.zarr\.partial/\w+/units/.* stopped after [\d,]+ bytes"):
            pf.prepare(source, tmp_path / "out.zarr", client=client, **OPTIONS)
        client.run(_limit_file_size, resource.RLIM_INFINITY)
        assert pf.prepare(source, tmp_path / "out.zarr", client=client, **OPTIONS).dataset_id == expected


def _limit_file_size(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN) if threading.current_thread() is threading.main_thread() else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_cluster_that_loses_all_workers_ends_in_bounded_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panelflow.cluster._SECONDS_WITHOUT_WORKERS", 3.0)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.submit(time.sleep, 1.0)  # keeps the worker busy until the cluster shrinks
        threading.Timer(0.5, lambda: cluster.scale(0)).start()
        with pytest.raises(pf.WorkerError, match="lost all its workers"):
            pf.prepare(source, tmp_path / "out.zarr", client=client, **OPTIONS)
        with pytest.raises(pf.WorkerError, match="no workers"):
            pf.prepare(source, tmp_path / "other.zarr", client=client, **OPTIONS)
