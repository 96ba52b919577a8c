"""Runs that are stopped, starved or deceived half way: real processes, real signals, real file systems."""

from __future__ import annotations

import functools
import os
import shutil
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
from test_clusters import can_mount

import panelflow as pf

ROWS_PER_GROUP = 100
COMMAND = [sys.executable, "-m", "panelflow", "prepare", "SOURCE", "OUTPUT", "--entity", "stock", "--date", "date"]
COMMAND += ["--features", "f*", "--target", "ret", "--horizon", "3", "--train", ":2015-03-01", "--workers", "2"]
COMMAND += ["--validation", "2015-03-01:2015-05-01", "--test", "2015-05-01:", "--chunk-rows", "64", "--shard-bytes", "8192"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for number, (_, rows) in enumerate(make_panel(num_stocks=60).groupby("stock")):
        rows.to_parquet(folder / f"{number:03d}.parquet", index=False, row_group_size=ROWS_PER_GROUP)
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, client: Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    return pf.prepare(source, tmp_path_factory.mktemp("expected") / "out.zarr", client=client, **OPTIONS).dataset_id


@pytest.fixture
def local() -> Iterator[Client]:
    """Workers that are threads of this process, so that a test can reach into them."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def command(source: Path, output: Path, *more: str) -> list[str]:
    return [{"SOURCE": str(source), "OUTPUT": str(output)}.get(word, word) for word in COMMAND] + list(more)


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not any(folder.glob(pattern)) and time.monotonic() < deadline:
        assert process is None or process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.001)


@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_worker_that_stands_still_for_a_while_costs_time_only(
    source: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: ROWS_PER_GROUP * 64)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        pid = next(iter(client.run(os.getpid).values()))

        def hold() -> None:
            wait_for(tmp_path / ".out.zarr.partial", "*/units/*.rows")
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

        holder = threading.Thread(target=hold)
        holder.start()
        ds = pf.prepare(source, tmp_path / "out.zarr", client=client, **OPTIONS)
        holder.join()
    assert ds.dataset_id == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]


@pytest.mark.parametrize("keep", [True, False], ids=["resume", "no resume"])
def test_control_c_says_so_in_a_line_and_the_same_command_goes_on(
    source: Path, expected: str, tmp_path: Path, keep: bool
) -> None:
    """The signal goes to the whole group, workers included, as a terminal sends it."""
    many = [*command(source, tmp_path / "out.zarr", "--memory-limit", "512MiB"), *([] if keep else ["--no-resume"])]
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it otherwise
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(many, **pipes, start_new_session=True, preexec_fn=heed)
    wait_for(tmp_path / ".out.zarr.partial", "run", job)
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert "panelflow: stopped; run the same command again" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out.zarr").exists()
    assert (tmp_path / ".out.zarr.partial").exists() == keep
    done = subprocess.run(many, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert pf.open(tmp_path / "out.zarr").dataset_id == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]


@pytest.mark.skipif(not can_mount(), reason="this system lets no process mount a file system of its own")
@pytest.mark.parametrize("full", ["scratch", "output"])
def test_a_full_file_system_is_named_and_the_run_continues_after_space_is_made(
    source: Path, expected: str, tmp_path: Path, full: str
) -> None:
    """A file system of 150 KiB in a namespace of its own, made larger after the first try."""
    for name in ("scratch", "output"):
        (tmp_path / name).mkdir()
    words = command(source, tmp_path / "output" / "out.zarr", "--scratch", str(tmp_path / "scratch"))
    script = f"""
        mount -t tmpfs -o size=150k none "{tmp_path / full}"
        "$@" 2> "{tmp_path}/first" && exit 9
        mount -o remount,size=64m "{tmp_path / full}"
        "$@" > "{tmp_path}/second" 2>&1 || exit 8
        cp -r "{tmp_path}/output/out.zarr" "{tmp_path}/copy.zarr"
    """
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run([*namespace, *words], capture_output=True, text=True, timeout=200)
    first = (tmp_path / "first").read_text()
    assert done.returncode == 0, (done.stderr, first, (tmp_path / "second").read_text())
    assert f"Writing {tmp_path / full}" in first
    assert "No space left on device" in first
    assert "run the same call again" in first
    assert "Traceback" not in first
    assert pf.open(tmp_path / "copy.zarr").dataset_id == expected


def test_a_source_that_changes_during_a_run_is_refused(
    local: Client, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows with another value: nothing but the state of the file tells it."""
    from panelflow import shuffle

    shutil.copytree(source, tmp_path / "source")
    plan = shuffle._plan

    def change(*arguments: object) -> object:
        path = tmp_path / "source" / "007.parquet"
        frame = make_panel(num_stocks=60).query("stock == 'S007'").assign(f0=0.0)
        frame.to_parquet(path, index=False, row_group_size=ROWS_PER_GROUP)
        return plan(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(pf.PanelError, match=r"007\.parquet changed while it was being prepared"):
        patch.setattr("panelflow.shuffle._plan", change)
        pf.prepare(tmp_path / "source", tmp_path / "out.zarr", client=local, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_changes_between_runs_starts_afresh(
    local: Client, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source, tmp_path / "source")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped here"):
        patch.setattr("panelflow.shuffle.count_rows", lambda *_: (_ for _ in ()).throw(RuntimeError("stopped here")))
        pf.prepare(tmp_path / "source", tmp_path / "out.zarr", client=local, **OPTIONS)
    assert list((tmp_path / ".out.zarr.partial").glob("*/units/*"))
    shutil.copy(source / "007.parquet", tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "source" / "007.parquet")
    assert (
        pf.prepare(tmp_path / "source", tmp_path / "out.zarr", client=local, **OPTIONS).manifest["provenance"]["reused_units"]
        == 0
    )


def test_the_second_of_two_runs_into_one_output_is_refused(
    source: Path, expected: str, local: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panelflow import shuffle

    count = shuffle.count_rows
    refused = []

    def run_another(*arguments: object) -> object:
        with pytest.raises(pf.DatasetBusyError, match=f"being written by process {os.getpid()}"):
            pf.prepare(source, tmp_path / "out.zarr", client=local, **OPTIONS)
        done = subprocess.run(command(source, tmp_path / "out.zarr"), capture_output=True, text=True, timeout=100)
        refused.append((done.returncode, done.stderr))
        return count(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("panelflow.shuffle.count_rows", run_another)
    assert pf.prepare(source, tmp_path / "out.zarr", client=local, **OPTIONS).dataset_id == expected
    ((code, errors),) = refused
    assert code == 1
    assert f"being written by process {os.getpid()}" in errors


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_truncated_file_among_many_is_named_and_nothing_is_committed(
    source: Path, client: Client, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "source").mkdir()
    for path in source.iterdir():
        if kind == "parquet":
            shutil.copy(path, tmp_path / "source")
        else:
            import pandas as pd

            pd.read_parquet(path).to_csv(tmp_path / "source" / f"{path.stem}.csv", index=False)
    torn = tmp_path / "source" / f"031.{kind}"
    content = torn.read_bytes()
    torn.write_bytes(content[: content.index(b",", len(content) // 2)] if kind == "csv" else content[: len(content) // 2])
    with pytest.raises(pf.PanelError, match=f"031.{kind}"):
        pf.prepare(tmp_path / "source", tmp_path / "out.zarr", client=client, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
