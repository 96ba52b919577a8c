"""The memory of a worker is a promise: peak resident memory <= the formula <= the limit, whatever the shape of the source."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from panels import OPTIONS

import panelflow as pf

GiB, MiB = 2**30, 2**20
LIMIT = 512 * MiB
SPLIT = pf.DateSplit(train=(None, "2015-01-01"), test=("2015-01-01", None))


def peak_memory() -> int:
    """Bytes that were resident at most; unlike ru_maxrss this does not begin with the parent's."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def paused_workers(dask_scheduler: Any = None) -> list[str]:
    return [worker.address for worker in dask_scheduler.workers.values() if worker.status.name == "paused"]


def prepare_within(source: Path, output: Path, workers: int = 1, **changes: Any) -> pf.Dataset:
    """Prepare on small workers; assert that none went beyond its budget, was started anew, or stood paused."""
    options: dict[str, Any] = OPTIONS | {"split": SPLIT, "chunk_rows": None, "shard_bytes": "16MiB"} | changes
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, memory_limit=LIMIT, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        before = set(client.scheduler_info()["workers"])
        ds = pf.prepare(source, output, client=client, **options)
        peaks = client.run(peak_memory)
        assert set(peaks) == before
        assert client.run_on_scheduler(paused_workers) == []
    budget = ds.manifest["provenance"]["memory_budget"]["worker"]
    print({key: f"{peak / MiB:.0f} MiB" for key, peak in peaks.items()}, f"budget {budget / MiB:.0f} MiB")
    assert max(peaks.values()) <= budget <= LIMIT, (peaks, budget)
    return ds


def make_table(rows: int, features: int, first_date: int = 0, dtype: str = "float32") -> pa.Table:
    """``rows`` rows of 1,000 stocks on consecutive days; one random block stands behind all features."""
    generator, names = np.random.default_rng(first_date), [f"f{i:04d}" for i in range(features)]
    noise = generator.normal(size=rows + features).astype(dtype)
    days = pd.bdate_range("2000-01-03", periods=first_date + rows // 1000)[first_date:]
    columns = {"stock": pa.array([f"S{i:04d}" for i in range(1000)] * (rows // 1000)), "date": pa.array(np.repeat(days, 1000))}
    columns |= {name: pa.array(noise[i : i + rows]) for i, name in enumerate(names)}
    return pa.table(columns | {"ret": pa.array(noise[:rows])})


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_panel_ten_times_the_memory_of_the_cluster(tmp_path: Path) -> None:
    """10 GiB on two workers of 512 MiB; less where the disk has no room for source, scratch and dataset."""
    room = shutil.disk_usage(tmp_path).free - 2 * GiB
    rows, features, files = 250_000, 64, 168
    files = max(min(files, int(room // (3 * rows * features * 4.3))), 8)
    (tmp_path / "panel").mkdir()
    for number in range(files):
        table = make_table(rows, features, first_date=number * 250 % 4000)
        stocks = pa.array([f"{number * 250 // 4000}-{i:04d}" for i in range(1000)] * 250)
        table = table.set_column(0, "stock", stocks)
        path = tmp_path / "panel" / f"{number:03d}.parquet"
        pq.write_table(table, path, row_group_size=50_000, compression="none", use_dictionary=["stock", "date"])
    size = sum(path.stat().st_size for path in (tmp_path / "panel").iterdir())
    print(f"{size / GiB:.1f} GiB of source in {files} files")
    started = time.monotonic()
    ds = prepare_within(tmp_path / "panel", tmp_path / "out.zarr", workers=2)
    print(f"prepared in {time.monotonic() - started:.0f} s, {ds.manifest['provenance']['phases']}")
    conservation = ds.manifest["content"]["conservation"]
    assert conservation["source_rows"] == files * rows
    assert size > 10 * 2 * LIMIT or files < 168


def write_wide(folder: Path) -> int:
    """2,000 features: a row of the block takes 8 KB."""
    for number in range(4):
        pq.write_table(make_table(20_000, 2000, number * 20), folder / f"{number}.parquet", row_group_size=2_000)
    return 80_000


def write_one_row_group(folder: Path) -> int:
    """A single row group of 300 MB, larger than what a worker may hold."""
    pq.write_table(make_table(2_000_000, 36), folder / "huge.parquet", row_group_size=2_000_000, use_dictionary=["stock", "date"])
    return 2_000_000


def write_text_beside(folder: Path) -> int:
    """A column of 400 MB of text that nobody asked for, in every file of two."""
    for number in range(2):
        table = make_table(200_000, 4, number * 200)
        text = pa.array(np.random.default_rng(number).integers(0, 256, (200_000, 1000), dtype=np.uint8).view("S1000")[:, 0])
        table = table.append_column("note", text)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=200_000, use_dictionary=["stock", "date"])
    return 400_000


def write_doubles(folder: Path) -> int:
    """float64 values, dates in no order, and rows of a date in many files."""
    table = make_table(1_000_000, 30, dtype="float64")
    order = np.random.default_rng(0).permutation(table.num_rows)
    for number, part in enumerate(np.array_split(order, 5)):
        pq.write_table(table.take(pa.array(part)), folder / f"{number}.parquet", row_group_size=100_000)
    return 1_000_000


def write_csv(folder: Path) -> int:
    """Text of 260 MB in one file."""
    import pyarrow.csv as csv

    csv.write_csv(make_table(600_000, 30), folder / "panel.csv")
    return 600_000


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_wide, write_one_row_group, write_text_beside, write_doubles, write_csv])
def test_awkward_sources_stay_within_the_budget(tmp_path: Path, write: Callable[[Path], int]) -> None:
    (tmp_path / "panel").mkdir()
    rows = write(tmp_path / "panel")
    ds = prepare_within(tmp_path / "panel", tmp_path / "out.zarr", split=pf.DateSplit(train=(None, None)))
    assert len(ds["train"]) == rows
