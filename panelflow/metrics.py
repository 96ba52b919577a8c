"""Loss, R2, IC and rank IC, streamed date by date and exact under any number of ranks.

Each date is reduced to a few float64 numbers where its rows are; the numbers of all dates are then joined in date order. So
the result depends on the predictions alone, not on how dates were divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DateRecord:
    """One target on one date.

    Attributes
    ----------
    weight, mean, m2, square
        Total weight, weighted mean, sum of squared deviations from it, and sum of squares, of the targets.
    error
        Weighted sum of squared errors.
    ic, rank_ic
        NaN where undefined; ``left_out`` then says why.
    """

    date: int
    rows: int
    weight: float
    mean: float
    m2: float
    square: float
    error: float
    ic: float
    rank_ic: float
    left_out: str


def record_date(date: int, prediction: Vector, target: Vector, weight: Vector | None = None) -> DateRecord:
    """Reduce one date: float64 [rows] each; rows without target are skipped, weights do not enter the ICs."""
    known = ~np.isnan(target)
    prediction, target = prediction[known], target[known]
    weight = np.ones(len(target)) if weight is None else weight[known]
    total = float(weight.sum())
    mean = float((weight * target).sum() / total) if total > 0 else 0.0
    ic, rank_ic, left_out = _correlations(prediction, target)
    return DateRecord(
        date=date,
        rows=len(target),
        weight=total,
        mean=mean,
        m2=float((weight * (target - mean) ** 2).sum()),
        square=float((weight * target**2).sum()),
        error=float((weight * (target - prediction) ** 2).sum()),
        ic=ic,
        rank_ic=rank_ic,
        left_out=left_out,
    )


def _correlations(prediction: Vector, target: Vector) -> tuple[float, float, str]:
    if len(target) < 2:
        return math.nan, math.nan, "fewer than two rows"
    if not np.isfinite(prediction).all():
        return math.nan, math.nan, "predictions not finite"
    if prediction.min() == prediction.max():
        return math.nan, math.nan, "constant predictions"
    if target.min() == target.max():
        return math.nan, math.nan, "constant targets"
    ic, rank_ic = pearson(prediction, target), pearson(_ranks(prediction), _ranks(target))
    return ic, rank_ic, "" if math.isfinite(ic) else "values too close to tell apart"


def _ranks(values: Vector) -> Vector:
    return np.asarray(pd.Series(values).rank(method="average"), dtype=np.float64)


def pearson(left: Vector, right: Vector) -> float:
    """Pearson correlation of two float64 vectors; NaN where one is constant to the last bit."""
    left, right = left - left.mean(), right - right.mean()
    scale = math.sqrt(float(left @ left)) * math.sqrt(float(right @ right))
    return float(left @ right) / scale if scale > 0 else math.nan


@dataclass(frozen=True)
class TargetMetrics:
    """Metrics of one target.

    Attributes
    ----------
    r2
        1 - squared error / squared deviation of the targets from their mean.
    r2_zero
        1 - squared error / squared targets.
    ic, ic_std, icir
        Mean and standard deviation (one degree of freedom less) over dates of the Pearson correlation across entities, and
        their ratio.
    rank_ic, rank_ic_std, rank_icir
        The same of Spearman's rank correlation, ties averaged.
    dates
        Number of dates in the ICs.
    left_out
        Dates without an IC, by reason.
    rows
        Rows with a target.
    """

    r2: float
    r2_zero: float
    ic: float
    ic_std: float
    icir: float
    rank_ic: float
    rank_ic_std: float
    rank_icir: float
    dates: int
    left_out: dict[str, int]
    rows: int


@dataclass(frozen=True)
class Metrics:
    """Metrics of a model on a split.

    Attributes
    ----------
    loss
        Weighted mean of the loss over rows whose targets are all known.
    targets
        Metrics of each target by name.
    """

    loss: float
    targets: dict[str, TargetMetrics] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """A figure by name: ``loss``, or the mean over targets of any number of :class:`TargetMetrics`."""
        if name == "loss":
            return self.loss
        return float(np.mean([getattr(target, name) for target in self.targets.values()]))

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; undefined ones are ``None``."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(records: Sequence[DateRecord]) -> TargetMetrics:
    """Join the dates of one target, in date order."""
    weights = [record.weight for record in records]
    total = math.fsum(weights)
    mean = math.fsum(r.weight * r.mean for r in records) / total if total > 0 else math.nan
    spread = math.fsum(r.m2 + r.weight * (r.mean - mean) ** 2 for r in records)
    square, error = math.fsum(r.square for r in records), math.fsum(r.error for r in records)
    left_out: dict[str, int] = {}
    for record in records:
        if record.left_out:
            left_out[record.left_out] = left_out.get(record.left_out, 0) + 1
    ic, ic_std, icir = _over_dates([r.ic for r in records if not r.left_out])
    rank_ic, rank_ic_std, rank_icir = _over_dates([r.rank_ic for r in records if not r.left_out])
    return TargetMetrics(
        r2=1 - error / spread if spread > 0 else math.nan,
        r2_zero=1 - error / square if square > 0 else math.nan,
        ic=ic,
        ic_std=ic_std,
        icir=icir,
        rank_ic=rank_ic,
        rank_ic_std=rank_ic_std,
        rank_icir=rank_icir,
        dates=sum(not r.left_out for r in records),
        left_out=left_out,
        rows=sum(r.rows for r in records),
    )


def _over_dates(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, deviation, mean / deviation if deviation > 0 else math.nan
