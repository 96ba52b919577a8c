"""Prepare the reference panel, beside what a user would pick instead, in one run.

    python tests/benchmarks/prepare.py [--dates 2520] [--features 32] [--repeats 3] [--only NAME ...] [--folder DIR]
    python tests/benchmarks/prepare.py --growth [--features 8] [--memory-limit 1GiB]

5,000 stocks on 2,520 dates, 32 float32 features and a target in 60 zstd Parquet files: 12.6 million rows, 2.4 GB. All runners
take turns, each on two processes or threads. ``--growth`` prepares 1, 4 and 16 times as many rows in the same memory. Nothing is
asserted here; the figures are for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet as pq
import zarr
from dask.distributed import Client, LocalCluster

import panelflow as pf

STOCKS, FILES = 5000, 60
WRITE_BYTES = 2**19
SPLIT = pf.DateSplit(train=(None, "2008-01-01"), test=("2008-01-01", None))


def make_panel(folder: Path, dates: int, features: int) -> int:
    """Write the reference panel, a run of dates in each file, and say how many bytes it has."""
    folder.mkdir(parents=True, exist_ok=True)
    days = np.array_split(pd.bdate_range("2000-01-03", periods=dates), FILES)
    stocks = np.array([f"S{i:04d}" for i in range(STOCKS)])
    for number, block in enumerate(days):
        path = folder / f"part-{number:02d}.parquet"
        if path.exists():
            continue
        generator, rows = np.random.default_rng(number), len(block) * STOCKS
        values = generator.normal(size=(rows, features + 1)).astype(np.float32)
        frame = pd.DataFrame(values, columns=[*(f"f{i:02d}" for i in range(features)), "ret"])
        frame.insert(0, "stock", np.tile(stocks, len(block)))
        frame.insert(1, "date", np.repeat(block, STOCKS))
        frame.to_parquet(path, index=False, compression="zstd")
    return sum(path.stat().st_size for path in folder.iterdir())


class Peak:
    """Largest sum of resident memory of this process and its children, sampled."""

    def __enter__(self) -> Peak:
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        own = psutil.Process()
        while not self._stop.wait(0.05):
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.bytes = max(self.bytes, total)


def with_cluster(run: Callable[[Client, Path, Path], None], memory_limit: str = "auto") -> Callable[[Path, Path], float]:
    """Time a run on two workers of one thread; starting them does not count."""

    def timed(source: Path, output: Path) -> float:
        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, memory_limit=memory_limit, host="127.0.0.1", dashboard_address="127.0.0.1:0"
            ) as cluster,
            Client(cluster) as client,
        ):
            client.run(lambda: None)
            started = time.perf_counter()
            run(client, source, output)
            return time.perf_counter() - started

    return timed


def panelflow(exchange: str) -> Callable[[Client, Path, Path], None]:
    def run(client: Client, source: Path, output: Path) -> None:
        pf.prepare(
            source,
            output,
            entity="stock",
            date="date",
            features=["f*"],
            targets=["ret"],
            split=SPLIT,
            horizon=5,
            client=client,
            exchange=exchange,
            allow_empty=True,
            progress=False,
        )

    return run


def dask_p2p(client: Client, source: Path, output: Path) -> None:
    """Dask's own shuffle on the same key, each partition then written to Zarr, in its plainest form."""
    frame = dd.read_parquet(source).shuffle(["stock", "date"], shuffle_method="p2p")

    def write(part: pd.DataFrame, partition_info: dict[str, int] | None = None) -> pd.DataFrame:
        name = str((partition_info or {}).get("number"))
        group = zarr.open_group(output / name, mode="w")
        values = part.drop(columns=["stock", "date"]).to_numpy(np.float32)
        group.create_array("features", data=values, chunks=(8192, values.shape[1]), compressors=None)
        return part.iloc[:0]

    frame.map_partitions(write, meta=frame._meta).compute()


def polars_sort(source: Path, output: Path) -> float:
    import polars as pl

    started = time.perf_counter()
    lazy = pl.scan_parquet(source / "*.parquet")
    lazy.sort(pl.struct("stock", "date").hash(0)).sink_parquet(output)
    return time.perf_counter() - started


def duckdb_sort(source: Path, output: Path) -> float:
    import duckdb

    started = time.perf_counter()
    connection = duckdb.connect()
    connection.execute(f"SET threads = 2; SET memory_limit = '8GB'; SET temp_directory = '{output.parent}/duck'")
    order = f"SELECT * FROM '{source}/*.parquet' ORDER BY hash(stock || date::VARCHAR)"
    connection.execute(f"COPY ({order}) TO '{output}' (FORMAT parquet)")
    return time.perf_counter() - started


def floor(client: Client, source: Path, output: Path) -> None:
    """Decode all columns, write the bytes raw, read them, write them raw again: no external shuffle can do less."""
    output.mkdir()
    client.gather(client.map(floor_file, sorted(source.iterdir()), output=output))


