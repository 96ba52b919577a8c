"""The promises of ``prepare``, on a real cluster and real files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from panels import OPTIONS, SPLIT, expected_split, key_hashes, make_panel

import panelflow as pf

Prepare = Callable[..., pf.Dataset]
PANEL = make_panel()


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test panel as one file."""
    path = tmp_path_factory.mktemp("source") / "panel.parquet"
    PANEL.to_parquet(path, index=False, row_group_size=300)
    return path


def files_of(dataset: pf.Dataset) -> dict[str, bytes]:
    """Every file of a dataset but its root document."""
    root = Path(dataset.folder.path())
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    del files["zarr.json"]
    return files


def assert_same(left: pf.Dataset, right: pf.Dataset) -> None:
    """Same bytes: every file, and the manifest but its provenance."""
    assert left.dataset_id == right.dataset_id
    assert left.manifest["storage"] == right.manifest["storage"]
    assert files_of(left) == files_of(right)


# Contracts 1, 3, 4: what is in a dataset ----------------------------------------------------------------------------------


def test_rows_order_and_account_equal_one_sort_in_pandas(dataset: pf.Dataset) -> None:
    dates = pd.DatetimeIndex(sorted(PANEL["date"].unique()))
    ends = [dates.searchsorted(pd.Timestamp(day)) for day in ("2015-03-01", "2015-05-01")]
    kept = {"train": dates[: ends[0] - 3], "validation": dates[ends[0] : ends[1] - 3], "test": dates[ends[1] :]}
    for name, days in kept.items():
        expected = expected_split(PANEL, days, "hash" if name == "train" else "date")
        found = dataset[name].to_pandas()
        pd.testing.assert_frame_equal(found, expected[found.columns], check_dtype=False)
        assert found["f0"].dtype == np.float32
    account = dataset.manifest["content"]["conservation"]
    written = sum(len(days) for days in kept.values()) * 23
    assert account["rows"] == {
        "written": written,
        "outside_splits": 0,
        "purged": 6 * 23,
        "missing_target": 0,
        "duplicate": 0,
    }
    assert account["source_rows"] == len(PANEL)


def test_training_rows_ascend_by_hash_and_evaluation_by_date(dataset: pf.Dataset) -> None:
    assert (np.diff(key_hashes(dataset["train"].to_pandas()).astype(object)) > 0).all()
    for name in ("validation", "test"):
        assert dataset[name].to_pandas()["date"].is_monotonic_increasing


def test_every_shard_but_the_last_is_full(dataset: pf.Dataset) -> None:
    for name, shards in dataset.manifest["content"]["shards"].items():
        rows = [shard["rows"] for shard in shards]
        assert len(rows) > 1
        assert set(rows[:-1]) == {dataset.manifest["content"]["layout"]["shard_rows"]}
        assert sum(rows) == dataset[name].num_rows


def test_training_shards_are_random_cross_sections(prepare: Prepare) -> None:
    panel = make_panel(num_stocks=200, num_dates=100)
    split = pf.DateSplit(train=(None, None))
    train = prepare(panel, split=split, chunk_rows=512, shard_bytes=512 * 32 * 4)["train"].to_pandas()
    for start in range(0, len(train) - 2000, 2000):
        run = train.iloc[start : start + 2000]
        assert run["stock"].nunique() == 200
        assert run["date"].nunique() == 100
        counts = run["stock"].value_counts().to_numpy()
        chi_square = float(((counts - 10.0) ** 2 / 10.0).sum())
        assert 130 < chi_square < 280  # 199 degrees of freedom: four standard deviations


def test_statistics_are_of_the_purged_training_rows(dataset: pf.Dataset) -> None:
    train = dataset["train"].to_pandas()[dataset.features].astype(np.float64)
    for name, row in dataset.statistics.iterrows():
        assert row["count"] == len(train)
        assert row["mean"] == pytest.approx(train[name].mean(), rel=1e-12, abs=1e-15)
        assert row["std"] == pytest.approx(train[name].std(ddof=0), rel=1e-12)


def test_row_order_can_be_overridden(prepare: Prepare) -> None:
    ds = prepare(PANEL, row_order={"train": "date", "test": "hash"})
    assert ds["train"].to_pandas()["date"].is_monotonic_increasing
    assert (np.diff(key_hashes(ds["test"].to_pandas()).astype(object)) > 0).all()
    assert ds["validation"].row_order == "date"
    with pytest.raises(pf.OptionError, match="'holdout'"):
        prepare(PANEL, row_order={"holdout": "date"})


# Contract 2: one panel, one seed, one dataset -----------------------------------------------------------------------------


def write_sixty_files(folder: Path) -> Path:
    folder.mkdir()
    shuffled = PANEL.sample(frac=1, random_state=1)
    for number, rows in enumerate(np.array_split(np.arange(len(PANEL)), 60)):
        shuffled.iloc[rows].to_parquet(folder / f"part-{number:02d}.parquet", index=False, row_group_size=17)
    return folder


