"""Prepare the reference panel, beside what a user would pick instead, in one run.

    python tests/benchmarks/prepare.py [--dates 2520] [--repeats 3] [--only NAME ...] [--folder DIR]

5,000 stocks on 2,520 dates, 32 float32 features and a target in 60 zstd Parquet files: 12.6 million rows, 1.6 GB. All runners
take turns, each on two processes or threads. Nothing here is asserted; the figures are for docs/benchmarks.md.
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
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet as pq
import zarr
from dask.distributed import Client, LocalCluster

import panelflow as pf

STOCKS, FILES, FEATURES = 5000, 60, 32
SPLIT = pf.DateSplit(train=(None, "2008-01-01"), test=("2008-01-01", None))


def make_panel(folder: Path, dates: int) -> None:
    """Write the reference panel, a run of dates in each file."""
    folder.mkdir(parents=True, exist_ok=True)
    days = np.array_split(pd.bdate_range("2000-01-03", periods=dates), FILES)
    stocks = np.array([f"S{i:04d}" for i in range(STOCKS)])
    for number, block in enumerate(days):
        path = folder / f"part-{number:02d}.parquet"
        if path.exists():
            continue
        generator, rows = np.random.default_rng(number), len(block) * STOCKS
        values = generator.normal(size=(rows, FEATURES + 1)).astype(np.float32)
        frame = pd.DataFrame(values, columns=[*(f"f{i:02d}" for i in range(FEATURES)), "ret"])
        frame.insert(0, "stock", np.tile(stocks, len(block)))
        frame.insert(1, "date", np.repeat(block, STOCKS))
        frame.to_parquet(path, index=False, compression="zstd")


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


def with_cluster(run: Callable[[Client, Path, Path], None]) -> Callable[[Path, Path], float]:
    """Time a run on two workers of one thread; starting them does not count."""

    def timed(source: Path, output: Path) -> float:
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
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
    with raw.open("wb") as file:
        for column in table.columns:
            for buffer in column.combine_chunks().buffers():
                if buffer is not None:
                    file.write(buffer)
    (output / f"{path.name}.again").write_bytes(raw.read_bytes())


RUNNERS: dict[str, Callable[[Path, Path], float]] = {
    "panelflow": with_cluster(panelflow("files")),
    "panelflow p2p": with_cluster(panelflow("p2p")),
    "dask p2p to zarr": with_cluster(dask_p2p),
    "polars sort": polars_sort,
    "duckdb order by": duckdb_sort,
    "floor": with_cluster(floor),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dates", type=int, default=2520)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(RUNNERS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "panelflow-bench")
    options = parser.parse_args()
    os.environ["POLARS_MAX_THREADS"] = "2"

    source = options.folder / f"panel-{options.dates}"
    make_panel(source, options.dates)
    rows, size = STOCKS * options.dates, sum(path.stat().st_size for path in source.iterdir())
    print(f"{rows:,} rows, {size / 1e9:.2f} GB in {FILES} files")
    seconds: dict[str, list[float]] = {name: [] for name in options.only}
    peaks = dict.fromkeys(options.only, 0)
    for _ in range(options.repeats):
        for name in options.only:
            output = options.folder / "output"
            shutil.rmtree(output, ignore_errors=True)
            output.unlink(missing_ok=True)
            with Peak() as peak:
                seconds[name].append(RUNNERS[name](source, output))
            peaks[name] = max(peaks[name], peak.bytes)
            print(f"  {name}: {seconds[name][-1]:.1f} s", flush=True)
    own = statistics.median(seconds["panelflow"]) if "panelflow" in seconds else float("nan")
    print(f"{'':<20}{'seconds':>9}{'rows/s':>13}{'MB/s':>8}{'peak MB':>9}   panelflow's time / its time")
    for name, times in seconds.items():
        median = statistics.median(times)
        figures = f"{median:>9.1f}{rows / median:>13,.0f}{size / 1e6 / median:>8.0f}{peaks[name] / 1e6:>9.0f}"
        print(f"{name:<20}{figures}   {own / median:.2f}")


if __name__ == "__main__":
    main()
