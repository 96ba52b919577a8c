"""What a run found out, as the manifest says it: conservation proved, content, storage and provenance."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd

from panelflow.budget import Budget
from panelflow.count import BucketCount
from panelflow.errors import ConservationError
from panelflow.format import digest_names
from panelflow.gather import ShardSummary
from panelflow.hashing import HASH_VERSION, add_checksums
from panelflow.plan import Plan, Rules
from panelflow.scan import Scan
from panelflow.scratch import UnitSummary
from panelflow.splits import EARLIEST, LATEST, DateSplit, is_training
from panelflow.statistics import Moments


@dataclass(frozen=True)
class Job:
    """What to do, checked: everything but the source and the cluster."""

    split: DateSplit
    horizon: int
    embargo: int
    seed: int
    rules: Rules
    row_orders: tuple[str, ...]
    exchange: str
    compression: str | None
    allow_empty: bool
    source_options: dict[str, Any]
    source_text: str
    empty_files: list[str]
    run: str


def prove_conservation(
    plan: Plan, scan: Scan, total: UnitSummary, counts: Sequence[BucketCount], shards: Sequence[ShardSummary]
) -> dict[str, Any]:
    """Account for every source row by count and by key checksum.

    Raises
    ------
    ConservationError
        Something does not add up.
    """
    rows = {
        "written": sum(shard.rows for shard in shards),
        "outside_splits": total.outside,
        "purged": sum(total.purged),
        "missing_target": sum(total.missing_target),
        "duplicate": sum(count.duplicates for count in counts),
    }
    checksums = {
        "written": add_checksums(shard.checksum for shard in shards),
        **{reason: total.checksums[reason] for reason in ("outside_splits", "purged", "missing_target")},
        "duplicate": add_checksums(count.checksum for count in counts),
    }
    if sum(rows.values()) != scan.rows or add_checksums(checksums.values()) != scan.checksum:
        raise ConservationError(
            f"Rows do not add up and nothing was committed: the source has {scan.rows:,} rows with key checksum "
            f"{scan.checksum:016x}, accounted for are {rows} with {add_checksums(checksums.values()):016x}. Please report this."
        )
    return {
        "source_rows": scan.rows,
        "rows": rows,
        "source_checksum": f"{scan.checksum:016x}",
        "checksums": {reason: f"{value:016x}" for reason, value in checksums.items()},
    }


def describe_content(
    plan: Plan,
    job: Job,
    total: UnitSummary,
    shards: Sequence[ShardSummary],
    conservation: dict[str, Any],
) -> dict[str, Any]:
    """What the dataset is: nothing in here depends on how it was made."""
    columns, layout = plan.columns, plan.layout
    return {
        "seed": plan.seed,
        "hash_version": HASH_VERSION,
        "horizon": job.horizon,
        "embargo": job.embargo,
        "rules": {
            "duplicates": plan.rules.duplicates,
            "missing_target": plan.rules.missing_target,
            "infinite": plan.rules.infinite,
        },
        "schema": {
            "entity": {
                "name": columns.entity,
                "kind": plan.kind,
                "count": len(plan.names),
                "sha256": digest_names(plan.names),
            },
            "date": {
                "name": columns.date,
                "zone": plan.zone,
                "count": len(plan.dates),
                "first": _iso(plan.dates[0], plan.zone),
                "last": _iso(plan.dates[-1], plan.zone),
            },
            "features": list(columns.features),
            "targets": list(columns.targets),
            "weight": columns.weight,
            "dtype": layout.dtype,
        },
        "layout": {"chunk_rows": layout.chunk_rows, "shard_rows": layout.shard_rows},
        "splits": {name: _split_entry(index, name, plan, job, total, shards) for index, name in enumerate(plan.assignment.names)},
        "shards": {
            name: [
                {"rows": s.rows, "keys": list(s.keys), "checksum": f"{s.checksum:016x}", "sha256": s.digests}
                for s in shards
                if s.split == index
            ]
            for index, name in enumerate(plan.assignment.names)
        },
        "statistics": _statistics(plan, shards),
        "infinite_made_missing": total.made_missing,
        "conservation": conservation,
    }


def _split_entry(
    index: int,
    name: str,
    plan: Plan,
    job: Job,
    total: UnitSummary,
    shards: Sequence[ShardSummary],
) -> dict[str, Any]:
    dates = plan.dates[plan.assignment.labels == index]
    by_date: dict[int, int] = {}
    for shard in shards:
        if shard.split == index:
            for date, rows in shard.dates:
                by_date[date] = by_date.get(date, 0) + rows
    ordered = sorted(by_date)
    dated = plan.orders[index] == "date"
    start, end = job.split.bounds_in(plan.zone)[name]
    return {
        "role": "training" if is_training(name) else "evaluation",
        "row_order": plan.orders[index],
        "start": None if start == EARLIEST else _iso(start, plan.zone),
        "end": None if end == LATEST else _iso(end, plan.zone),
        "first_date": _iso(dates[0], plan.zone) if len(dates) else None,
        "last_date": _iso(dates[-1], plan.zone) if len(dates) else None,
        "dates": len(dates),
        "rows": sum(shard.rows for shard in shards if shard.split == index),
        "purged_dates": plan.assignment.purged_dates(name),
        "purged_rows": total.purged[index],
        "missing_target_rows": total.missing_target[index],
        "rows_per_date": {
            "date": [int(plan.dates[date]) for date in ordered],
            "rows": [by_date[date] for date in ordered],
        }
        if dated
        else None,
    }


def _statistics(plan: Plan, shards: Sequence[ShardSummary]) -> dict[str, Any]:
    moments = [Moments.from_lists(shard.moments) for shard in shards if shard.moments is not None]
    merged = Moments.merge(moments) if moments else Moments.of(np.empty((0, plan.layout.num_features)))
    return merged.table(plan.columns.features)


def describe_storage(plan: Plan, shards: Sequence[ShardSummary]) -> dict[str, Any]:
    """How the bytes lie: compression and the size of every file."""
    return {
        "compression": plan.compression,
        "sizes": {
            name: [shard.sizes for shard in shards if shard.split == index] for index, name in enumerate(plan.assignment.names)
        },
    }


def describe_provenance(
    job: Job,
    budget: Budget,
    units: Sequence[UnitSummary],
    shards: Sequence[ShardSummary],
    started: float,
    phases: dict[str, float],
) -> dict[str, Any]:
    """Where the dataset came from; nothing of it enters ``dataset_id``."""
    libraries = ("panelflow", "dask", "distributed", "numpy", "pandas", "pyarrow", "zarr")
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 3),
        "phases": {name: round(seconds, 3) for name, seconds in phases.items()},
        "versions": {name: version(name) for name in libraries},
        "source": job.source_text,
        "empty_files": job.empty_files,
        "exchange": job.exchange,
        "units": len(units),
        "scratch_bytes": sum(unit.nbytes for unit in units),
        "reused_units": sum(unit.reused for unit in units),
        "reused_shards": sum(shard.reused for shard in shards),
        "memory_budget": dict(budget.as_dict()),
    }


def _iso(date: Any, zone: str | None) -> str:
    stamp = pd.Timestamp(int(date))
    if zone is not None:
        stamp = stamp.tz_localize("UTC").tz_convert(zone)
    return str(stamp.isoformat())
