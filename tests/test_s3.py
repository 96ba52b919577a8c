"""An object store over HTTP, with failures that pass: source, scratch and output, each there or here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from panels import OPTIONS, make_panel

import panelflow as pf

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
BUCKET = "s3://panels"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """fsspec options of a running endpoint, with the test panel in it."""
    folder = tmp_path_factory.mktemp("s3")
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("flaky_s3.py")), str(folder / "port")], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "port").exists() or not (folder / "port").read_text():
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        port = (folder / "port").read_text()
        settings = {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
        settings["config_kwargs"] = {"retries": {"max_attempts": 5}}
        store = s3fs.S3FileSystem(**settings)
        store.mkdir("panels")
        path = folder / "panel.parquet"
        make_panel().to_parquet(path, index=False, row_group_size=300)
        store.put_file(str(path), "panels/source/panel.parquet")
        yield settings
    finally:
        server.terminate()
        server.wait(timeout=30)


def names(options: dict[str, Any], folder: str) -> list[str]:
    store = s3fs.S3FileSystem(**options)
    store.invalidate_cache()
    return sorted(str(name) for name in store.find(folder))


@pytest.mark.parametrize("scratch", ["beside", "local", "s3"])
def test_same_bytes_from_s3_to_s3(
    options: dict[str, Any], unweighted: pf.Dataset, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: str
) -> None:
    monkeypatch.setattr("panelflow.shuffle.unit_bytes_for", lambda *_: 100_000)
    place = {"beside": None, "local": str(tmp_path / "scratch"), "s3": f"{BUCKET}/scratch"}[scratch]
    ds = pf.prepare(
        f"{BUCKET}/source",
        f"{BUCKET}/{scratch}/out.zarr",
        client=client,
        scratch=place,
        storage_options=options,
        output_options=options,
        **OPTIONS,
    )
    assert ds.dataset_id == unweighted.dataset_id
    assert ds.manifest["storage"] == unweighted.manifest["storage"]
    opened = pf.open(f"{BUCKET}/{scratch}/out.zarr", storage_options=options)
    assert pf.verify(opened)
    batches = list(pf.Loader(opened["train"], 100, seed=1, rank=0, world_size=1))
    expected = list(pf.Loader(unweighted["train"], 100, seed=1, rank=0, world_size=1))
    assert len(batches) == len(expected)
    assert all((left.features == right.features).all() for left, right in zip(batches, expected, strict=True))
    assert not names(options, "panels/scratch")
    assert not [name for name in names(options, f"panels/{scratch}") if ".partial" in name]
    assert not list(tmp_path.rglob("*.rows"))


def test_a_dataset_on_s3_is_not_replaced(options: dict[str, Any], client: Client) -> None:
    arguments: dict[str, Any] = {"client": client, "output_options": options, **OPTIONS}
    first = pf.prepare(make_panel(), f"{BUCKET}/once/out.zarr", **arguments)
    with pytest.raises(pf.DatasetExistsError, match="pass overwrite=True"):
        pf.prepare(make_panel(), f"{BUCKET}/once/out.zarr", **arguments)
    with pytest.raises(pf.DatasetExistsError, match="write to a new URL"):
        pf.prepare(make_panel(), f"{BUCKET}/once/out.zarr", overwrite=True, **arguments)
    assert pf.open(f"{BUCKET}/once/out.zarr", storage_options=options).dataset_id == first.dataset_id


def test_a_run_that_fails_leaves_nothing_on_s3(options: dict[str, Any], client: Client) -> None:
    import pandas as pd

    repeated = pd.concat([make_panel(), make_panel().iloc[:1]])
    with pytest.raises(pf.DuplicateKeysError):
        pf.prepare(repeated, f"{BUCKET}/failed/out.zarr", client=client, output_options=options, **OPTIONS)
    assert names(options, "panels/failed") == []


def test_a_run_that_stopped_on_s3_goes_on(
    options: dict[str, Any], unweighted: pf.Dataset, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"client": client, "storage_options": options, "output_options": options, **OPTIONS}
    source, output = f"{BUCKET}/source/*.parquet", f"{BUCKET}/stopped/out.zarr"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped here"):
        patch.setattr("panelflow.shuffle.write_manifest", lambda *_: (_ for _ in ()).throw(RuntimeError("stopped here")))
        pf.prepare(source, output, **arguments)
    with pytest.raises(pf.DatasetNotFoundError):
        pf.open(output, storage_options=options)
    done = pf.prepare(source, output, **arguments)
    assert done.dataset_id == unweighted.dataset_id
    assert done.manifest["provenance"]["reused_shards"] > 0


def test_a_store_that_cannot_be_reached_is_said_in_a_paragraph(options: dict[str, Any], client: Client, tmp_path: Path) -> None:
    nobody = options | {"key": None, "secret": None, "client_kwargs": {"endpoint_url": "http://127.0.0.1:1"}}
    with pytest.raises(pf.StorageError, match=r"s3://panels/source cannot be reached .*storage_options"):
        pf.prepare(f"{BUCKET}/source", tmp_path / "out.zarr", client=client, storage_options=nobody, **OPTIONS)
    with pytest.raises(pf.StorageError, match=r"s3://panels/out.zarr cannot be reached .*output_options"):
        pf.prepare(make_panel(), f"{BUCKET}/out.zarr", client=client, output_options=nobody, **OPTIONS)
