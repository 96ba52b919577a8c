from __future__ import annotations

import json

import numpy as np
import pytest

from panelflow.statistics import Moments


def test_equal_to_numpy_with_missing_values_and_a_large_mean() -> None:
    rows = np.random.default_rng(0).normal(1e6, 1e-1, size=(50_000, 3)).astype(np.float32)
    rows[::7, 1] = np.nan
    table = Moments.of(rows).table(["a", "b", "c"])
    for i, name in enumerate("abc"):
        wide = rows[:, i].astype(np.float64)
        wide = wide[~np.isnan(wide)]
        assert table[name]["count"] == len(wide)
        assert table[name]["missing"] == len(rows) - len(wide)
        assert table[name]["mean"] == pytest.approx(wide.mean(), rel=1e-13)
        assert table[name]["std"] == pytest.approx(wide.std(), rel=1e-9)
        assert (table[name]["min"], table[name]["max"]) == (wide.min(), wide.max())


def test_merging_and_json_lose_nothing() -> None:
    rows = np.random.default_rng(1).normal(size=(1000, 2))
    parts = [Moments.of(rows[:1]), Moments.of(rows[1:400]), Moments.of(rows[400:])]
    kept = [Moments.from_lists(json.loads(json.dumps(part.as_lists(), allow_nan=False))) for part in parts]
    assert Moments.merge(kept).table("ab") == Moments.merge(parts).table("ab")
    assert Moments.merge(parts).table("ab")["a"]["mean"] == pytest.approx(rows[:, 0].mean(), rel=1e-12)


def test_a_feature_without_values_has_no_statistics() -> None:
    rows = np.full((10, 1), np.nan)
    table = Moments.merge([Moments.of(rows), Moments.of(rows)]).table(["a"])
    assert table["a"] == {"count": 0, "missing": 20, "mean": None, "std": None, "min": None, "max": None}
    json.dumps(Moments.of(rows).as_lists(), allow_nan=False)
