from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

import panelflow as pf


def test_plain_zarr_opens_it(dataset: pf.Dataset) -> None:
    root = zarr.open_group(dataset.folder.path(), mode="r")
    assert set(root["train"].array_keys()) == {"features", "targets", "weight", "entity", "date", "feature", "target"}
    assert root["entity_names"][:].tolist() == dataset.entity_names.tolist()
    features = root["train/features"]
    assert features.metadata.dimension_names == ("row", "feature")
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features[:], dataset["train"].to_pandas()[dataset.features])
    assert root["train/entity"].dtype == np.int32
    assert dict(root.attrs)["panelflow"]["dataset_id"] == dataset.dataset_id


def test_xarray_opens_it_labelled_and_dated(dataset: pf.Dataset) -> None:
    for name in dataset:
        opened = xr.open_zarr(dataset.folder.path(), group=name, consolidated=False)
        rows = dataset[name].to_pandas()
        np.testing.assert_array_equal(opened["date"].to_numpy().astype("M8[ns]"), rows["date"].to_numpy().astype("M8[ns]"))
        assert opened["features"].sel(feature="f2").dims == ("row",)
        np.testing.assert_array_equal(opened["features"].sel(feature="f2"), rows["f2"])
        np.testing.assert_array_equal(opened["targets"].sel(target="ret"), rows["ret"])


def test_arrays_of_a_split(dataset: pf.Dataset) -> None:
    split = dataset["train"]
    assert dataset.splits["train"] is split
    assert list(dataset) == ["train", "validation", "test"]
    assert "holdout" not in dataset
    assert split.features.shape == (split.num_rows, 4)
    assert split.targets.shape == (split.num_rows, 1)
    assert split.weight is not None
    assert split.weight.shape == split.entity.shape == split.date.shape == (len(split),)
    part = split.to_pandas(100, 200)
    pd.testing.assert_frame_equal(part, split.to_pandas().iloc[100:200].reset_index(drop=True))
    with pytest.raises(pf.OptionError, match="start=5, stop=3"):
        split.to_pandas(5, 3)
    with pytest.raises(pf.OptionError, match="'holdout'"):
        dataset["holdout"]
    assert "897 rows in hash order" in repr(split)
    assert pickle.loads(pickle.dumps(dataset)).dataset_id == dataset.dataset_id


def test_no_dataset_says_so(tmp_path: Path) -> None:
    with pytest.raises(pf.DatasetNotFoundError, match="no dataset at"):
        pf.open(tmp_path / "nothing.zarr")
    zarr.open_group(tmp_path / "other.zarr", mode="w")
    with pytest.raises(pf.DatasetNotFoundError, match="no panelflow manifest"):
        pf.open(tmp_path / "other.zarr")


def test_an_altered_manifest_is_refused(dataset: pf.Dataset, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dataset.folder.path(), tmp_path / "copy.zarr")) / "zarr.json"
    text = copy.read_text()
    copy.write_text(text.replace('"horizon": 3', '"horizon": 0'))
    with pytest.raises(pf.CorruptDatasetError, match=rf"{copy} was altered"):
        pf.open(copy.parent)
    copy.write_text(text[:-20])
    with pytest.raises(pf.CorruptDatasetError, match=rf"{copy} is not whole"):
        pf.open(copy.parent)
    document = json.loads(text)
    document["attributes"]["panelflow"]["format_version"] = 99
    copy.write_text(json.dumps(document))
    with pytest.raises(pf.DatasetNotFoundError.__mro__[1], match="format version 99"):
        pf.open(copy.parent)


def test_the_manifest_holds_what_the_format_promises(dataset: pf.Dataset) -> None:
    content = dataset.manifest["content"]
    assert set(content) >= {"seed", "hash_version", "schema", "splits", "shards", "statistics", "conservation", "rules"}
    assert set(dataset.manifest["provenance"]) >= {"created", "versions", "source", "exchange"}
    validation = content["splits"]["validation"]
    assert validation["purged_dates"] == 3
    assert validation["purged_rows"] == 69
    assert sum(validation["rows_per_date"]["rows"]) == validation["rows"]
    assert content["splits"]["train"]["rows_per_date"] is None
