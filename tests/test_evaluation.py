from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from panels import make_panel

import panelflow as pf
from panelflow.evaluation import split_blocks
from panelflow.metrics import record_date, summarize


class Linear(torch.nn.Module):
    """Sum of features, so that predictions can be made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.sum(dim=1) * self.scale


def by_hand(dataset: pf.Dataset, name: str) -> pd.DataFrame:
    rows = dataset[name].to_pandas()
    rows["prediction"] = rows[dataset.features].astype(np.float64).sum(axis=1) * 0.1
    return rows


@pytest.mark.parametrize("name", ["train", "validation", "test"])
@pytest.mark.parametrize("batch_size", [1, 50, 10**6])
def test_metrics_equal_those_of_a_frame(dataset: pf.Dataset, name: str, batch_size: int) -> None:
    rows = by_hand(dataset, name)
    found = pf.evaluate(Linear(), dataset[name], batch_size=batch_size)
    records = [
        record_date(0, d["prediction"].to_numpy(), d["ret"].to_numpy(np.float64), d["size"].to_numpy(np.float64))
        for _, d in rows.groupby("date")
    ]
    expected = summarize(records)
    for field in ("r2", "r2_zero", "ic", "rank_ic", "icir"):
        assert getattr(found.targets["ret"], field) == pytest.approx(getattr(expected, field), rel=1e-9)
    assert (found.targets["ret"].rows, found.targets["ret"].dates) == (len(rows), rows["date"].nunique())
    loss = ((rows["ret"] - rows["prediction"]) ** 2 * rows["size"]).sum() / rows["size"].sum()
    assert found.loss == pytest.approx(loss, rel=1e-6)


def metrics_of_rank(path: str) -> list[dict[str, Any]]:
    dataset = pf.open(path)
    torch.manual_seed(0)
    model = pf.MLP(len(dataset.features))
    return [pf.evaluate(model, dataset[name], batch_size=60).as_dict() for name in dataset]


def test_every_world_size_gives_the_same_metrics(dataset: pf.Dataset) -> None:
    path = dataset.folder.path()
    alone = metrics_of_rank(path)
    for world in (2, 3):
        for found in pf.launch(metrics_of_rank, world, (path,)):
            assert found == alone  # to the last bit


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 100])
def test_blocks_hold_whole_dates_and_every_row_once(dataset: pf.Dataset, world: int) -> None:
    for name, batch_size in (("validation", 1), ("validation", 60), ("test", 10**6), ("train", 100)):
        split = dataset[name]
        alone = split_blocks(split, batch_size, 0, 1)
        shared = [block for rank in range(world) for block in split_blocks(split, batch_size, rank, world)]
        assert shared == alone
        assert [start for start, _ in alone] == [0, *(stop for _, stop in alone[:-1])]
        assert alone[-1][1] == split.num_rows
        if split.date_rows is not None:
            dates = split.date[:]
            assert all(stop == len(dates) or dates[stop - 1] != dates[stop] for _, stop in alone)


def test_predictions_come_in_date_order(dataset: pf.Dataset, tmp_path: Path) -> None:
    for name in dataset:
        frame = pf.predict(Linear(), dataset[name], batch_size=100)
        assert frame.columns.tolist() == ["entity", "date", "target", "prediction"]
        assert frame["date"].is_monotonic_increasing
        expected = by_hand(dataset, name).rename(columns={"stock": "entity", "ret": "target"})
        both = frame.merge(expected, on=["entity", "date"], suffixes=("", "_hand"), validate="one_to_one")
        assert len(both) == len(frame) == dataset[name].num_rows
        np.testing.assert_allclose(both["prediction"], both["prediction_hand"], rtol=1e-12, atol=1e-14)
        assert pf.predict(Linear(), dataset[name], batch_size=100, to=tmp_path / f"{name}.parquet") is None
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / f"{name}.parquet"), frame, check_dtype=False)
    assert pq.ParquetFile(tmp_path / "test.parquet").num_row_groups > 1
    assert not list(tmp_path.glob("*.tmp"))


def test_rows_without_target_are_predicted_and_skipped_by_metrics(prepare: Any) -> None:
    panel = make_panel()
    panel.loc[panel["date"] == panel["date"].max(), "ret"] = np.nan
    ds = prepare(panel, missing_target="keep")
    frame = pf.predict(Linear(), ds["test"])
    assert frame["target"].isna().sum() == 23
    assert frame["prediction"].notna().all()
    found = pf.evaluate(Linear(), ds["test"])
    assert found.targets["ret"].rows == ds["test"].num_rows - 23
    assert found.targets["ret"].left_out == {"fewer than two rows": 1}
    assert np.isfinite(found.loss)


def test_several_targets(prepare: Any) -> None:
    panel = make_panel().rename(columns={"size": "ret2"})
    ds = prepare(panel, targets=["ret*"])
    assert ds.targets == ["ret", "ret2"]
    model = pf.MLP(4, 2)
    frame = pf.predict(model, ds["test"])
    assert {"target_ret", "prediction_ret", "target_ret2", "prediction_ret2"} <= set(frame.columns)
    assert set(pf.evaluate(model, ds["test"]).targets) == {"ret", "ret2"}


def test_shapes_are_never_broadcast(dataset: pf.Dataset) -> None:
    wrong = torch.nn.Linear(4, 2)
    with pytest.raises(pf.OptionError, match=r"must return \[rows, targets\]"):
        pf.evaluate(wrong, dataset["test"])
    with pytest.raises(pf.OptionError, match="never a mean"):
        pf.evaluate(pf.MLP(4), dataset["test"], loss=lambda p, t: ((p - t) ** 2).mean())


def test_the_mode_of_the_model_is_left_as_it_was(dataset: pf.Dataset) -> None:
    model = pf.MLP(4).train()
    pf.evaluate(model, dataset["test"])
    assert model.training
    assert torch.is_grad_enabled()