def floor_file(path: Path, output: Path) -> None:
    table = pq.read_table(path, use_threads=False)
    raw = output / path.name
    buffers = [buffer for column in table.columns for buffer in column.combine_chunks().buffers() if buffer is not None]
    write_raw(raw, buffers)
    write_raw(output / f"{path.name}.again", [raw.read_bytes()])


def write_raw(path: Path, buffers: list[Any]) -> None:
    """Write in pieces of half a megabyte, which is the fastest here."""
    with path.open("wb", buffering=0) as file:
        for view in map(memoryview, buffers):
            for start in range(0, len(view), WRITE_BYTES):
                file.write(view[start : start + WRITE_BYTES])


RUNNERS: dict[str, Callable[[Path, Path], float]] = {
    "panelflow": with_cluster(panelflow("files")),
    "panelflow p2p": with_cluster(panelflow("p2p")),
    "dask p2p to zarr": with_cluster(dask_p2p),
    "polars sort": polars_sort,
    "duckdb order by": duckdb_sort,
    "floor": with_cluster(floor),
}


def measure(name: str, run: Callable[[Path, Path], float], source: Path, output: Path) -> tuple[float, int]:
    """Seconds and peak memory of one run, its output removed before."""
    shutil.rmtree(output, ignore_errors=True)
    output.unlink(missing_ok=True)
    with Peak() as peak:
        seconds = run(source, output)
    print(f"  {name}: {seconds:.1f} s", flush=True)
    return seconds, peak.bytes


def compare(options: argparse.Namespace) -> None:
    """All runners on one panel, in turns."""
    source = options.folder / f"panel-{options.dates}-{options.features}"
    size, rows = make_panel(source, options.dates, options.features), STOCKS * options.dates
    print(f"{rows:,} rows, {size / 1e9:.2f} GB in {FILES} files; {describe_machine()}")
    seconds: dict[str, list[float]] = {name: [] for name in options.only}
    peaks = dict.fromkeys(options.only, 0)
    for _ in range(options.repeats):
        for name in options.only:
            took, peak = measure(name, RUNNERS[name], source, options.folder / "output")
            seconds[name].append(took)
            peaks[name] = max(peaks[name], peak)
    own = statistics.median(seconds["panelflow"]) if "panelflow" in seconds else float("nan")
    print(f"{'':<20}{'seconds':>9}{'rows/s':>13}{'MB/s':>8}{'peak MB':>9}   panelflow's time / its time")
    for name, times in seconds.items():
        median = statistics.median(times)
        figures = f"{median:>9.1f}{rows / median:>13,.0f}{size / 1e6 / median:>8.0f}{peaks[name] / 1e6:>9.0f}"
        print(f"{name:<20}{figures}   {own / median:.2f}")


def grow(options: argparse.Namespace) -> None:
    """Time for each row of a quarter of the panel, the panel, and four times as much, the memory being the same."""
    run = with_cluster(panelflow("files"), options.memory_limit)
    sizes = [options.dates // 4, options.dates, options.dates * 4]
    sources = {dates: options.folder / f"panel-{dates}-{options.features}" for dates in sizes}
    for dates, source in sources.items():
        make_panel(source, dates, options.features)
    times: dict[int, list[float]] = {dates: [] for dates in sizes}
    peaks = dict.fromkeys(sizes, 0)
    for _ in range(options.repeats):
        for dates, source in sources.items():
            took, peak = measure(f"{STOCKS * dates:,} rows", run, source, options.folder / "output")
            times[dates].append(took)
            peaks[dates] = max(peaks[dates], peak)
    first = statistics.median(times[sizes[0]]) / sizes[0]
    print(f"two workers of {options.memory_limit}, {options.features} features; {describe_machine()}")
    print(f"{'rows':>12}{'seconds':>9}{'us/row':>8}{'peak MB':>9}   time of a row / that of the smallest")
    for dates in sizes:
        median = statistics.median(times[dates])
        figures = f"{STOCKS * dates:>12,}{median:>9.1f}{median / STOCKS / dates * 1e6:>8.2f}{peaks[dates] / 1e6:>9.0f}"
        print(f"{figures}   {median / dates / first:.2f}")


def describe_machine() -> str:
    """Processors and versions of what is compared."""
    names = ("dask", "pyarrow", "zarr", "polars", "duckdb")
    return f"{os.cpu_count()} cores; " + ", ".join(f"{name} {version(name)}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dates", type=int, default=2520)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(RUNNERS))
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--memory-limit", default="1GiB")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "panelflow-bench")
    options = parser.parse_args()
    os.environ["POLARS_MAX_THREADS"] = "2"
    (grow if options.growth else compare)(options)


if __name__ == "__main__":
    main()