SOURCES: dict[str, Callable[[Path], Any]] = {
    "sixty files, shuffled": lambda tmp: write_sixty_files(tmp / "sixty"),
    "pandas": lambda tmp: PANEL,
    "pandas, reversed": lambda tmp: PANEL.iloc[::-1],
    "pandas, keys in the index": lambda tmp: PANEL.set_index(["date", "stock"]),
    "dask, one partition": lambda tmp: dd.from_pandas(PANEL, npartitions=1),
    "dask, seven partitions": lambda tmp: dd.from_pandas(PANEL.iloc[::-1], npartitions=7, sort=False),
    "dask, index is the date": lambda tmp: dd.from_pandas(PANEL.set_index("date"), npartitions=5),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_same_bytes_from_any_source(prepare: Prepare, unweighted: pf.Dataset, tmp_path: Path, kind: str) -> None:
    assert_same(prepare(SOURCES[kind](tmp_path)), unweighted)


def test_same_bytes_from_csv_of_any_cut(
    prepare: Prepare, unweighted: pf.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csv").mkdir()
    for stock, rows in PANEL.groupby("stock"):
        rows.to_csv(tmp_path / "csv" / f"{stock}.csv", index=False)
    assert_same(prepare(tmp_path / "csv"), unweighted)
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 5000)  # cuts every file in several byte ranges
    assert_same(prepare(str(tmp_path / "csv" / "*.csv")), unweighted)


def test_same_bytes_from_p2p(prepare: Prepare, dataset: pf.Dataset, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 20_000)
    assert_same(prepare(PANEL, exchange="p2p", weight="size"), dataset)


def test_same_bytes_in_two_passes(
    prepare: Prepare, unweighted: pf.Dataset, parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many units and shards, so that scatter's files are sorted once more by group before shards are gathered."""
    groups = []

    def make_groups(*arguments: Any) -> Any:
        groups.append(make_groups_of_plan(*arguments))
        return groups[-1]

    from panelflow.plan import make_groups as make_groups_of_plan

    monkeypatch.setattr("panelflow.shuffle.make_groups", make_groups)
    monkeypatch.setattr("panelflow.plan.FEW_SEGMENTS", 10)
    monkeypatch.setattr("panelflow.plan.SEGMENT_BYTES", 500)
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 5_000)
    assert_same(prepare(parquet), unweighted)
    assert len(groups[0]) > 4
    repeated = pd.concat([PANEL, PANEL.iloc[:50]])
    kept = prepare(repeated, duplicates="first")
    assert kept.manifest["content"]["conservation"]["rows"]["duplicate"] > 0
    assert kept.manifest["content"]["shards"] == unweighted.manifest["content"]["shards"]


@pytest.mark.parametrize("memory_limit", ["330MiB", "0"])
def test_same_bytes_within_any_memory(unweighted: pf.Dataset, parquet: Path, tmp_path: Path, memory_limit: str) -> None:
    """The least memory that is accepted, and no limit: other units, and row groups that are streamed or not."""
    ds = pf.prepare(parquet, tmp_path / "out.zarr", workers=1, memory_limit=memory_limit, **OPTIONS)
    assert_same(ds, unweighted)


@pytest.mark.parametrize("workers", [1, 4])
def test_same_bytes_from_any_cluster(unweighted: pf.Dataset, parquet: Path, tmp_path: Path, workers: int) -> None:
    options = {**OPTIONS, "workers": workers, "memory_limit": "1GiB" if workers == 4 else "2GiB"}
    assert_same(pf.prepare(parquet, tmp_path / "out.zarr", **options), unweighted)


def test_same_bytes_in_another_process_with_another_hash_seed(unweighted: pf.Dataset, parquet: Path, tmp_path: Path) -> None:
    code = f"""
import panelflow as pf
from panels import OPTIONS
if __name__ == "__main__":
    pf.prepare({str(parquet)!r}, {str(tmp_path / "out.zarr")!r}, workers=1, **OPTIONS)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    env = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, str(script)], check=True, env=env)
    assert_same(pf.open(tmp_path / "out.zarr"), unweighted)


def test_fewer_features_keep_the_rows(prepare: Prepare, unweighted: pf.Dataset) -> None:
    narrow = prepare(PANEL, features=["f2"], shard_bytes=64 * 4 * 32)
    for name in narrow:
        keys = ["stock", "date", "f2", "ret"]
        pd.testing.assert_frame_equal(narrow[name].to_pandas()[keys], unweighted[name].to_pandas()[keys])


def test_seed_and_options_that_mean_something_change_the_id(prepare: Prepare, unweighted: pf.Dataset) -> None:
    for changes in ({"seed": 1}, {"horizon": 4}, {"features": ["f0"]}, {"chunk_rows": 32}, {"dtype": "float64"}):
        assert prepare(PANEL, **changes).dataset_id != unweighted.dataset_id


@pytest.mark.parametrize("compression", ["zstd"])
def test_compression_changes_files_and_not_values(prepare: Prepare, unweighted: pf.Dataset, compression: str) -> None:
    packed = prepare(PANEL, compression=compression)
    assert packed.dataset_id == unweighted.dataset_id
    assert pf.verify(packed) == pf.verify(unweighted)
    pd.testing.assert_frame_equal(packed["train"].to_pandas(), unweighted["train"].to_pandas())


# Keys -----------------------------------------------------------------------------------------------------------------------

DATE_KINDS: dict[str, Callable[[pd.Series], Any]] = {
    "s": lambda d: pa.array(d).cast(pa.timestamp("s")),
    "ms": lambda d: pa.array(d).cast(pa.timestamp("ms")),
    "us": lambda d: pa.array(d).cast(pa.timestamp("us")),
    "ns": lambda d: pa.array(d).cast(pa.timestamp("ns")),
    "date32": lambda d: pa.array(d).cast(pa.timestamp("ns")).cast(pa.date32()),
    "date64": lambda d: pa.array(d).cast(pa.timestamp("ns")).cast(pa.date64()),
    "ISO text": lambda d: pa.array(d.dt.strftime("%Y-%m-%d").tolist()),
    "ISO text with time": lambda d: pa.array(d.dt.strftime("%Y-%m-%dT%H:%M:%S").tolist()),
    "yyyymmdd text": lambda d: pa.array(d.dt.strftime("%Y%m%d").tolist()),
    "yyyymmdd integers": lambda d: pa.array(d.dt.strftime("%Y%m%d").astype(int).tolist(), pa.int32()),
    "categories": lambda d: pa.array(d.dt.strftime("%Y-%m-%d").tolist()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", DATE_KINDS)
def test_same_bytes_from_any_kind_of_date(prepare: Prepare, unweighted: pf.Dataset, tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_pandas(PANEL, preserve_index=False)
    index = table.column_names.index("date")
    pq.write_table(table.set_column(index, "date", DATE_KINDS[kind](PANEL["date"])), tmp_path / "panel.parquet")
    assert_same(prepare(tmp_path / "panel.parquet"), unweighted)


def test_same_bytes_from_categories_that_differ_per_file(prepare: Prepare, unweighted: pf.Dataset, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(PANEL)), 5)):
        part = PANEL.iloc[rows].astype({"stock": "category"})
        part["stock"] = part["stock"].cat.add_categories(["never seen"])
        part.to_parquet(tmp_path / "in" / f"{number}.parquet", index=False)
    ds = prepare(tmp_path / "in")
    assert_same(ds, unweighted)
    assert "never seen" not in ds.entity_names


def test_odd_tickers_are_text(prepare: Prepare, tmp_path: Path) -> None:
    tickers = ["NA", "nan", "null", "true", "inf", "1e5", "007", "BRK.B", "ALL"]
    panel = PANEL[PANEL["stock"].isin([f"S{i:03d}" for i in range(9)])].copy()
    panel["stock"] = panel["stock"].map(dict(zip(sorted(panel["stock"].unique()), tickers, strict=True)))
    panel.to_csv(tmp_path / "panel.csv", index=False)
    ds = prepare(tmp_path / "panel.csv")
    assert ds.entity_names.tolist() == sorted(tickers)
    assert ds["train"].to_pandas()["stock"].value_counts().nunique() == 1


def test_integer_entities_stay_integers(prepare: Prepare, tmp_path: Path) -> None:
    panel = PANEL.assign(stock=2**60 + PANEL["stock"].str[1:].astype("int64"))
    ds = prepare(panel)
    assert ds.entity_names.dtype == np.int64
    assert ds.entity_names.tolist() == [2**60 + i for i in range(23)]
    assert ds["train"].to_pandas()["stock"].nunique() == 23


def test_more_entities_than_sixteen_bits(prepare: Prepare) -> None:
    names = [f"T{i}" for i in range(70_000)]
    panel = pd.DataFrame({"stock": names, "date": pd.Timestamp("2015-01-05"), "f0": np.arange(70_000.0), "ret": 0.0})
    ds = prepare(panel, split=pf.DateSplit(train=(None, None)), chunk_rows=1024, shard_bytes="1MiB")
    rows = ds["train"].to_pandas()
    assert (rows["stock"] == "T" + rows["f0"].astype(int).astype(str)).all()
    assert rows["stock"].nunique() == 70_000


def test_minute_bars_with_a_zone(prepare: Prepare) -> None:
    stamps = pd.date_range("2020-03-06 09:30", periods=400, freq="min", tz="America/New_York").append(
        pd.date_range("2020-03-09 09:30", periods=400, freq="min", tz="America/New_York")
    )
    panel = pd.DataFrame({"stock": "A", "date": stamps, "f0": np.arange(800.0), "ret": 1.0})
    split = pf.DateSplit(train=(None, "2020-03-09T10:00"), test=("2020-03-09T10:00", None))
    ds = prepare(panel, split=split, horizon=10)
    assert (ds["train"].num_rows, ds["test"].num_rows) == (420, 370)
    dates = ds["test"].to_pandas()["date"]
    assert str(dates.dt.tz) == "America/New_York"
    assert dates.iloc[0] == pd.Timestamp("2020-03-09 10:00", tz="America/New_York")
    text = panel.assign(date=[stamp.isoformat() for stamp in stamps])
    assert prepare(text, split=pf.DateSplit(train=(None, "2020-03-09T14:00Z")), horizon=10)["train"].num_rows == 430


def test_a_file_name_template_and_hive_paths(prepare: Prepare, unweighted: pf.Dataset, tmp_path: Path) -> None:
    for stock, rows in PANEL.groupby("stock"):
        folder = tmp_path / "hive" / f"stock={stock}"
        folder.mkdir(parents=True)
        rows.drop(columns="stock").to_parquet(folder / "0.parquet", index=False)
        (tmp_path / "names").mkdir(exist_ok=True)
        rows.drop(columns="stock").to_csv(tmp_path / "names" / f"{stock}.us.txt", index=False)
    assert_same(prepare(tmp_path / "hive"), unweighted)
    named = prepare(tmp_path / "names", entity="{entity}.us.txt")
    assert named.entity_names.tolist() == unweighted.entity_names.tolist()
    np.testing.assert_array_equal(named["train"].features[:], unweighted["train"].features[:])


# Values ---------------------------------------------------------------------------------------------------------------------


def test_an_all_null_column_in_one_file_changes_nothing(prepare: Prepare, tmp_path: Path) -> None:
    gaps = PANEL.copy()
    gaps.loc[:499, "f1"] = np.nan
    nulls = gaps.assign(f1=gaps["f1"].astype(object).where(gaps["f1"].notna(), None))
    for kind, parts in {"typed": gaps, "null": nulls}.items():
        (tmp_path / kind).mkdir()
        for number, rows in enumerate((slice(0, 500), slice(500, None))):
            part = parts.iloc[rows]
            if kind == "null" and number:
                part = part.astype({"f1": np.float32})
            part.to_parquet(tmp_path / kind / f"{number}.parquet", index=False)
    assert pq.read_schema(tmp_path / "null" / "0.parquet").field("f1").type == pa.null()
    typed, null = prepare(tmp_path / "typed"), prepare(tmp_path / "null")
    assert_same(typed, null)
    assert typed.statistics.loc["f1", "missing"] > 0


def test_integers_booleans_and_decimals_are_converted(prepare: Prepare, tmp_path: Path) -> None:
    panel = PANEL.assign(f0=np.arange(len(PANEL)) % 100, f1=PANEL["f1"] > 0, f2=(PANEL["f2"] * 100).round() / 100 + 0.0)
    table = pa.Table.from_pandas(panel, preserve_index=False)
    decimal = pa.array(panel["f2"].astype(str).tolist()).cast(pa.decimal128(9, 2))
    pq.write_table(table.set_column(table.column_names.index("f2"), "f2", decimal), tmp_path / "panel.parquet")
    panel.to_csv(tmp_path / "panel.csv", index=False)
    first = prepare(tmp_path / "panel.parquet")
    assert_same(first, prepare(tmp_path / "panel.csv"))
    rows = first["train"].to_pandas()
    assert set(rows["f1"].unique()) == {0.0, 1.0}
    assert rows["f0"].max() == 99


def test_missing_targets(prepare: Prepare) -> None:
    gaps = PANEL.copy()
    gaps.loc[::10, "ret"] = np.nan
    dropped = prepare(gaps)
    account = dropped.manifest["content"]["conservation"]["rows"]
    in_splits = gaps["date"].isin(pd.concat([prepare(PANEL)[n].to_pandas()["date"] for n in SPLIT]).unique())
    assert account["missing_target"] == (gaps["ret"].isna() & in_splits).sum() > 0
    kept = prepare(gaps, missing_target="keep")
    assert kept["train"].num_rows == dropped["train"].num_rows
    assert kept["test"].num_rows == (gaps["date"] >= "2015-05-01").sum()
    assert np.isnan(kept["test"].targets[:]).any()
    with pytest.raises(pf.PanelError, match=r"row \d+: target 'ret' is missing.* \d+ rows"):
        prepare(gaps, missing_target="error")


def test_infinite_features_can_be_made_missing(prepare: Prepare) -> None:
    bad = PANEL.copy()
    bad.loc[[5, 7], "f2"] = np.inf
    ds = prepare(bad, infinite="missing")
    assert ds.manifest["content"]["infinite_made_missing"] == {"f2": 2}
    assert ds.statistics.loc["f2", "missing"] == 2


def test_duplicates(prepare: Prepare, tmp_path: Path) -> None:
    again = PANEL.iloc[[3, 3, 500]].copy()
    again["f0"] = [101.0, 102.0, 103.0]
    both = pd.concat([PANEL, again], ignore_index=True)
    with pytest.raises(pf.DuplicateKeysError, match=r"3 rows repeat.*'S000', 2015-01-06 00:00:00: 3 rows"):
        prepare(both)
    assert not (tmp_path / "out0.zarr").exists()
    first, last = prepare(both, duplicates="first"), prepare(both, duplicates="last")
    assert first.manifest["content"]["conservation"]["rows"]["duplicate"] == 3
    pd.testing.assert_frame_equal(first["train"].to_pandas(), prepare(PANEL)["train"].to_pandas())
    assert {102.0, 103.0} <= set(last["train"].to_pandas()["f0"])
    for exchange in ("files", "p2p"):
        (tmp_path / exchange).mkdir()
        PANEL.to_parquet(tmp_path / exchange / "b.parquet", index=False)
        again.to_parquet(tmp_path / exchange / "a.parquet", index=False)
        ds = prepare(tmp_path / exchange, duplicates="first", exchange=exchange)  # a.parquet comes first
        assert {101.0, 103.0} <= set(ds["train"].to_pandas()["f0"])


def test_weights_are_stored(dataset: pf.Dataset) -> None:
    train = dataset["train"].to_pandas()
    assert dataset["train"].weight is not None
    merged = train.merge(PANEL, on=["stock", "date"], suffixes=("", "_source"))
    np.testing.assert_array_equal(merged["size"], merged["size_source"])


# Bad input: refused before anything is written, by file, column and value -------------------------------------------------


def with_value(column: str, value: Any, row: int = 30) -> pd.DataFrame:
    panel = PANEL.copy()
    if not (isinstance(value, float) and panel[column].dtype.kind == "f"):
        panel[column] = panel[column].astype(object)
    panel.loc[row, column] = value
    return panel


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "missing column": (PANEL, {"entity": "ticker"}, pf.PanelError, r"data frame.*'ticker' is missing"),
    "pattern without match": (PANEL, {"features": ["g*"]}, pf.OptionError, r"'g\*'"),
    "target as feature": (PANEL, {"features": ["f*", "ret"]}, pf.OptionError, r"leak.*'ret'"),
    "key as feature": (PANEL, {"features": ["stock"]}, pf.OptionError, r"'stock'"),
    "text feature": (PANEL, {"features": ["f0", "stock"], "entity": "f1"}, pf.PanelError, r"'stock' has type"),
    "mixed objects": (with_value("f0", "abc"), {}, pf.PanelError, r"row 30: column 'f0' mixes types.*'abc'"),
    "missing entity": (with_value("stock", None), {}, pf.PanelError, r"row 30: entity column 'stock' has 1 missing"),
    "empty entity": (with_value("stock", ""), {}, pf.PanelError, r"row 30: entity column 'stock' has 1 missing"),
    "missing date": (with_value("date", pd.NaT), {}, pf.PanelError, r"row 30: date column 'date' has 1 missing"),
    "float entity": (PANEL.assign(stock=1.5), {}, pf.PanelError, r"entity column 'stock' has type double.*1.5"),
    "bad date": (
        PANEL.assign(date=PANEL["date"].dt.strftime("%d/%m/%Y")),
        {},
        pf.PanelError,
        r"row 0: date column 'date'.*'01/01/2015'",
    ),
    "impossible date": (
        PANEL.assign(date=20150230),
        {},
        pf.PanelError,
        r"row 0: date column 'date'.*'20150230'",
    ),
    "epoch integers": (PANEL.assign(date=1577836800), {}, pf.PanelError, r"yyyymmdd integers.*1577836800"),
    "date out of range": (
        PANEL.assign(date=np.array(["1500-01-01"], "M8[s]").repeat(len(PANEL))),
        {},
        pf.PanelError,
        r"row 0: date column 'date' has a date outside.*1500-01-01",
    ),
    "mixed zones": (
        PANEL.assign(date=["2015-01-01T00:00Z", *["2015-01-02T00:00"] * (len(PANEL) - 1)]),
        {},
        pf.PanelError,
        r"mixes times with and without a zone.*Z",
    ),
    "infinite feature": (
        with_value("f3", np.inf),
        {},
        pf.PanelError,
        r"row 30: column 'f3' is infinite.*infinite='missing'.*inf",
    ),
    "infinite target": (with_value("ret", -np.inf), {"infinite": "missing"}, pf.PanelError, r"row 30: column 'ret' is infinite"),
    "negative weight": (with_value("size", -1.0), {"weight": "size"}, pf.PanelError, r"row 30: weight 'size'.*-1.0"),
    "missing weight": (with_value("size", np.nan), {"weight": "size"}, pf.PanelError, r"row 30: weight 'size'"),
    "infinite weight": (with_value("size", np.inf), {"weight": "size"}, pf.PanelError, r"row 30: column 'size' is infinite"),
    "float16 overflow": (with_value("f1", 70_000.0), {"dtype": "float16"}, pf.PanelError, r"row 30: column 'f1'.*float16.*70000"),
    "empty split": (
        PANEL,
        {"split": pf.DateSplit(train=(None, "2030-01-01"), test=("2030-01-01", None))},
        pf.PanelError,
        r"'test' has no rows.*2015-01-01 00:00:00 to 2015-06-17.*allow_empty",
    ),
    "no features": (PANEL, {"features": []}, pf.OptionError, r"features=\[\]"),
    "no targets": (PANEL, {"targets": []}, pf.OptionError, r"targets=\[\]"),
    "target as weight": (PANEL, {"weight": "ret"}, pf.OptionError, "'ret'"),
    "another kind of table": (pa.table({"a": [1]}), {}, pf.OptionError, "not Table"),
    "sparse column": (PANEL.assign(f0=pd.arrays.SparseArray(PANEL["f0"])), {}, pf.PanelError, "'f0' is sparse"),
    "dask series": (dd.from_pandas(PANEL["f0"], npartitions=2), {}, pf.OptionError, "not Series"),
    "chunk of a fraction": (PANEL, {"chunk_rows": 64.0}, pf.OptionError, "chunk_rows=64.0"),
    "columns by number": (PANEL, {"features": [1]}, pf.OptionError, "features=1"),
    "no size": (PANEL, {"shard_bytes": None}, pf.OptionError, "shard_bytes=None"),
    "memory of nothing": (PANEL, {"memory_limit": "lots"}, pf.OptionError, "memory_limit='lots'"),
    "no rows": (PANEL.iloc[:0], {}, pf.PanelError, "no rows"),
    "negative horizon": (PANEL, {"horizon": -1}, pf.OptionError, "horizon=-1"),
    "unknown rule": (PANEL, {"duplicates": "drop"}, pf.OptionError, "duplicates='drop'"),
    "chunk not a power of two": (PANEL, {"chunk_rows": 100}, pf.OptionError, "chunk_rows=100"),
    "shard below a chunk": (PANEL, {"shard_bytes": 100}, pf.OptionError, "shard_bytes=100"),
    "unreadable size": (PANEL, {"shard_bytes": "lots"}, pf.OptionError, "shard_bytes='lots'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_leaves_nothing(prepare: Prepare, tmp_path: Path, case: str) -> None:
    source, changes, error, text = BAD[case]
    with pytest.raises(error, match=text):
        prepare(source, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["infinite feature", "negative weight", "mixed objects"])
def test_bad_input_is_refused_by_p2p_too(prepare: Prepare, tmp_path: Path, case: str) -> None:
    source, changes, error, text = BAD[case]
    with pytest.raises(error, match=text):
        prepare(source, exchange="p2p", **changes)
    assert list(tmp_path.iterdir()) == []


CSV_BAD = {
    "unparseable date": ("date", "2015-13-01", r"panel.csv, line 32: date column 'date'.*'2015-13-01'"),
    "empty key": ("stock", "", r"panel.csv, line 32: entity column 'stock' has 1 missing"),
    "text for a number": ("f2", "n.a.", r"panel.csv, line 32: column 'f2' is not numeric.*'n.a.'"),
    "infinite": ("f2", "inf", r"panel.csv, line 32: column 'f2' is infinite"),
}


@pytest.mark.parametrize("case", CSV_BAD)
@pytest.mark.parametrize("unit_bytes", [None, 900])
def test_csv_errors_name_the_line(
    prepare: Prepare, tmp_path: Path, case: str, unit_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, value, text = CSV_BAD[case]
    with_value(column, value).to_csv(tmp_path / "panel.csv", index=False)
    if unit_bytes is not None:
        monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: unit_bytes)
    with pytest.raises(pf.PanelError, match=text):
        prepare(tmp_path / "panel.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["panel.csv"]


def test_files_that_disagree_are_refused(prepare: Prepare, tmp_path: Path) -> None:
    def write(name: str, second: pd.DataFrame) -> Path:
        (tmp_path / name).mkdir()
        PANEL.to_parquet(tmp_path / name / "a.parquet", index=False)
        second.to_parquet(tmp_path / name / "b.parquet", index=False)
        return tmp_path / name

    with pytest.raises(pf.PanelError, match=r"b.parquet: column 'f3' is missing"):
        prepare(write("narrow", PANEL.drop(columns="f3")))
    with pytest.raises(pf.PanelError, match=r"text in .*a.parquet and an integer in .*b.parquet"):
        prepare(write("kinds", PANEL.assign(stock=1)))
    with pytest.raises(pf.PanelError, match=r"no time zone in .*a.parquet and time zone UTC in .*b.parquet"):
        prepare(write("zones", PANEL.assign(date=PANEL["date"].dt.tz_localize("UTC"))))
    (tmp_path / "narrow" / "c.csv").write_text("stock,date\n")
    with pytest.raises(pf.PanelError, match="mixes Parquet and CSV"):
        prepare(tmp_path / "narrow")
    with pytest.raises(pf.PanelError, match="nowhere"):
        prepare(tmp_path / "nowhere")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(pf.PanelError, match=r"torn.parquet cannot be read as parquet"):
        prepare(tmp_path / "torn.parquet")


def test_too_little_memory_is_refused_with_the_numbers(parquet: Path, tmp_path: Path) -> None:
    with pytest.raises(pf.MemoryBudgetError, match=r"needs [\d,]+ MiB .* has 300 MiB.*shard_bytes.*memory_limit=314572800"):
        pf.prepare(parquet, tmp_path / "out.zarr", **{**OPTIONS, "shard_bytes": "1GiB"}, workers=1, memory_limit="300MiB")
    assert list(tmp_path.iterdir()) == []


# Contract 10: a dataset exists or it does not -----------------------------------------------------------------------------


def test_an_output_is_replaced_only_when_asked_and_only_by_a_whole_one(prepare: Prepare, tmp_path: Path) -> None:
    output = tmp_path / "out.zarr"
    first = prepare(PANEL, output=output)
    with pytest.raises(pf.DatasetExistsError, match="overwrite"):
        prepare(PANEL, output=output, seed=1)
    with pytest.raises(pf.PanelError):
        prepare(with_value("f3", np.inf), output=output, overwrite=True)
    assert pf.open(output).dataset_id == first.dataset_id
    second = prepare(PANEL, output=output, seed=1, overwrite=True)
    assert pf.open(output).dataset_id == second.dataset_id != first.dataset_id
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(pf.DatasetExistsError, match="no panelflow dataset"):
        prepare(PANEL, output=tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_storage_that_cannot_rename(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/out.zarr"
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        ds = pf.prepare(PANEL, url, client=client, **OPTIONS)
        assert pf.verify(pf.open(url)) > 10
        assert ds["train"].to_pandas().shape == (ds["train"].num_rows, 7)
        with pytest.raises(pf.DatasetExistsError, match="new URL"):
            pf.prepare(PANEL, url, client=client, overwrite=True, **OPTIONS)
        with pytest.raises(pf.DatasetNotFoundError):
            pf.open(url + "2")


def test_a_killed_run_continues_and_ends_with_the_same_bytes(
    prepare: Prepare, unweighted: pf.Dataset, parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.zarr"
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 20_000)
    for phase in ("panelflow.shuffle.count_rows", "panelflow.shuffle.write_metadata", "panelflow.shuffle.write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(phase, stop_here)
            with pytest.raises(KeyboardInterrupt):
                prepare(parquet, output=output)
        with pytest.raises(pf.DatasetNotFoundError):
            pf.open(output)
    shard = next((tmp_path / ".out.zarr.partial").glob("*/dataset/train/features/c/0/0"))
    shard.write_bytes(shard.read_bytes()[:100])  # torn by a crash: to be written again
    done = prepare(parquet, output=output)
    assert_same(done, unweighted)
    provenance = done.manifest["provenance"]
    assert provenance["reused_units"] == provenance["units"] > 3
    assert provenance["reused_shards"] == sum(map(len, done.manifest["content"]["shards"].values())) - 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]


def test_a_run_goes_on_with_another_number_of_workers(parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as interrupted:
        interrupted.setattr("panelflow.shuffle.gather_shards", stop_here)
        with pytest.raises(KeyboardInterrupt):
            pf.prepare(parquet, tmp_path / "out.zarr", workers=2, **OPTIONS)
    provenance = pf.prepare(parquet, tmp_path / "out.zarr", workers=1, **OPTIONS).manifest["provenance"]
    assert provenance["reused_units"] == provenance["units"]


def test_every_bit_of_a_nan_arrives_from_frames_too(prepare: Prepare, tmp_path: Path) -> None:
    panel = PANEL.copy()
    bits = np.where(np.arange(len(panel)) % 2, 0x7FC12345, 0xFFC00000).astype(np.uint32)
    panel["f0"] = bits.view(np.float32)
    table = pa.Table.from_pandas(panel, preserve_index=False)
    table = table.set_column(table.column_names.index("f0"), "f0", pa.array(panel["f0"].to_numpy(), from_pandas=False))
    pq.write_table(table, tmp_path / "panel.parquet")
    from_frame = prepare(panel)
    assert_same(from_frame, prepare(tmp_path / "panel.parquet", output=tmp_path / "file.zarr"))
    found = from_frame["train"].features[:, from_frame.features.index("f0")].view(np.uint32)
    assert set(found.tolist()) == {0x7FC12345, 0xFFC00000}


def stop_here(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


# The cluster ----------------------------------------------------------------------------------------------------------------


def test_a_given_client_is_left_as_it_was_found(prepare: Prepare, client: Client) -> None:
    before = set(client.futures), len(client.scheduler_info()["workers"])
    prepare(PANEL)
    prepare(PANEL, exchange="p2p")
    assert (set(client.futures), len(client.scheduler_info()["workers"])) == before
    assert client.status == "running"


def test_the_scheduler_keeps_no_task_and_logs_no_error(
    prepare: Prepare, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    for exchange in ("files", "p2p"):
        prepare(PANEL, exchange=exchange)
    deadline = time.monotonic() + 20
    while left := client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_dask_half_never_loads_torch(client: Client, prepare: Prepare) -> None:
    prepare(PANEL)
    assert not any(client.run(lambda: "torch" in sys.modules).values())
    code = "import panelflow, sys; panelflow.prepare; panelflow.open; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import panelflow, sys; panelflow.fit; panelflow.Loader; sys.exit('distributed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_plain_lines_where_there_is_no_terminal(prepare: Prepare, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(PANEL, progress=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("panelflow: ")]
    assert [line.split(":")[1].strip() for line in lines] == ["scan", "scatter", "count", "gather"]
    assert all("rows/s" in line or "bytes/s" in line for line in lines)


def test_real_files_with_odd_names(prepare: Prepare, real_data: Path) -> None:
    ds = prepare(
        real_data / "quirks",
        entity="{entity}.us.txt",
        date="Date",
        features=["Open", "High", "Low", "Close", "Volume"],
        targets=["stock_id"],
        split=pf.DateSplit(train=(None, None)),
        horizon=0,
        shard_bytes="1MiB",
        chunk_rows=1024,
    )
    assert ds.entity_names.tolist() == ["all", "drys", "inf", "jmom", "nan", "true"]
    counts = ds["train"].to_pandas()["entity"].value_counts()
    assert counts["jmom"] == 1
    assert ds.statistics.loc["Open", "max"] > 1e9


# Reported by reading and trying: each broke once ------------------------------------------------------------------------------


def test_a_remote_place_that_holds_other_files_is_left_alone(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}-shared"
    memory.pipe_file(f"{root}/notes.txt", b"years of work")
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(pf.DatasetExistsError, match="other files"),
    ):
        pf.prepare(PANEL, f"memory:/{root}", client=client, **OPTIONS)
    assert memory.cat_file(f"{root}/notes.txt") == b"years of work"


def test_a_remote_run_continues_after_its_metadata_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}-again/out.zarr"
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("panelflow.shuffle.write_manifest", stop_here)
            pf.prepare(PANEL, url, client=client, **OPTIONS)
        assert pf.verify(pf.prepare(PANEL, url, client=client, **OPTIONS))


@pytest.mark.parametrize("damage", ["torn unit", "torn note", "altered shard"])
def test_torn_and_altered_pieces_are_made_again(
    prepare: Prepare, unweighted: pf.Dataset, parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    output, partial = tmp_path / "out.zarr", tmp_path / ".out.zarr.partial"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("panelflow.shuffle.write_manifest", stop_here)
        prepare(parquet, output=output)
    if damage == "torn unit":
        unit = next(partial.glob("*/units/*.rows"))
        unit.write_bytes(unit.read_bytes()[:-100])
    elif damage == "torn note":
        note = next(partial.glob("*/shards/*.json"))
        note.write_bytes(note.read_bytes()[:50])
    else:
        shard = next(partial.glob("*/dataset")) / "train" / "features" / "c" / "0" / "0"
        shard.write_bytes(bytes(shard.stat().st_size))
    (next(partial.glob("*/dataset")) / "train" / "stray.tmp").touch()
    assert_same(prepare(parquet, output=output), unweighted)


def test_a_failed_run_leaves_nothing_though_tasks_were_running(
    prepare: Prepare, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    with_value("f0", np.inf).iloc[:50].to_parquet(tmp_path / "in" / "a.parquet", index=False)
    PANEL.iloc[50:].to_parquet(tmp_path / "in" / "b.parquet", index=False, row_group_size=100)
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 6_000)
    for exchange in ("files", "p2p"):
        with pytest.raises(pf.PanelError, match="infinite"):
            prepare(tmp_path / "in", exchange=exchange)
    client.run(lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not client.futures


def test_a_split_that_loses_all_its_rows_is_refused(prepare: Prepare) -> None:
    blind = PANEL.assign(ret=PANEL["ret"].where(PANEL["date"] < "2015-05-01"))
    with pytest.raises(pf.PanelError, match=r"'test' ends up without rows: 782 rows of its dates have no target"):
        prepare(blind)
    assert prepare(blind, allow_empty=True)["test"].num_rows == 0
    assert prepare(blind, missing_target="keep")["test"].num_rows == 782


def test_overflow_is_refused_beside_infinities(prepare: Prepare) -> None:
    bad = with_value("f1", np.inf, row=29)
    bad.loc[30, "f1"] = 1e6
    with pytest.raises(pf.PanelError, match=r"row 30: column 'f1' exceeds the range of float16"):
        prepare(bad, dtype="float16", infinite="missing")


def test_large_integers_do_not_depend_on_nulls_or_kind(prepare: Prepare, tmp_path: Path) -> None:
    value = 2**60 + 2**36 + 1
    whole = PANEL.assign(f0=np.full(len(PANEL), value))
    gaps = whole.astype({"f0": "Int64"})
    gaps.loc[0, "f0"] = pd.NA
    whole.to_csv(tmp_path / "panel.csv", index=False)
    for source in (whole, gaps, tmp_path / "panel.csv"):
        found = prepare(source)["train"].to_pandas()["f0"]
        assert set(found.dropna()) == {np.float32(float(value))}


def test_old_times_beyond_nanoseconds_do_not_wrap(prepare: Prepare, tmp_path: Path) -> None:
    table = pa.Table.from_pandas(PANEL, preserve_index=False)
    far = pa.array([253370764800] * len(PANEL), pa.timestamp("s"))  # the year 9999
    table = table.set_column(table.column_names.index("date"), "date", far)
    pq.write_table(table, tmp_path / "panel.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(pf.PanelError, match="9999"):
        prepare(tmp_path / "panel.parquet")


def test_empty_keys_of_any_text_type_are_missing(prepare: Prepare, tmp_path: Path) -> None:
    table = pa.Table.from_pandas(with_value("stock", ""), preserve_index=False)
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        index = table.column_names.index("stock")
        pq.write_table(table.set_column(index, "stock", table["stock"].cast(kind)), tmp_path / "panel.parquet")
        with pytest.raises(pf.PanelError, match="row 30: entity column 'stock' has 1 missing"):
            prepare(tmp_path / "panel.parquet")


def test_a_source_that_cannot_be_read_keeps_what_is_done(
    parquet: Path, unweighted: pf.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 20_000)
    calls = iter(range(10**6))

    def flaky(*arguments: Any) -> Any:
        if next(calls) == 12:
            raise OSError(5, "Input/output error")
        return _read_groups(*arguments)

    from panelflow.pieces import _read_groups

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as local,
    ):
        with monkeypatch.context() as patch, pytest.raises(pf.StorageError, match="Input/output error"):
            patch.setattr("panelflow.pieces._read_groups", flaky)
            pf.prepare(parquet, tmp_path / "out.zarr", client=local, **OPTIONS)
        done = pf.prepare(parquet, tmp_path / "out.zarr", client=local, **OPTIONS)
    assert done.dataset_id == unweighted.dataset_id
    assert done.manifest["provenance"]["reused_units"] > 0


def test_torn_compressed_text_is_refused_by_name(prepare: Prepare, tmp_path: Path) -> None:
    import gzip

    whole = gzip.compress(PANEL.to_csv(index=False).encode())
    for damaged in (whole[: len(whole) // 2], whole[:1000] + b"xxxx" + whole[1004:]):
        (tmp_path / "panel.csv.gz").write_bytes(damaged)
        with pytest.raises(pf.PanelError, match=r"panel.csv.gz cannot be read"):
            prepare(tmp_path / "panel.csv.gz")


def test_two_outputs_may_share_scratch(prepare: Prepare, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: prepare(PANEL, scratch=tmp_path / "scratch").dataset_id, range(2)))
    assert made[0] == made[1]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_linked_output_is_replaced_where_it_lies(prepare: Prepare, tmp_path: Path) -> None:
    prepare(PANEL, output=tmp_path / "real.zarr")
    (tmp_path / "link.zarr").symlink_to(tmp_path / "real.zarr")
    second = prepare(PANEL, output=tmp_path / "link.zarr", seed=1, overwrite=True)
    assert (tmp_path / "link.zarr").is_symlink()
    assert pf.open(tmp_path / "real.zarr").dataset_id == second.dataset_id


def test_nothing_for_the_exchange_to_move(prepare: Prepare) -> None:
    split = pf.DateSplit(test=("2030-01-01", None))
    made = [prepare(PANEL, split=split, allow_empty=True, exchange=exchange).dataset_id for exchange in ("files", "p2p")]
    assert made[0] == made[1]


# Splits of odd contents ---------------------------------------------------------------------------------------------------------


def test_an_empty_split_can_be_allowed(prepare: Prepare, tmp_path: Path) -> None:
    split = pf.DateSplit(train=(None, "2030-01-01"), test=("2030-01-01", None))
    ds = prepare(PANEL, split=split, allow_empty=True)
    empty = ds["test"]
    assert pf.verify(ds)
    assert empty.num_rows == len(empty.to_pandas()) == len(pf.Loader(empty, 10)) == 0
    assert list(pf.Loader(empty, 10)) == []
    assert empty.features.shape == (0, 4)
    assert np.isnan(pf.evaluate(pf.MLP(4), empty).loss)
    predictions = pf.predict(pf.MLP(4), empty)
    assert predictions is not None
    assert predictions.empty
    pf.predict(pf.MLP(4), empty, to=tmp_path / "none.parquet")
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_an_entity_seen_only_in_evaluation(prepare: Prepare) -> None:
    late = PANEL[(PANEL["stock"] != "S004") | (PANEL["date"] >= "2015-05-01")]
    ds = prepare(late)
    assert "S004" not in set(ds["train"].to_pandas()["stock"])
    assert "S004" in set(ds["test"].to_pandas()["stock"])
    assert "S004" in ds.entity_names


def test_several_training_ranges(prepare: Prepare) -> None:
    split = pf.DateSplit(train_a=(None, "2015-02-01"), test=("2015-02-01", "2015-03-01"), train_b=("2015-03-01", None))
    ds = prepare(PANEL, split=split, embargo=2)
    rows = pd.concat([ds["train_a"].to_pandas(), ds["train_b"].to_pandas()])[ds.features].astype(np.float64)
    assert ds.statistics["count"].tolist() == [len(rows)] * 4
    np.testing.assert_allclose(ds.statistics["mean"], rows.mean(), rtol=1e-12)
    assert ds.manifest["content"]["splits"]["train_b"]["purged_dates"] == 3 + 2
    with pytest.raises(pf.OptionError, match="train_a"):
        pf.fit(pf.MLP(4), ds, progress=False)


def test_the_same_bound_written_otherwise_is_the_same_dataset(prepare: Prepare, unweighted: pf.Dataset) -> None:
    cut, end = pd.Timestamp("2015-03-01"), np.datetime64("2015-05-01T00:00")
    split = pf.DateSplit(train=(None, cut), validation=(cut, end), test=("2015-05-01 00:00", None))
    assert_same(prepare(PANEL, split=split), unweighted)
