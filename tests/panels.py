"""Small panels that tests make, and a brute-force picture of what preparing one must give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

import panelflow as pf
from panelflow.hashing import fold, hash_entities

SPLIT = pf.DateSplit(train=(None, "2015-03-01"), validation=("2015-03-01", "2015-05-01"), test=("2015-05-01", None))
OPTIONS: dict[str, Any] = {
    "entity": "stock",
    "date": "date",
    "features": ["f*"],
    "targets": ["ret"],
    "split": SPLIT,
    "horizon": 3,
    "chunk_rows": 64,
    "shard_bytes": 64 * 4 * 32,  # four chunks of 64 rows; a narrow row counts as 32 bytes
    "progress": False,
}


def make_panel(num_stocks: int = 23, num_dates: int = 120, num_features: int = 4, seed: int = 0) -> pd.DataFrame:
    """Rows of every stock on every business day, sorted by stock; float32 features and target, a weight."""
    generator = np.random.default_rng(seed)
    dates = pd.bdate_range("2015-01-01", periods=num_dates)
    index = pd.MultiIndex.from_product([[f"S{i:03d}" for i in range(num_stocks)], dates], names=["stock", "date"])
    names = [f"f{i}" for i in range(num_features)]
    frame = pd.DataFrame(generator.normal(size=(len(index), num_features)).astype(np.float32), index=index, columns=names)
    frame["ret"] = (0.5 * frame["f0"] + generator.normal(size=len(frame))).astype(np.float32)
    frame["size"] = generator.uniform(0.5, 2.0, size=len(frame)).astype(np.float32)
    return frame.reset_index()


def key_hashes(frame: pd.DataFrame, seed: int = 0, entity: str = "stock") -> np.ndarray:
    dates = frame["date"].to_numpy().astype("M8[ns]").view(np.int64)
    return fold(seed, hash_entities(frame[entity].tolist()), dates)


def expected_split(frame: pd.DataFrame, dates: pd.DatetimeIndex, order: str, seed: int = 0) -> pd.DataFrame:
    """Rows of the given dates in stored order, by one sort in pandas."""
    chosen = frame[frame["date"].isin(dates)].copy()
    chosen["hash"] = key_hashes(chosen, seed)
    keys = ["hash", "date", "stock"] if order == "hash" else ["date", "hash", "stock"]
    return chosen.sort_values(keys).drop(columns="hash").reset_index(drop=True)
