"""Second pass: one unit -> one scratch file, its rows converted, checked and grouped by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from panelflow.columns import Locate, to_dates, to_entities, to_floats
from panelflow.errors import PanelError
from panelflow.files import Folder
from panelflow.hashing import add_checksums, key_checksum
from panelflow.panel import Unit
from panelflow.pieces import check_unchanged, locator, read_pieces
from panelflow.plan import Plan
from panelflow.scratch import UNITS, Routed, UnitSummary, read_summary, write_unit
from panelflow.splits import OUTSIDE, PURGED


def scatter_units(units: Sequence[Unit], plan: Plan, scratch: Folder, run: str, options: dict[str, Any]) -> list[UnitSummary]:
    """Read the units of a task, place their rows, and write their scratch files; finished ones of the same run are kept."""
    num_buckets = len(plan.buckets.split)
    done = [read_summary(scratch, run, UNITS, unit.index, num_buckets, plan.layout) for unit in units]
    if all(done):
        return [summary for summary in done if summary is not None]
    summaries, routing = [], route_units(units, plan, options)
    for unit, before in zip(units, done, strict=True):
        routed, summary = next(routing)
        if before is None:
            write_unit(scratch, run, unit.index, routed, num_buckets=num_buckets, layout=plan.layout, summary=summary)
        summaries.append(before or summary)
        del routed  # before the next unit is read
    return summaries


def route_units(units: Sequence[Unit], plan: Plan, options: dict[str, Any]) -> Iterator[tuple[Routed, UnitSummary]]:
    """For each unit its rows that will be written, with the bucket of each, and the account of the others.

    Raises
    ------
    PanelError
        A value that cannot be written: infinite, too large for the dtype, a bad weight.
    """
    tables = read_pieces([piece for unit in units for piece in unit.pieces], plan.columns.keys, plan.columns.floats, options)
    for unit in units:
        parts = [_route_table(next(tables), plan, locator(piece, options), piece.file.shown) for piece in unit.pieces]
        for piece in unit.pieces:
            check_unchanged(piece, options)
        joined = _join([routed for routed, _ in parts])
        summary = add_summaries([summary for _, summary in parts])
        groups = np.bincount(np.searchsorted(plan.groups, joined.buckets, "right") - 1, minlength=len(plan.groups) - 1)
        yield joined, replace(summary, groups=groups.tolist(), nbytes=len(joined) * plan.layout.row_bytes)
        del parts, joined  # before the next unit is read


def _join(parts: Sequence[Routed]) -> Routed:
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.columns[0]) for part in parts)])
    return Routed(
        [np.concatenate(column) for column in zip(*(part.columns for part in parts), strict=True)],
        np.concatenate([part.rows + start for part, start in zip(parts, starts, strict=False)]),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.buckets for part in parts]),
    )


def _route_table(table: pa.Table, plan: Plan, locate: Locate, shown: str) -> tuple[Routed, UnitSummary]:
    columns = plan.columns
    entities = to_entities(columns.entity, table[columns.entity], locate)
    dates = to_dates(columns.date, table[columns.date], locate)
    codes = plan.vocabulary.get_indexer(entities.names).astype(np.int32)[entities.codes]
    positions = np.searchsorted(plan.dates, dates.distinct).astype(np.int32)
    date_index = positions[dates.codes]
    if (codes < 0).any() or (plan.dates[np.minimum(positions, len(plan.dates) - 1)] != dates.distinct).any():
        raise PanelError(f"{shown} changed while it was being prepared; run again once it is still.")
    values = [to_floats(table[name], plan.layout.dtype) for name in columns.floats]
    hashes = plan.hashes(codes, date_index)
    split = plan.assignment.labels[date_index]
    declared = plan.assignment.declared[date_index]
    missing = _missing_targets(plan, values, split)
    if plan.rules.missing_target == "error" and missing.any():
        row = int(missing.argmax())
        name = next(name for name in columns.targets if np.isnan(values[columns.floats.index(name)][row]))
        raise PanelError(
            f"{locate(row)}: target {name!r} is missing; so are targets in {int(missing.sum()):,} rows of the file that belong "
            f"to a split. Fill them, or pass missing_target='drop' or 'keep'."
        )
    written = (split >= 0) & ~missing
    made_missing = _check_values(plan, table, values, written, locate)
    reasons = {
        "outside_splits": split == OUTSIDE,
        "purged": split == PURGED,
        "missing_target": missing,
        "written": written,
    }
    count = len(plan.assignment.names)
    summary = UnitSummary(
        rows=table.num_rows,
        outside=int(reasons["outside_splits"].sum()),
        purged=np.bincount(declared[split == PURGED], minlength=count).tolist(),
        missing_target=np.bincount(split[missing], minlength=count).tolist(),
        written=np.bincount(split[written], minlength=count).tolist(),
        checksums={reason: key_checksum(hashes[rows]) for reason, rows in reasons.items()},
        made_missing=made_missing,
    )
    keys = np.stack([codes[written], date_index[written]], axis=1)
    return Routed(values, np.flatnonzero(written), keys, plan.buckets.of(date_index[written], hashes[written])), summary


def _missing_targets(plan: Plan, values: Sequence[npt.NDArray[Any]], split: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Rows of a split that are to be dropped, or refused, for want of a target."""
    first = plan.layout.num_features
    targets = values[first : first + plan.layout.num_targets]
    missing: npt.NDArray[np.bool_] = np.logical_or.reduce([np.isnan(target) for target in targets]) & (split >= 0)
    if plan.rules.missing_target == "keep":
        missing &= plan.training[split]
    return missing


