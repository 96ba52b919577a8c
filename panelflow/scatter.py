"""Second pass: one unit -> one scratch file, its rows converted, checked and grouped by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from panelflow.columns import Locate, fill_block, to_dates, to_entities
from panelflow.errors import PanelError
from panelflow.files import Folder
from panelflow.hashing import add_checksums, key_checksum
from panelflow.panel import Piece, Unit, locator, read_piece
from panelflow.plan import Plan
from panelflow.scratch import Block, Keys, UnitSummary, read_summary, write_unit
from panelflow.splits import OUTSIDE, PURGED


@dataclass(eq=False)
class Routed:
    """Rows of a unit that will be written, and the account of the others."""

    keys: list[Keys] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    buckets: list[npt.NDArray[np.int64]] = field(default_factory=list)
    summaries: list[UnitSummary] = field(default_factory=list)


def scatter_unit(unit: Unit, plan: Plan, scratch: Folder, run: str, options: dict[str, Any]) -> UnitSummary:
    """Read a unit, convert and place its rows, and write its scratch file; a finished file of the same run is kept."""
    num_buckets = len(plan.buckets.split)
    summary = read_summary(scratch, run, unit.index, num_buckets, plan.layout)
    if summary is not None:
        return summary
    keys, block, buckets, summary = route_unit(unit, plan, options)
    write_unit(scratch, run, unit.index, buckets=buckets, num_buckets=num_buckets, keys=keys, block=block, summary=summary)
    return summary


def route_unit(unit: Unit, plan: Plan, options: dict[str, Any]) -> tuple[Keys, Block, npt.NDArray[np.int64], UnitSummary]:
    """Keys, row block and bucket of each row of a unit that will be written, in source order, and its summary.

    Raises
    ------
    PanelError
        A value that cannot be written: infinite, too large for the dtype, a bad weight.
    """
    routed = Routed()
    for piece in unit.pieces:
        _route_piece(piece, plan, options, routed)
    block = routed.blocks[0] if len(routed.blocks) == 1 else np.concatenate(routed.blocks)
    return (
        np.concatenate(routed.keys),
        block,
        np.concatenate(routed.buckets),
        add_summaries(routed.summaries, block.nbytes),
    )


def _route_piece(piece: Piece, plan: Plan, options: dict[str, Any], routed: Routed) -> None:
    columns, locate = plan.columns, locator(piece, options)
    table = read_piece(piece, columns.keys, columns.floats, options)
    entities = to_entities(columns.entity, table[columns.entity], locate)
    dates = to_dates(columns.date, table[columns.date], locate)
    codes = plan.vocabulary.get_indexer(entities.names).astype(np.int32)[entities.codes]
    date_index = np.searchsorted(plan.dates, dates.values).astype(np.int32)
    if (codes < 0).any() or (plan.dates[np.minimum(date_index, len(plan.dates) - 1)] != dates.values).any():
        raise PanelError(f"{piece.file.shown} changed while it was being prepared; run again once it is still.")
    block = np.empty((table.num_rows, plan.layout.width), dtype=plan.layout.dtype)
    infinite = fill_block([table[name] for name in columns.floats], block)
    hashes = plan.hashes(codes, date_index)
    split = plan.assignment.labels[date_index]
    declared = plan.assignment.declared[date_index]
    missing = _missing_targets(plan, block, split)
    if plan.rules.missing_target == "error" and missing.any():
        row = int(missing.argmax())
        name = next(name for name in columns.targets if np.isnan(block[row, columns.floats.index(name)]))
        raise PanelError(
            f"{locate(row)}: target {name!r} is missing; so are targets in {int(missing.sum()):,} rows of the file that belong "
            f"to a split. Fill them, or pass missing_target='drop' or 'keep'."
        )
    written = (split >= 0) & ~missing
    made_missing = _check_values(plan, table, block, infinite, written, locate)
    reasons = {
        "outside_splits": split == OUTSIDE,
        "purged": split == PURGED,
        "missing_target": missing,
        "written": written,
    }
    count = len(plan.assignment.names)
    routed.summaries.append(
        UnitSummary(
            rows=table.num_rows,
            outside=int(reasons["outside_splits"].sum()),
            purged=np.bincount(declared[split == PURGED], minlength=count).tolist(),
            missing_target=np.bincount(split[missing], minlength=count).tolist(),
            written=np.bincount(split[written], minlength=count).tolist(),
            checksums={reason: key_checksum(hashes[rows]) for reason, rows in reasons.items()},
            made_missing=made_missing,
        )
    )
    routed.keys.append(np.stack([codes[written], date_index[written]], axis=1))
    routed.blocks.append(block if written.all() else block[written])
    routed.buckets.append(plan.buckets.of(date_index[written], hashes[written]))


def _missing_targets(plan: Plan, block: Block, split: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Rows of a split that are to be dropped, or refused, for want of a target."""
    first = plan.layout.num_features
    missing: npt.NDArray[np.bool_] = np.isnan(block[:, first : first + plan.layout.num_targets]).any(axis=1) & (split >= 0)
    if plan.rules.missing_target == "keep":
        missing &= plan.training[split]
    return missing


def _check_values(
    plan: Plan,
    table: pa.Table,
    block: Block,
    infinite: npt.NDArray[np.bool_],
    written: npt.NDArray[np.bool_],
    locate: Locate,
) -> dict[str, int]:
    """Refuse what no training run could bear; returns infinite features turned to NaN, by name."""
    made_missing: dict[str, int] = {}
    for position in np.flatnonzero(infinite):
        rows = np.isinf(block[:, position]) & written
        if not rows.any():
            continue
        name = plan.columns.floats[position]
        source = np.empty((table.num_rows, 1))
        fill_block([table[name]], source)
        overflow = rows & np.isfinite(source[:, 0])
        row = int((overflow if overflow.any() else rows).argmax())
        value = table[name][row].as_py()
        if overflow.any():
            raise PanelError(
                f"{locate(row)}: column {name!r} exceeds the range of {plan.layout.dtype}; scale it or pass a wider "
                f"dtype: {value}"
            )
        if position < plan.layout.num_features and plan.rules.infinite == "missing":
            block[rows, position] = np.nan
            made_missing[name] = int(rows.sum())
            continue
        remedy = "correct it, or pass infinite='missing'" if position < plan.layout.num_features else "correct or drop the row"
        raise PanelError(f"{locate(row)}: column {name!r} is infinite in {int(rows.sum()):,} rows of the file; {remedy}: {value}")
    if plan.layout.weighted:
        weight = block[:, -1]
        bad = ~(weight >= 0) & written
        if bad.any():
            row = int(bad.argmax())
            value = table[plan.columns.floats[-1]][row].as_py()
            raise PanelError(
                f"{locate(row)}: weight {plan.columns.weight!r} is missing or negative; weights are finite and >= 0: {value}"
            )
    return made_missing


def add_summaries(summaries: Sequence[UnitSummary], nbytes: int = 0) -> UnitSummary:
    """Sum of summaries, ``nbytes`` beside those they hold."""

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
        nbytes=nbytes + sum(summary.nbytes for summary in summaries),
    )
