"""Source files: listing, footers, columns, and reading by pieces."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import panelflow as pf
from panelflow.panel import Piece, make_batches, make_units
from panelflow.pieces import read_piece, read_pieces
from panelflow.source import FileInfo, SourceFile, inspect_file, list_files, select_columns


@given(
    st.lists(st.text("abc,\"' ", max_size=6), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_any_cut_of_a_csv_file_gives_its_lines_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], step: int, ending: str, ends: bool
) -> None:
    frame = pd.DataFrame({"stock": [f"x{text}" for text in texts], "v": np.arange(float(len(texts)))})
    content = frame.to_csv(index=False, lineterminator=ending)
    if not ends:
        content = content.removesuffix(ending)
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(content.encode())
    size, file = path.stat().st_size, SourceFile(str(path), "csv")
    tables = [
        read_piece(Piece(file, start, min(start + step, size), 0, 0), ["stock"], ["v"], {}) for start in range(0, size, step)
    ]
    assert [name for table in tables for name in table["stock"].to_pylist()] == frame["stock"].tolist()
    assert [value for table in tables for value in table["v"].to_pylist()] == frame["v"].tolist()


def test_units_keep_the_order_and_the_bound(tmp_path: Path) -> None:
    frame = pd.DataFrame({"e": ["a"] * 100, "d": 20200101, "f": 1.0, "t": 1.0})
    for name in "cab":
        frame.to_parquet(tmp_path / f"{name}.parquet", row_group_size=10, index=False)
    infos = [inspect_file(file, {}) for file in list_files(str(tmp_path), None, {})]
    columns = select_columns(infos, entity="e", date="d", features=["f"], targets=["t"], weight=None)
    units = make_units(infos, columns, unit_bytes=25 * 32)
    pieces = [piece for unit in units for piece in unit.pieces]
    assert [Path(piece.file.path).name[0] for piece in pieces] == sorted(Path(p.file.path).name[0] for p in pieces)
    assert [(p.start, p.stop, p.first_row) for p in pieces if p.file.path.endswith("a.parquet")] == [
        (i, i + 2, i * 10) for i in range(0, 10, 2)
    ]
    assert all(unit.nbytes <= 25 * 32 for unit in units)
    assert len(make_units(infos, columns, unit_bytes=10**9)) == 1


@pytest.mark.parametrize("rows_of_a_batch", [1000, 7])
def test_a_huge_row_group_is_read_as_a_stream_of_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_a_batch: int
) -> None:
    """A batch may be shorter than asked for; units are not."""
    frame = pd.DataFrame({"e": [f"s{i % 9}" for i in range(95)], "d": 20200101, "f": np.arange(95.0), "t": 1.0})
    frame.iloc[:80].to_parquet(tmp_path / "a.parquet", row_group_size=80, index=False)
    frame.iloc[80:].to_parquet(tmp_path / "b.parquet", row_group_size=5, index=False)
    infos = [inspect_file(file, {}) for file in list_files(str(tmp_path), None, {})]
    columns = select_columns(infos, entity="e", date="d", features=["f"], targets=["t"], weight=None)
    units = make_units(infos, columns, unit_bytes=25 * 32)
    assert all(unit.nbytes <= 25 * 32 for unit in units)
    batches = make_batches(units)
    assert [len(batch) for batch in batches] == [4]
    whole = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, size: int, **options: object) -> object:
        return whole(self, min(size, rows_of_a_batch), **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    tables = [list(read_pieces([p for u in batch for p in u.pieces], ["e", "d"], ["f"], {})) for batch in batches]
    assert [table.num_rows for table in tables[0]] == [25, 25, 25, 5, 15]
    assert [value for batch in tables for table in batch for value in table["f"].to_pylist()] == frame["f"].tolist()
    names = [table["e"].cast("string").to_pylist() for batch in tables for table in batch]
    assert [name for part in names for name in part] == frame["e"].tolist()


def test_directories_globs_lists_and_hidden_files(tmp_path: Path) -> None:
    frame = pd.DataFrame({"e": ["a"]})
    for name in ("b.csv", "a.csv", "_SUCCESS.csv", ".hidden.csv", "LICENSE", "sub/c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        frame.to_csv(tmp_path / name)

    def names(source: object) -> list[str]:
        return [file.path.removeprefix(f"{tmp_path}/") for file in list_files(source, None, {})]

    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a-checkpoint.csv").touch()
    assert names(str(tmp_path)) == ["a.csv", "b.csv", "sub/c.csv"]
    assert names(tmp_path / "?.csv") == ["a.csv", "b.csv"]
    assert names(tmp_path / "su*" / "**") == ["sub/c.csv"]
    frame.to_csv(tmp_path / "sub" / "p[1].csv")
    assert names(tmp_path / "sub" / "p[1].csv") == ["sub/p[1].csv"]
    assert names([tmp_path / "b.csv", str(tmp_path / "a.csv")]) == ["a.csv", "b.csv"]
    with pytest.raises(pf.PanelError, match="listed twice"):
        names([tmp_path / "b.csv", tmp_path / "*.csv"])
    with pytest.raises(pf.PanelError, match="LICENSE"):
        names(tmp_path / "LICENSE")
    with pytest.raises(pf.PanelError, match="does not fit the template"):
        list_files(str(tmp_path), "{entity}_data.csv", {})


def test_only_hive_segments_below_the_source_count(tmp_path: Path) -> None:
    folder = tmp_path / "run=3" / "panel" / "year=2020"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("stock,v\nx,1\n")
    for source in (tmp_path / "run=3" / "panel", tmp_path / "run=3" / "panel" / "*" / "*.csv"):
        (file,) = list_files(source, None, {})
        assert file.constants == {"year": "2020"}
    (file,) = list_files(folder / "a.csv", None, {})
    assert file.constants == {}
    (tmp_path / "run=3" / "panel" / "year=2021").mkdir()
    (tmp_path / "run=3" / "panel" / "year=2021" / "a.csv").write_text("stock,v\nx,1\n")
    pair = [tmp_path / "run=3" / "panel" / f"year={year}" / "a.csv" for year in (2020, 2021)]
    assert [file.constants for file in list_files(pair, None, {})] == [{"year": "2020"}, {"year": "2021"}]


def test_a_hive_null_is_a_missing_value_and_a_missing_key() -> None:
    file = SourceFile("a.csv", "csv", {"x": "", "k": ""})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panelflow.pieces._read_csv", lambda *_: pa.table({"v": [1.0, 2.0]}))
        table = read_piece(Piece(file, 0, 1, 0, 0), ["k"], ["v", "x"], {})
    assert table["x"].to_pylist() == [None, None] or np.isnan(table["x"].to_pylist()).all()
    assert table["k"].to_pylist() == ["", ""]


def test_compressed_text_and_tabs(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"stock,v\nNA,1\n007,2\n"))
    (tmp_path / "b.tsv").write_text("stock\tv\ntrue\t3\n")
    for name, expected in {"a.csv.gz": ["NA", "007"], "b.tsv": ["true"]}.items():
        (file,) = list_files(tmp_path / name, None, {})
        info = inspect_file(file, {})
        assert list(info.columns) == ["stock", "v"]
        assert read_piece(Piece(file, 0, info.size, 0, 0), ["stock"], ["v"], {})["stock"].to_pylist() == expected


def test_a_header_that_repeats_a_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("stock,v,v\na,1,2\n")
    with pytest.raises(pf.PanelError, match=r"a.csv: the file names a column twice.*'v'"):
        inspect_file(SourceFile(str(tmp_path / "a.csv"), "csv"), {})


def test_patterns_expand_to_sorted_names_and_leave_keys_targets_and_weight() -> None:
    info = FileInfo(SourceFile("a", "csv"), dict.fromkeys(["f2", "f10", "e", "d", "fret", "fw"]), {}, (), 0)
    columns = select_columns([info], entity="e", date="d", features=["f*"], targets=["fret"], weight="fw")
    assert columns.features == ("f10", "f2")
    assert columns.floats == ("f10", "f2", "fret", "fw")
    named = select_columns([info], entity="e", date="d", features=["f2", "f1*"], targets="fret", weight=None)
    assert named.features == ("f2", "f10")
    with pytest.raises(pf.OptionError, match="'fret'"):
        select_columns([info], entity="e", date="d", features=["f2", "fret"], targets=["fret"], weight=None)