def _check_values(
    plan: Plan, table: pa.Table, values: list[npt.NDArray[Any]], written: npt.NDArray[np.bool_], locate: Locate
) -> dict[str, int]:
    """Refuse what no training run could bear; returns infinite features turned to NaN, by name."""
    made_missing: dict[str, int] = {}
    for position, (name, column) in enumerate(zip(plan.columns.floats, values, strict=True)):
        rows = np.isinf(column)
        if not rows.any() or not (rows := rows & written).any():
            continue
        overflow = rows & np.isfinite(to_floats(table[name], "float64"))
        row = int((overflow if overflow.any() else rows).argmax())
        value = table[name][row].as_py()
        if overflow.any():
            raise PanelError(
                f"{locate(row)}: column {name!r} exceeds the range of {plan.layout.dtype}; scale it or pass a wider "
                f"dtype: {value}"
            )
        is_feature = position < plan.layout.num_features
        if is_feature and plan.rules.infinite == "missing":
            values[position] = np.where(rows, np.array(np.nan, column.dtype), column)
            made_missing[name] = int(rows.sum())
            continue
        remedy = "correct it, or pass infinite='missing'" if is_feature else "correct or drop the row"
        raise PanelError(f"{locate(row)}: column {name!r} is infinite in {int(rows.sum()):,} rows of the file; {remedy}: {value}")
    if plan.layout.weighted:
        bad = ~(values[-1] >= 0) & written
        if bad.any():
            row = int(bad.argmax())
            value = table[plan.columns.floats[-1]][row].as_py()
            raise PanelError(
                f"{locate(row)}: weight {plan.columns.weight!r} is missing or negative; weights are finite and >= 0: {value}"
            )
    return made_missing


def add_summaries(summaries: Sequence[UnitSummary]) -> UnitSummary:
    """Sum of summaries."""

    def total(lists: list[list[int]]) -> list[int]:
        return [sum(column) for column in zip(*lists, strict=True)]

    return UnitSummary(
        rows=sum(summary.rows for summary in summaries),
        outside=sum(summary.outside for summary in summaries),
        purged=total([summary.purged for summary in summaries]),
        missing_target=total([summary.missing_target for summary in summaries]),
        written=total([summary.written for summary in summaries]),
        checksums={
            reason: add_checksums(summary.checksums[reason] for summary in summaries) for reason in summaries[0].checksums
        },
        made_missing={
            name: sum(summary.made_missing.get(name, 0) for summary in summaries)
            for name in sorted({name for summary in summaries for name in summary.made_missing})
        },
        groups=total([summary.groups for summary in summaries]),
        nbytes=sum(summary.nbytes for summary in summaries),
    )
