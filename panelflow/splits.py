"""Which observed date belongs to which split: pure functions of the sorted distinct dates.

A label at observed date i is known at observed date i + horizon, so it covers the interval [i, i + horizon]. A date leaves
a training split when its interval meets that of a date in an evaluation split, on whichever side; between two evaluation
splits the earlier one loses the date (Lopez de Prado, "Advances in Financial Machine Learning", 2018, section 7.4). An
embargo removes that many further training dates after the purge that follows an evaluation range.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from panelflow.errors import OptionError, PanelError

Bound: TypeAlias = "str | datetime.date | pd.Timestamp | np.datetime64 | None"
Range: TypeAlias = tuple[Bound, Bound]
Dates = npt.NDArray[np.int64]

OUTSIDE = -1
"""Label of a date that lies in no split."""
PURGED = -2
"""Label of a date that a purge or an embargo took from its split."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_\-]*")


def is_training(name: str) -> bool:
    """Whether a split is for training: its name starts with ``train``."""
    return name.startswith("train")


class DateSplit(Mapping[str, Range]):
    """Named, disjoint, half-open date ranges.

    Parameters
    ----------
    **ranges
        ``name=(start, end)``: dates d with ``start <= d < end``. ``None`` leaves an end open. Bounds are ISO text, dates,
        timestamps or ``numpy.datetime64``; without a zone they are read in the zone of the panel. A split whose name
        starts with ``train`` is for training, all others evaluate.

    Raises
    ------
    OptionError
        No range, a bad name, an unreadable bound, an empty range, or two ranges that share dates.

    Examples
    --------
    >>> split = DateSplit(train=("2013-01-01", "2016-07-01"), test=("2016-07-01", None))
    >>> list(split)
    ['train', 'test']
    """

    def __init__(self, **ranges: Range) -> None:
        if not ranges:
            raise OptionError("A DateSplit needs at least one range, for example train=('2013-01-01', '2016-07-01').")
        for name, bounds in ranges.items():
            if not _NAME.fullmatch(name) or name == "entity_names":
                raise OptionError(f"A split is named by letters, digits, '_' and '-', starting with a letter: {name!r}")
            if not isinstance(bounds, tuple | list) or len(bounds) != 2:
                raise OptionError(f"Split {name!r} wants a pair (start, end); got {bounds!r}")
        self._ranges: dict[str, Range] = {name: (bounds[0], bounds[1]) for name, bounds in ranges.items()}
        self.bounds_in(None)

    def __getitem__(self, name: str) -> Range:
        return self._ranges[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __repr__(self) -> str:
        return f"DateSplit({', '.join(f'{name}={bounds!r}' for name, bounds in self._ranges.items())})"

    def bounds_in(self, zone: str | None) -> dict[str, tuple[int, int]]:
        """Bounds as int64 nanoseconds (UTC), naive ones read in ``zone``; open ends are the ends of int64.

        Raises
        ------
        OptionError
            An unreadable bound, an empty range, ranges that share dates.
        """
        bounds = {name: (_to_ns(start, zone, EARLIEST), _to_ns(end, zone, LATEST)) for name, (start, end) in self.items()}
        for name, (start, end) in bounds.items():
            if start >= end:
                raise OptionError(f"Split {name!r} ends before it starts: {self._ranges[name]!r}")
        ordered = sorted(bounds, key=lambda name: bounds[name])
        for left, right in pairwise(ordered):
            if bounds[right][0] < bounds[left][1]:
                raise OptionError(
                    f"Splits {left!r} {self._ranges[left]!r} and {right!r} {self._ranges[right]!r} share dates; "
                    f"ranges are half-open, so one may end where the next begins."
                )
        return bounds


EARLIEST, LATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def _to_ns(bound: Bound, zone: str | None, default: int) -> int:
    if bound is None:
        return default
    try:
        if isinstance(bound, int | float | np.number):
            raise ValueError("a number could be many things")
        stamp = pd.Timestamp(bound)
        if pd.isna(stamp):
            raise ValueError("not a time")
        if stamp.tzinfo is None and zone is not None:
            stamp = stamp.tz_localize(zone, nonexistent="shift_forward", ambiguous=True)
        return int(stamp.as_unit("ns").value)
    except (ValueError, TypeError, OverflowError) as error:
        raise OptionError(f"A split bound is not a date ({error}); write it as YYYY-MM-DD: {bound!r}") from error


@dataclass(frozen=True)
class Assignment:
    """The split of every observed date.

    Attributes
    ----------
    names
        Split names in the order given.
    labels
        int16 [num_dates]: index into ``names``, or ``OUTSIDE`` or ``PURGED``.
    declared
        int16 [num_dates]: the same before purge and embargo.
    """

    names: tuple[str, ...]
    labels: npt.NDArray[np.int16]
    declared: npt.NDArray[np.int16]

    def purged_dates(self, name: str) -> int:
        """Number of observed dates that the split lost to purge and embargo."""
        return int(np.sum((self.declared == self.names.index(name)) & (self.labels == PURGED)))


def assign(split: DateSplit, dates: Dates, *, zone: str | None, horizon: int, embargo: int) -> Assignment:
    """Label every observed date with its split.

    Parameters
    ----------
    split
        The ranges.
    dates
        All distinct dates of the source, ascending, int64 nanoseconds (UTC), before any row is dropped.
    zone
        Zone of the panel in which naive bounds are read, ``None`` for a naive panel.
    horizon, embargo
        Numbers of observed dates, >= 0.

    Raises
    ------
    OptionError
        A bound has a zone while the panel has none.
    """
    _check_zones(split, zone)
    bounds = split.bounds_in(zone)
    spans = {
        name: (int(np.searchsorted(dates, start)), int(np.searchsorted(dates, end)) if end != LATEST else len(dates))
        for name, (start, end) in bounds.items()
    }
    labels = np.full(len(dates), OUTSIDE, dtype=np.int16)
    for index, (first, stop) in enumerate(spans.values()):
        labels[first:stop] = index
    declared = labels.copy()
    lost = np.zeros(len(dates), dtype=bool)
    for name, (first, stop) in spans.items():
        for other, (other_first, other_stop) in spans.items():
            if other == name or is_training(other) or first == stop or other_first == other_stop:
                continue
            if first < other_first:
                lost[max(first, other_first - horizon) : stop] = True
            elif is_training(name):
                lost[first : min(stop, other_stop + horizon + embargo)] = True
    labels[lost] = PURGED
    return Assignment(tuple(split), labels, declared)


def _check_zones(split: DateSplit, zone: str | None) -> None:
    for name, bounds in split.items():
        for bound in bounds:
            if bound is not None and zone is None and pd.Timestamp(bound).tzinfo is not None:
                raise OptionError(f"The panel's dates have no time zone, but a bound of split {name!r} has one: {bound!r}")


def check_not_empty(assignment: Assignment, dates: Dates, rows_per_date: Dates) -> None:
    """Refuse a split that no row can reach.

    Raises
    ------
    PanelError
        Names the split and the observed date range.
    """
    for index, name in enumerate(assignment.names):
        if rows_per_date[assignment.labels == index].sum() == 0:
            lost = assignment.purged_dates(name)
            purged = f" ({lost} of its dates were purged or embargoed)" if lost else ""
            first, last = pd.Timestamp(dates[0]), pd.Timestamp(dates[-1])
            raise PanelError(
                f"Split {name!r} has no rows{purged}: the panel was observed from {first} to {last} on {len(dates)} dates. "
                f"Move the range, or pass allow_empty=True."
            )
