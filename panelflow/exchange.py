"""Move the rows of units to where shards are gathered from, and gather them.

By scratch files, in one pass or in two, or by Dask's P2P shuffle; what follows is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from distributed import Future

from panelflow import gather, p2p, scatter
from panelflow.budget import row_bytes_of
from panelflow.count import SHOWN_DUPLICATES, BucketCount, count_distinct, count_written
from panelflow.errors import DuplicateKeysError
from panelflow.gather import ShardSummary
from panelflow.panel import Unit, make_batches
from panelflow.plan import Plan, Shard
from panelflow.regroup import GroupedReader, make_slices, regroup_slice
from panelflow.scratch import UNITS, Reader, ScratchReader, UnitSummary
from panelflow.shards import ArrayGrid
from panelflow.tasks import Tasks

_COUNTED_AT_ONCE = 64

ReaderOf = Callable[[int, int], Any]
"""What a task gets to read buckets ``[first, stop)`` from."""


def move_rows(
    tasks: Tasks, units: Sequence[Unit], plan: Plan, plan_future: Future, rows: int, unit_bytes: int
) -> tuple[list[UnitSummary], ReaderOf]:
    """Bring the rows of each bucket together, by scratch files or by Dask's P2P shuffle."""
    job, scratch, num_buckets = tasks.job, tasks.staging.scratch, len(plan.buckets.split)
    measure = lambda done: (sum(item.rows for item in done), sum(item.nbytes for item in done))  # noqa: E731
    if job.exchange == "files" or num_buckets == 0:
        arguments = [(batch, plan_future, scratch, job.run, job.source_options) for batch in make_batches(units)]
        done = tasks.run("scatter", scatter.scatter_units, arguments, measure, rows)
        summaries = [summary for batch in done for summary in batch]
        reader = _regroup(tasks, plan, plan_future, summaries, unit_bytes)
        return summaries, lambda first, stop: reader
    frames = p2p.exchange(tasks.client, units, plan, plan_future, scratch, job.run, job.source_options)
    tasks.held += frames
    p2p.wait(tasks.client, frames)
    summaries = [p2p.read_summary(unit, scratch) for unit in units]
    return summaries, lambda first, stop: (first, frames[first:stop], plan.layout)


def _regroup(tasks: Tasks, plan: Plan, plan_future: Future, summaries: Sequence[UnitSummary], unit_bytes: int) -> Reader:
    """What shards are gathered from: the files of scatter, or those of a second pass where there are too many for that."""
    scratch = tasks.staging.scratch
    if len(plan.groups) <= 2:
        return ScratchReader(scratch, UNITS, range(len(summaries)), len(plan.buckets.split), plan.layout)
    slices = make_slices(summaries, row_bytes_of(2 + plan.layout.width), unit_bytes)
    arguments = [(part, plan_future, scratch, tasks.job.run) for part in slices]
    measure = lambda summary: (summary.rows, summary.nbytes)  # noqa: E731
    tasks.run("regroup", regroup_slice, arguments, measure, sum(sum(summary.written) for summary in summaries))
    files = np.bincount([part.group for part in slices], minlength=len(plan.groups) - 1)
    return GroupedReader(scratch, files.tolist(), plan.groups, plan.layout)


def count_rows(tasks: Tasks, plan: Plan, plan_future: Future, reader_of: ReaderOf) -> list[BucketCount]:
    """Final rows of every bucket, in their order."""
    num_buckets, total = len(plan.buckets.split), plan.rows_expected
    if plan.rules.duplicates != "error":
        return _count_distinct(tasks, plan, plan_future, reader_of)
    step = 1 if tasks.job.exchange == "p2p" else _COUNTED_AT_ONCE  # frames would travel to be counted, files do not
    ranges = [(first, min(first + step, num_buckets)) for first in range(0, num_buckets, step)]
    arguments = [(*bounds, reader_of(*bounds)) for bounds in ranges]
    measure = lambda counts: (sum(count.rows for count in counts), 0)  # noqa: E731
    return [item for counts in tasks.run("count", _count_written, arguments, measure, total) for item in counts]


def _count_distinct(tasks: Tasks, plan: Plan, plan_future: Future, reader_of: ReaderOf) -> list[BucketCount]:
    arguments = [(bucket, plan_future, reader_of(bucket, bucket + 1)) for bucket in range(len(plan.buckets.split))]
    return tasks.run("count", _count_bucket, arguments, lambda count: (count.rows, 0), plan.rows_expected)


def _explain_duplicates(counts: Sequence[BucketCount]) -> DuplicateKeysError:
    duplicates, shown = sum(count.duplicates for count in counts), [item for count in counts for item in count.shown]
    lines = ", ".join(f"({name!r}, {pd.Timestamp(date)}: {size} rows)" for date, name, size in shown[:SHOWN_DUPLICATES])
    return DuplicateKeysError(
        f"{duplicates:,} rows repeat the (entity, date) of another: {lines}{', ...' if len(shown) > SHOWN_DUPLICATES else ''}. "
        f"Correct the source, or keep one of each by duplicates='first' or 'last' (in the order of the source)."
    )


def _count_written(first: int, stop: int, reader: Any) -> list[BucketCount]:
    return count_written(first, stop, _open_reader(reader))


def _count_bucket(bucket: int, plan: Plan, reader: Any) -> BucketCount:
    return count_distinct(bucket, plan, _open_reader(reader))


def _gather_shard(shard: Shard, plan: Plan, reader: Any, *rest: Any) -> ShardSummary:
    return gather.gather_shard(shard, plan, _open_reader(reader), *rest)


def _open_reader(reader: Any) -> Any:
    return p2p.FrameReader(*reader) if isinstance(reader, tuple) else reader


def gather_shards(
    tasks: Tasks,
    plan: Plan,
    plan_future: Future,
    shards: Sequence[Shard],
    grids: dict[str, list[ArrayGrid]],
    reader_of: ReaderOf,
) -> list[ShardSummary]:
    staging, names = tasks.staging, plan.assignment.names
    arguments = [
        (
            shard,
            plan_future,
            reader_of(shard.first_bucket, shard.stop_bucket),
            grids[names[shard.split]],
            staging.dataset,
            staging.scratch,
            tasks.job.run,
        )
        for shard in shards
    ]
    total = sum(shard.num_rows for shard in shards)
    measure = lambda summary: (summary.rows, sum(summary.sizes.values()))  # noqa: E731
    try:
        return tasks.run("gather", _gather_shard, arguments, measure, total)
    except DuplicateKeysError:
        raise _explain_duplicates(_count_distinct(tasks, plan, plan_future, reader_of)) from None
