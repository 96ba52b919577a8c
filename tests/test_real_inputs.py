"""Directories as vendors and scrapers leave them."""

from __future__ import annotations

import gzip
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from panels import make_panel

import panelflow as pf

Prepare = Callable[..., pf.Dataset]
PANEL = make_panel()
TRAIN = pf.DateSplit(train=(None, "2016-01-01"))


def write_tickers(folder: Path, **changes: Any) -> Path:
    """One CSV file for each stock, without a column for it."""
    folder.mkdir()
    for stock, rows in PANEL.groupby("stock"):
        rows.drop(columns="stock").to_csv(folder / f"{stock}.csv", index=False, **changes)
    return folder


def same_content(left: pf.Dataset, right: pf.Dataset) -> bool:
    """Whether two datasets hold the same rows, though their key column has another name."""
    return all(
        left.manifest["content"][part] == right.manifest["content"][part] for part in ("shards", "statistics", "conservation")
    )


@pytest.fixture
def plain(prepare: Prepare, tmp_path: Path) -> pf.Dataset:
    return prepare(write_tickers(tmp_path / "plain"), entity="{entity}.csv", split=TRAIN)


def rewrite(path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], **options: Any) -> None:
    change(pd.read_csv(path)).to_csv(path, index=False, **options)


def test_flaws_of_single_files_change_nothing(prepare: Prepare, plain: pf.Dataset, tmp_path: Path) -> None:
    """CRLF, a byte order mark, gzip, columns in another order, columns more, and empty files, which are named."""
    folder = write_tickers(tmp_path / "flawed")
    rewrite(folder / "S001.csv", lambda frame: frame, lineterminator="\r\n")
    rewrite(folder / "S002.csv", lambda frame: frame, encoding="utf-8-sig")
    (folder / "S003.csv.gz").write_bytes(gzip.compress((folder / "S003.csv").read_bytes()))
    (folder / "S003.csv").unlink()
    rewrite(folder / "S004.csv", lambda frame: frame[frame.columns[::-1]])
    rewrite(folder / "S005.csv", lambda frame: frame.assign(comment="split, adjusted", adjusted=1.0))
    (folder / "T000.csv").write_bytes(b"")
    (folder / "T001.csv").write_text("date,f0,f1,f2,f3,ret,size\n")
    (folder / "T002.csv").write_text("date,f0,f1,f2,f3,ret,size\r\n\r\n")
    options: dict[str, Any] = {"entity": "{entity}.csv", "split": TRAIN}
    flawed = prepare(folder, **options)
    assert same_content(flawed, plain)
    empty = flawed.manifest["provenance"]["empty_files"]
    assert [Path(name).name for name in empty] == ["T000.csv", "T001.csv", "T002.csv"]
    with pytest.raises(pf.PanelError, match=r"3 of 26 files hold no rows.*T000\.csv"):
        prepare(folder, empty_files="error", **options)
    for path in folder.glob("S*"):
        path.unlink()
    with pytest.raises(pf.PanelError, match="3 of 3 files hold no rows"):
        prepare(folder, **options)


def test_blanks_in_integer_columns_and_large_volumes(prepare: Prepare, tmp_path: Path) -> None:
    """Where a blank appears a column of integers reads as floats, in that file alone; volumes pass 2**31."""
    volumes = np.arange(len(PANEL)) * 3 + 2**31
    frame = PANEL.assign(volume=volumes.astype(object))
    frame.loc[frame.index % 11 == 5, "volume"] = ""
    (tmp_path / "csv").mkdir()
    for stock, rows in frame.groupby("stock"):
        rows.to_csv(tmp_path / "csv" / f"{stock}.csv", index=False)
    ds = prepare(tmp_path / "csv", features=["volume"], split=TRAIN, dtype="float64")
    stored = ds["train"].to_pandas().sort_values(["stock", "date"])["volume"].to_numpy()
    expected = pd.to_numeric(frame.sort_values(["stock", "date"])["volume"], errors="coerce").to_numpy(dtype=np.float64)
    np.testing.assert_array_equal(stored, expected)
    assert np.isnan(stored).any()
    assert np.nanmax(stored) > 2**31


def write_nested(folder: Path, frame: pd.DataFrame) -> None:
    for (year, month), rows in frame.groupby([frame["date"].dt.year, frame["date"].dt.month]):
        place = folder / f"year={year}" / f"month={month:02d}"
        place.mkdir(parents=True)
        rows.to_parquet(place / "part.parquet", index=False)


def write_dictionaries(folder: Path, frame: pd.DataFrame) -> None:
    """Every file has a dictionary of its own, with entries that no row uses."""
    for number, rows in enumerate(np.array_split(np.arange(len(frame)), 5)):
        part = frame.iloc[rows]
        names = pd.Categorical(part["stock"], categories=["unused", *sorted(part["stock"].unique(), reverse=True)])
        part.assign(stock=names).to_parquet(folder / f"{number}.parquet", index=False)


def write_decimals(folder: Path, frame: pd.DataFrame) -> None:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    exact = [Decimal(repr(float(value))) for value in frame["f0"]]
    table = table.set_column(table.column_names.index("f0"), "f0", pa.array(exact, pa.decimal128(38, 20)))
    pq.write_table(table, folder / "panel.parquet")


