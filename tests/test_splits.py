from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import panelflow as pf
from panelflow.splits import OUTSIDE, PURGED, assign, check_not_empty, is_training

DAY = 86_400_000_000_000


def dates_of(days: list[int]) -> np.ndarray:
    return np.array(sorted(days), dtype=np.int64) * DAY


def day(number: int) -> str:
    return str(pd.Timestamp(number * DAY))


def labels(split: pf.DateSplit, days: int, horizon: int, embargo: int = 0) -> list[int]:
    return assign(split, dates_of(list(range(days))), zone=None, horizon=horizon, embargo=embargo).labels.tolist()


def test_boundary_dates_by_hand() -> None:
    split = pf.DateSplit(train=(None, day(6)), validation=(day(6), day(9)), test=(day(9), None))
    # A label at date 4 with horizon 2 is known at date 6, the first of validation: it goes; that at date 3 stays.
    assert labels(split, 12, horizon=2) == [0, 0, 0, 0, PURGED, PURGED, 1, PURGED, PURGED, 2, 2, 2]
    assert labels(split, 12, horizon=0) == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert labels(split, 12, horizon=1) == [0, 0, 0, 0, 0, PURGED, 1, 1, PURGED, 2, 2, 2]


def test_training_after_evaluation_loses_purge_and_embargo() -> None:
    split = pf.DateSplit(test=(day(2), day(4)), train_late=(day(4), None))
    # Labels of the test dates 2 and 3 reach to date 5, so dates 4 and 5 meet them; the embargo takes 6 besides.
    assert labels(split, 9, horizon=2) == [OUTSIDE, OUTSIDE, 0, 0, PURGED, PURGED, 1, 1, 1]
    assert labels(split, 9, horizon=2, embargo=1) == [OUTSIDE, OUTSIDE, 0, 0, PURGED, PURGED, PURGED, 1, 1]
    assert labels(split, 9, horizon=0, embargo=2) == [OUTSIDE, OUTSIDE, 0, 0, PURGED, PURGED, 1, 1, 1]


def test_dates_between_splits_count_as_observed() -> None:
    split = pf.DateSplit(train=(None, day(4)), test=(day(6), None))
    assert labels(split, 8, horizon=2) == [0, 0, 0, 0, OUTSIDE, OUTSIDE, 1, 1]
    assert labels(split, 8, horizon=3) == [0, 0, 0, PURGED, OUTSIDE, OUTSIDE, 1, 1]


def test_weekends_do_not_count() -> None:
    dates = pd.bdate_range("2020-01-01", periods=20).as_unit("ns").asi8
    split = pf.DateSplit(train=(None, dates_to_text(dates[10])), test=(dates_to_text(dates[10]), None))
    assert assign(split, dates, zone=None, horizon=3, embargo=0).labels.tolist() == [0] * 7 + [PURGED] * 3 + [1] * 10


def dates_to_text(value: int) -> str:
    return str(pd.Timestamp(value))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, pf.DateSplit, int, int]:
    days = draw(st.lists(st.integers(0, 60), min_size=2, max_size=40, unique=True))
    cuts = sorted(draw(st.lists(st.integers(0, 61), min_size=2, max_size=8, unique=True)))
    names = draw(st.permutations(["train", "train_b", "train_c", "validation", "test", "extra", "holdout"]))
    pairs = [pair for pair in itertools.pairwise(cuts) if draw(st.booleans())] or [(cuts[0], cuts[1])]
    ranges = {name: (day(a), day(b)) for name, (a, b) in zip(names, pairs, strict=False)}
    return dates_of(days), pf.DateSplit(**ranges), draw(st.integers(0, 8)), draw(st.integers(0, 5))


