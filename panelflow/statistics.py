"""Count, mean, standard deviation, minimum and maximum per feature, accumulated in float64 and merged in a fixed order.

Pairs are merged by the update of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample
variances", 1979), which does not lose digits where the mean is large against the deviation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

_ROWS_PER_STEP = 16384
_FOLD = 128

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of each feature over some rows; every array is float64 [num_features].

    Attributes
    ----------
    rows
        Rows seen, missing values included.
    count
        Values that are not missing.
    m2
        Sum of squared deviations from ``mean``.
    """

    rows: int
    count: Vector
    mean: Vector
    m2: Vector
    low: Vector
    high: Vector

    @staticmethod
    def of(rows: npt.NDArray[Any]) -> Moments:
        """Moments of ``rows`` [num_rows, num_features], NaN being missing."""
        steps = [_of_step(rows[start : start + _ROWS_PER_STEP]) for start in range(0, len(rows), _ROWS_PER_STEP)]
        return Moments.merge(steps) if steps else _of_step(rows)

    @staticmethod
    def merge(parts: Iterable[Moments]) -> Moments:
        """Moments of the union, merged from left to right."""
        return reduce(_merge_pair, parts)

    def as_lists(self) -> dict[str, Any]:
        """A form that JSON keeps bit for bit; infinite bounds of an empty feature travel as ``None``."""
        arrays = {name: getattr(self, name).tolist() for name in ("count", "mean", "m2")}
        bounds = {
            name: [value if np.isfinite(value) else None for value in getattr(self, name).tolist()] for name in ("low", "high")
        }
        return {"rows": self.rows, **arrays, **bounds}

    @staticmethod
    def from_lists(lists: dict[str, Any]) -> Moments:
        count, mean, m2 = (np.array(lists[name], dtype=np.float64) for name in ("count", "mean", "m2"))
        low = np.array([np.inf if value is None else value for value in lists["low"]], dtype=np.float64)
        high = np.array([-np.inf if value is None else value for value in lists["high"]], dtype=np.float64)
        return Moments(lists["rows"], count, mean, m2, low, high)

    def table(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Statistics of each feature by name, as the manifest holds them; the deviation is that of the population."""
        rows: dict[str, dict[str, Any]] = {}
        for i, name in enumerate(names):
            count = int(self.count[i])
            seen = count > 0
            rows[name] = {
                "count": count,
                "missing": self.rows - count,
                "mean": _finite(self.mean[i]) if seen else None,
                "std": _finite(np.sqrt(self.m2[i] / count)) if seen else None,
                "min": float(self.low[i]) if seen else None,
                "max": float(self.high[i]) if seen else None,
            }
        return rows


def _finite(value: Any) -> float | None:
    """JSON has no infinity: the squares of float64 values beyond 1e154 have no sum."""
    return float(value) if np.isfinite(value) else None


def _of_step(rows: npt.NDArray[Any]) -> Moments:
    values = rows.astype(np.float64)
    total = _reduce(np.add, values) if len(rows) else np.full(rows.shape[1], np.nan)
    if np.isfinite(total).all():
        return _of_whole(rows, values, total / len(rows))
    present = ~np.isnan(values)
    count = present.sum(axis=0).astype(np.float64)
    mean = np.where(present, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    m2 = np.where(present, (values - mean) ** 2, 0.0).sum(axis=0)
    low = np.where(present, values, np.inf).min(axis=0, initial=np.inf)
    high = np.where(present, values, -np.inf).max(axis=0, initial=-np.inf)
    return Moments(len(rows), count, mean, m2, low, high)


def _of_whole(rows: npt.NDArray[Any], values: Vector, mean: Vector) -> Moments:
    """The common case of no missing value, in a quarter of the time; ``values`` is used up."""
    count = np.full(rows.shape[1], len(rows), dtype=np.float64)
    low, high = _reduce(np.minimum, rows).astype(np.float64), _reduce(np.maximum, rows).astype(np.float64)
    values -= mean
    np.multiply(values, values, out=values)
    return Moments(len(rows), count, mean, _reduce(np.add, values), low, high)


def _reduce(operation: np.ufunc, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reduce over rows, in an order that the shape alone fixes: first over long runs of neighbouring rows, which is fast."""
    if len(rows) % _FOLD == 0:
        rows = operation.reduce(rows.reshape(_FOLD, -1), axis=0).reshape(-1, rows.shape[1])
    reduced: npt.NDArray[Any] = operation.reduce(rows, axis=0)
    return reduced


def _merge_pair(left: Moments, right: Moments) -> Moments:
    count = left.count + right.count
    share = right.count / np.maximum(count, 1)
    delta = right.mean - left.mean
    return Moments(
        left.rows + right.rows,
        count,
        left.mean + delta * share,
        left.m2 + right.m2 + delta**2 * left.count * share,
        np.minimum(left.low, right.low),
        np.maximum(left.high, right.high),
    )
