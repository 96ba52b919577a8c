from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from panelflow.metrics import Metrics, record_date, summarize


def test_by_hand_and_against_pandas() -> None:
    generator = np.random.default_rng(0)
    frames, records = [], []
    for date in range(30):
        rows = int(generator.integers(2, 40))
        target = generator.normal(5, 1, size=rows)
        prediction = np.round(0.3 * target + generator.normal(size=rows), 1)  # with ties
        frames.append(pd.DataFrame({"date": date, "p": prediction, "t": target}))
        records.append(record_date(date, prediction, target))
    frame = pd.concat(frames)
    found = summarize(records)
    ics = frame.groupby("date")[["p", "t"]].apply(lambda d: d["p"].corr(d["t"]))
    ranks = frame.groupby("date")[["p", "t"]].apply(lambda d: d["p"].rank().corr(d["t"].rank()))
    error = ((frame["t"] - frame["p"]) ** 2).sum()
    assert found.r2 == pytest.approx(1 - error / ((frame["t"] - frame["t"].mean()) ** 2).sum(), rel=1e-12)
    assert found.r2_zero == pytest.approx(1 - error / (frame["t"] ** 2).sum(), rel=1e-12)
    assert (found.ic, found.ic_std) == pytest.approx((ics.mean(), ics.std()), rel=1e-12)
    assert (found.rank_ic, found.rank_ic_std) == pytest.approx((ranks.mean(), ranks.std()), rel=1e-12)
    assert found.icir == pytest.approx(ics.mean() / ics.std(), rel=1e-12)
    assert (found.dates, found.left_out, found.rows) == (30, {}, len(frame))


def test_undefined_dates_are_left_out_and_counted() -> None:
    up, flat = np.arange(4.0), np.full(4, 0.1)
    records = [
        record_date(0, up, up),
        record_date(1, flat, up),
        record_date(2, up, flat),
        record_date(3, up[:1], up[:1]),
        record_date(4, np.array([np.nan, 1.0]), up[:2]),
        record_date(5, up, np.array([np.nan, np.nan, 1.0, np.nan])),
    ]
    found = summarize(records)
    assert (found.ic, found.dates) == (pytest.approx(1.0), 1)
    assert found.left_out == {
        "constant predictions": 1,
        "constant targets": 1,
        "fewer than two rows": 2,
        "predictions not finite": 1,
    }
    assert math.isnan(found.ic_std)
    json.dumps(Metrics(math.nan, {"y": found}).as_dict(), allow_nan=False)


def test_a_weight_of_two_is_the_row_twice() -> None:
    generator = np.random.default_rng(1)
    p, t = generator.normal(size=(2, 20))
    weight = np.ones(20)
    weight[3] = 2
    once = summarize([record_date(0, p, t, weight)])
    twice = summarize([record_date(0, np.append(p, p[3]), np.append(t, t[3]))])
    assert (once.r2, once.r2_zero) == pytest.approx((twice.r2, twice.r2_zero), rel=1e-12)


def test_no_dates_at_all() -> None:
    found = summarize([])
    assert math.isnan(found.r2)
    assert math.isnan(found.ic)
    assert found.dates == 0
