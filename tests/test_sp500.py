"""The example on real prices: conservation, no look-ahead, and one model whatever the number of ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from distributed import Client

import panelflow as pf

ROWS = 619_040


def load_example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "sp500.py"
    spec = importlib.util.spec_from_file_location("sp500", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sp500"] = module
    sys.path.insert(0, str(path.parent))  # ranks and workers find it there
    spec.loader.exec_module(module)
    return module


sp500 = load_example()


def write_stock(folder: Path, name: str, close: np.ndarray, dates: pd.DatetimeIndex) -> Path:
    path = folder / f"{name}_data.csv"
    pd.DataFrame({"date": dates, "close": close, "volume": 100}).to_csv(path, index=False)
    return path


def test_no_feature_looks_ahead_and_the_target_counts_the_dates_of_the_panel(tmp_path: Path) -> None:
    dates = pd.bdate_range("2015-01-01", periods=80)
    close = np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.02, 80)))
    path = write_stock(tmp_path, "DHR", close, dates)
    whole = sp500.build_features(path, dates)
    changed = close.copy()
    changed[60:] *= 3
    later = sp500.build_features(write_stock(tmp_path, "X", changed, dates), dates)
    pd.testing.assert_frame_equal(whole.loc[:59, sp500.FEATURES], later.loc[:59, sp500.FEATURES])
    assert whole["target"].iloc[10] == pytest.approx(100 * (close[15] / close[10] - 1))
    gap = np.r_[0:40, 57:80]  # skips 17 days, as DHR, ES and O do
    skipped = sp500.build_features(write_stock(tmp_path, "Y", close[gap], dates[gap]), dates)
    assert len(skipped) == len(gap)
    assert skipped["target"].iloc[35:40].isna().all()
    assert skipped["target"].iloc[34] == pytest.approx(100 * (close[39] / close[34] - 1))


def loss_and_steps(path: str, double: bool) -> tuple[float, int]:
    entry = sp500.train(path, 1, double)["history"][0]
    return entry["train_loss"], entry["steps"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_panel_is_accounted_for_and_trained_alike_on_1_2_and_3_ranks(
    real_data: Path, client: Client, tmp_path: Path
) -> None:
    client.run(sys.path.insert, 0, str(Path(sp500.__file__).parent))
    with client.as_current():
        ds = sp500.prepare(real_data / "sp500_5yr", tmp_path / "sp500.zarr", client)
    account = ds.manifest["content"]["conservation"]
    assert account["source_rows"] == sum(account["rows"].values()) == ROWS
    assert account["rows"]["missing_target"] > 0
    assert pf.verify(ds)
    for double, tolerance in ((False, 1e-5), (True, 1e-10)):
        outcomes = [pf.launch(loss_and_steps, world, (ds.folder.path(), double))[0] for world in (1, 2, 3)]
        assert len({steps for _, steps in outcomes}) == 1
        for loss, _ in outcomes[1:]:
            assert loss == pytest.approx(outcomes[0][0], rel=tolerance)
