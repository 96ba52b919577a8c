"""What a run is said to take is what it takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from panels import OPTIONS, make_panel

import panelflow as pf
from panelflow.budget import page_bytes_of
from panelflow.cli import main
from panelflow.plan import SEGMENT_BYTES
from panelflow.source import FileInfo, SourceFile

ROLES = {name: OPTIONS[name] for name in ("entity", "date", "features", "targets", "chunk_rows", "shard_bytes")}


def write_files(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for stock, rows in make_panel().groupby("stock"):
        if kind == "csv":
            rows.to_csv(folder / f"{stock}.csv", index=False)
        else:
            rows.to_parquet(folder / f"{stock}.parquet", index=False)
    return folder


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_an_estimate_is_near_the_run(prepare: Any, tmp_path: Path, kind: str) -> None:
    source = write_files(tmp_path / "source", kind)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    said = pf.estimate(source, **ROLES, workers=2, memory_limit="1GiB")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    ds = prepare(source, split=pf.DateSplit(train=(None, "2016-01-01")))
    took = ds.manifest["provenance"]
    rows = ds.manifest["content"]["conservation"]["source_rows"]
    assert said.rows == rows if kind == "parquet" else abs(said.rows - rows) < 0.1 * rows
    assert said.units == took["units"]
    assert said.scratch_bytes == pytest.approx(took["scratch_bytes"], rel=0.1)
    assert said.shards == pytest.approx(len(ds.manifest["content"]["shards"]["train"]), abs=3)


def test_ten_billion_rows_on_a_hundred_workers() -> None:
    """Arithmetic alone: no data, and the same memory as for a small panel."""
    started = time.monotonic()
    said = pf.estimate_size(10**10, 64, workers=100, memory_limit="4GiB")
    assert time.monotonic() - started < 1
    assert said.passes == 2
    assert said.segment_bytes > SEGMENT_BYTES / 2
    assert said.scratch_bytes == 2 * 10**10 * (65 * 4 + 12)
    assert said.tasks["gather"] == said.shards == -(-(10**10) // (64 * 2**20 // 256))
    assert max(said.tasks.values()) < 100_000
    small = pf.estimate_size(10**6, 64, workers=100, memory_limit="4GiB")
    assert (small.passes, small.worker_bytes) == (1, said.worker_bytes)
    assert said.as_dict()["rows"] == 10**10


def test_too_little_memory_is_refused_before_a_cluster_is_there(tmp_path: Path) -> None:
    with pytest.raises(pf.MemoryBudgetError, match="A worker needs"):
        pf.estimate_size(10**6, 64, memory_limit="300MiB")
    with pytest.raises(pf.OptionError, match="memory_limit='much'"):
        pf.estimate_size(10**6, 64, memory_limit="much")


def test_pages_count_as_one_of_each_column() -> None:
    small, large = (FileInfo(SourceFile("", "parquet"), {}, {}, (10, rows), 0) for rows in (20, 10**7))
    assert page_bytes_of([small], 35) == 35 * (8 * 20 + 48 * 1024)
    assert page_bytes_of([small, large], 35) == 35 * (2 * 2**20 + 48 * 1024)


def test_the_commands_print_it(tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", "parquet")
    arguments = ["prepare", str(source), str(tmp_path / "out.zarr"), "--entity", "stock", "--date", "date", "--features", "f*"]
    done = CliRunner().invoke(main, [*arguments, "--target", "ret", "--train", ":2015-03-01", "--horizon", "3", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "scatter 1" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    done = CliRunner().invoke(main, ["size", "--rows", "1e10", "--features", "64", "--workers", "100", "--memory-limit", "4GiB"])
    assert "10,000,000,000" in done.output, done.output