KINDS: dict[str, Callable[[Path, pd.DataFrame], Any]] = {
    "a MultiIndex stored by pandas": lambda folder, frame: frame.set_index(["date", "stock"]).to_parquet(folder / "a.parquet"),
    "nested hive partitions": write_nested,
    "a dictionary per file": write_dictionaries,
    "float64": lambda folder, frame: frame.astype({"f0": "float64", "ret": "float64"}).to_parquet(folder / "a.parquet"),
    "decimals": write_decimals,
    "nullable types": lambda folder, frame: frame.astype({"f0": "Float32", "stock": "string"}).to_parquet(folder / "a.parquet"),
    "large strings": lambda folder, frame: pq.write_table(
        pa.Table.from_pandas(frame).set_column(0, "stock", pa.array(frame["stock"], pa.large_string())), folder / "a.parquet"
    ),
    "string views": lambda folder, frame: pq.write_table(
        pa.Table.from_pandas(frame).set_column(0, "stock", pa.array(frame["stock"], pa.string_view())), folder / "a.parquet"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_as_it_is_found(prepare: Prepare, unweighted: pf.Dataset, tmp_path: Path, kind: str) -> None:
    (tmp_path / "source").mkdir()
    KINDS[kind](tmp_path / "source", PANEL)
    assert prepare(tmp_path / "source").dataset_id == unweighted.dataset_id


def test_nullable_integers_and_booleans_with_blanks(prepare: Prepare, tmp_path: Path) -> None:
    frame = PANEL.assign(count=pd.array(np.arange(len(PANEL)), "Int64"), flag=pd.array(np.arange(len(PANEL)) % 2 == 0, "boolean"))
    frame.loc[::7, ["count", "flag"]] = pd.NA
    frame.to_parquet(tmp_path / "a.parquet", index=False)
    ds = prepare(tmp_path / "a.parquet", features=["count", "flag"], split=TRAIN)
    stored = ds["train"].to_pandas().sort_values(["stock", "date"])[["count", "flag"]].to_numpy()
    expected = frame.sort_values(["stock", "date"])[["count", "flag"]].to_numpy(dtype=np.float32, na_value=np.nan)
    np.testing.assert_array_equal(stored, expected)


def test_ten_thousand_small_files(prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many files share a task, and work starts within seconds."""
    folder, dates = tmp_path / "tickers", pd.bdate_range("2015-01-01", periods=12)
    folder.mkdir()
    lines = [f"{date:%Y-%m-%d},{i}.5,{-i}\n" for i, date in enumerate(dates)]
    for number in range(10_000):
        body = "" if number % 2_500 == 7 else "".join(lines[: 1 + number % len(lines)])
        (folder / f"T{number:05d}.csv").write_text("date,f0,ret\n" + body)
    started = time.monotonic()
    ds = prepare(folder, entity="{entity}.csv", split=TRAIN, horizon=1)
    provenance = ds.manifest["provenance"]
    before = time.monotonic() - started - provenance["seconds"]
    assert before < 60, "listing and headers; seconds on an idle machine, this bound is for a busy one"
    rows = sum(1 + number % 12 for number in range(10_000) if number % 2_500 != 7)
    assert ds.manifest["content"]["conservation"]["source_rows"] == rows
    assert len(provenance["empty_files"]) == 4
    assert provenance["units"] == 20
    assert len(ds.entity_names) == 9_996


def test_fifty_passes_leave_memory_descriptors_and_threads_flat(tmp_path: Path) -> None:
    """In a process of its own: the one of the tests has a cluster's threads, which come and go."""
    wide = pd.concat([PANEL] * 20)
    wide.to_parquet(tmp_path / "a.parquet", index=False, row_group_size=5_000)
    wide.to_csv(tmp_path / "a.csv", index=False)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        memory, descriptors, threads = zip(*pool.submit(watch_passes, tmp_path).result(), strict=True)
    assert len(set(descriptors)) == 1
    assert max(threads) - threads[0] <= pa.cpu_count() + pa.io_thread_count() < 40  # Arrow starts its pools' threads one by one
    assert memory[-1] - memory[0] < 16 * 2**20


def watch_passes(folder: Path) -> list[tuple[int, int, int]]:
    """Resident bytes, descriptors and threads after each pass but the first ten."""
    import psutil

    from panelflow.panel import Piece
    from panelflow.pieces import read_piece
    from panelflow.source import SourceFile, file_state, inspect_file

    process, seen = psutil.Process(), []
    for number in range(50):
        for kind, stop in (("parquet", 3), ("csv", (folder / "a.csv").stat().st_size)):
            file = SourceFile(str(folder / f"a.{kind}"), kind)
            inspect_file(file, {})
            file_state(file.path, {})
            assert read_piece(Piece(file, 0, stop, 0, 0), ["stock", "date"], ["f0", "ret"], {}).num_rows > 10_000
        if number >= 10:
            seen.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    return seen


def test_more_text_than_32_bits_of_offsets_in_chunks_is_read_by_distinct_value() -> None:
    """Chunks whose characters together pass 2**31 share a dictionary; nothing joins their text."""
    from panelflow.columns import to_entities

    names = pa.array([f"{'x' * 2**20}{i}" for i in range(3)])
    column = pa.chunked_array([names] * 700)
    assert sum(chunk.nbytes for chunk in column.chunks) > 2**31
    entities = to_entities("stock", column, str)
    assert len(entities.names) == 3
    assert entities.codes.tolist() == [0, 1, 2] * 700