@given(cases())
def test_purge_equals_brute_force_over_label_intervals(case: tuple[np.ndarray, pf.DateSplit, int, int]) -> None:
    dates, split, horizon, embargo = case
    assignment = assign(split, dates, zone=None, horizon=horizon, embargo=embargo)
    bounds = {name: (pd.Timestamp(a).value, pd.Timestamp(b).value) for name, (a, b) in split.items()}
    members = {name: [i for i, d in enumerate(dates) if a <= d < b] for name, (a, b) in bounds.items()}
    for index, name in enumerate(split):
        for i in members[name]:
            lost = False
            for other, others in members.items():
                if other == name or is_training(other) or not others:
                    continue
                meets = any(i <= j + horizon and j <= i + horizon for j in others)
                behind = others[-1] + horizon < i <= others[-1] + horizon + embargo
                if is_training(name):
                    lost |= meets or (behind and i > others[-1])
                else:
                    lost |= meets and i < others[0]
            assert (assignment.labels[i] == PURGED) == lost
            assert lost or assignment.labels[i] == index
    outside = set(range(len(dates))) - {i for rows in members.values() for i in rows}
    assert all(assignment.labels[i] == OUTSIDE for i in outside)


@given(cases())
def test_no_training_label_meets_an_evaluated_one(case: tuple[np.ndarray, pf.DateSplit, int, int]) -> None:
    dates, split, horizon, embargo = case
    assignment = assign(split, dates, zone=None, horizon=horizon, embargo=embargo)
    rows = {name: np.flatnonzero(assignment.labels == i) for i, name in enumerate(split)}
    for left, right in itertools.combinations(split, 2):
        if is_training(left) != is_training(right) and len(rows[left]) and len(rows[right]):
            assert np.abs(rows[left][:, None] - rows[right][None, :]).min() > horizon


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ({}, "at least one range"),
        ({"train": ("2020-01-01", "2020-01-01")}, "ends before it starts"),
        ({"train": ("2020-01-02", "2020-01-01")}, "ends before it starts"),
        ({"train": ("2020-01-01", "2020-06-01"), "test": ("2020-05-31", None)}, "share dates"),
        ({"train": (None, None), "test": ("2020-05-31", None)}, "share dates"),
        ({"train": ("yesterday-ish", None)}, "yesterday-ish"),
        ({"train": "2020"}, "pair"),
        ({"train": (20200101, None)}, "20200101"),
        ({"1st": ("2020-01-01", None)}, "1st"),
        ({"entity_names": ("2020-01-01", None)}, "entity_names"),
    ],
)
def test_bad_ranges_are_refused_with_their_value(ranges: dict[str, object], text: str) -> None:
    with pytest.raises(pf.OptionError, match=text):
        pf.DateSplit(**ranges)


def test_bounds_are_read_in_the_zone_of_the_panel() -> None:
    dates = pd.DatetimeIndex(["2020-01-01 23:30", "2020-01-02 00:30"]).tz_localize("America/New_York").as_unit("ns").asi8
    split = pf.DateSplit(train=(None, "2020-01-02"), test=("2020-01-02", None))
    assert assign(split, dates, zone="America/New_York", horizon=0, embargo=0).labels.tolist() == [0, 1]
    with pytest.raises(pf.OptionError, match="no time zone"):
        assign(pf.DateSplit(train=("2020-01-01T00:00Z", None)), dates, zone=None, horizon=0, embargo=0)


def test_a_midnight_that_does_not_exist_is_the_next_moment() -> None:
    dates = pd.DatetimeIndex(["2014-10-18 12:00", "2014-10-19 01:00"]).tz_localize("America/Sao_Paulo").as_unit("ns").asi8
    split = pf.DateSplit(train=(None, "2014-10-19"), test=("2014-10-19", None))
    assert assign(split, dates, zone="America/Sao_Paulo", horizon=0, embargo=0).labels.tolist() == [0, 1]


def test_an_empty_split_names_the_observed_range() -> None:
    dates = dates_of([1, 2, 3])
    assignment = assign(pf.DateSplit(train=(None, day(3)), test=(day(3), None)), dates, zone=None, horizon=5, embargo=0)
    with pytest.raises(
        pf.PanelError, match=r"'train' has no rows \(2 of its dates were purged.*1970-01-02 00:00:00 to 1970-01-04"
    ):
        check_not_empty(assignment, dates, np.ones(3, np.int64))
