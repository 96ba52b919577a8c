"""Run scan, scatter, count, gather and commit on a Dask cluster.

Only counts, checksums, distinct keys and statistics come back to the client. Each task owns its output file, writes it whole
and finds it again when it runs a second time, so that a lost worker or a killed run costs what was under way and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from distributed import Client, Future

from panelflow import gather, p2p, scatter
from panelflow.cluster import Workers, run_tasks
from panelflow.errors import DuplicateKeysError, PanelError
from panelflow.format import make_grids, write_manifest, write_metadata
from panelflow.gather import BucketCount, ShardSummary
from panelflow.manifest import Job, describe_content, describe_provenance, describe_storage, prove_conservation
from panelflow.panel import Unit, make_units
from panelflow.plan import Layout, Plan, Shard, check_budget, make_buckets, make_budget, make_shards, unit_bytes_for
from panelflow.progress import Reporter
from panelflow.scan import Scan, merge_scans, scan_unit
from panelflow.scratch import ScratchReader, UnitSummary
from panelflow.shards import ArrayGrid
from panelflow.source import Columns, FileInfo
from panelflow.splits import assign, check_not_empty
from panelflow.staging import Staging

_MERGED_AT_ONCE = 32


def shuffle(
    client: Client,
    workers: Workers,
    infos: Sequence[FileInfo],
    columns: Columns,
    layout: Layout,
    job: Job,
    staging: Staging,
    reporter: Reporter,
) -> None:
    """Turn source files into a whole dataset in ``staging.dataset``, its manifest written last.

    Raises
    ------
    PanelflowError
        See :func:`panelflow.prepare`.
    """
    started = time.time()
    unit_bytes = unit_bytes_for(workers.memory_limit, workers.threads)
    units = make_units(infos, columns, unit_bytes)
    budget = make_budget(layout, max((unit.nbytes for unit in units), default=0), workers.threads)
    check_budget(budget, workers.memory_limit)
    tasks = _Tasks(client, job, staging, reporter)
    scan = _scan(tasks, units, columns)
    plan = _plan(scan, columns, layout, job)
    plan_future = client.submit(_same, plan, key=f"panelflow-plan-{job.run[:16]}-{time.time_ns()}", pure=False)
    summaries, reader_of = _move(tasks, units, plan, plan_future, scan.rows)
    counts = _count(tasks, plan, plan_future, reader_of)
    rows = np.array([count.rows for count in counts], dtype=np.int64)
    shards = make_shards(plan.buckets, rows, len(plan.orders), layout.shard_rows)
    grids = _make_grids(plan, shards)
    written = _gather(tasks, plan, plan_future, shards, grids, reader_of)
    total = scatter.add_summaries(summaries)
    conservation = prove_conservation(plan, scan, total, counts, written)
    content = describe_content(plan, job, total, counts, written, conservation)
    write_metadata(staging.dataset, grids, features=columns.features, targets=columns.targets, names=plan.names)
    write_manifest(
        staging.dataset, content, describe_storage(plan, written), describe_provenance(job, budget, summaries, written, started)
    )


def _same(plan: Plan) -> Plan:
    """The plan as the result of a task, so that the scheduler can make it again where a worker is lost."""
    return plan


class _Tasks:
    """Runs one kind of task after another and reports them."""

    def __init__(self, client: Client, job: Job, staging: Staging, reporter: Reporter) -> None:
        self.client, self.job, self.staging, self.reporter = client, job, staging, reporter
        self._nonce = time.time_ns()

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        measure: Callable[[Any], tuple[float, int]],
        total: float,
        unit: str = "rows",
    ) -> list[Any]:
        """Results in order; ``measure`` tells the progress (units, bytes) of one."""
        self.reporter.phase(name, total, unit)
        key = f"panelflow-{name}-{self.job.run[:16]}-{self._nonce}"
        results = run_tasks(self.client, function, arguments, key, lambda result: self.reporter.advance(*measure(result)))
        reused = sum(bool(getattr(result, "reused", False)) for result in results)
        self.reporter.finish(f"{reused} of {len(results)} pieces were there already" if reused else "")
        return results


def _scan(tasks: _Tasks, units: Sequence[Unit], columns: Columns) -> Scan:
    arguments = [(unit, columns, tasks.job.seed, tasks.job.source_options) for unit in units]
    total = sum(piece.nbytes for unit in units for piece in unit.pieces)
    sizes = iter([unit.nbytes for unit in units])
    scans = tasks.run("scan", scan_unit, arguments, lambda scan: (next(sizes), 0), total, "bytes")
    level = 0
    while len(scans) > 1:
        groups = [scans[start : start + _MERGED_AT_ONCE] for start in range(0, len(scans), _MERGED_AT_ONCE)]
        scans = run_tasks(tasks.client, merge_scans, [(group,) for group in groups], f"panelflow-merge-{tasks._nonce}-{level}")
        level += 1
    if not scans or scans[0].rows == 0:
        raise PanelError(f"The source has no rows: {tasks.job.source_text}")
    result: Scan = scans[0]
    return result


def _plan(scan: Scan, columns: Columns, layout: Layout, job: Job) -> Plan:
    zone, kind = next(iter(scan.zones)), next(iter(scan.kinds))
    assignment = assign(job.split, scan.dates, zone=zone, horizon=job.horizon, embargo=job.embargo)
    if not job.allow_empty:
        check_not_empty(assignment, scan.dates, scan.rows_per_date)
    buckets = make_buckets(assignment, scan.rows_per_date, job.row_orders, layout.bucket_rows)
    return Plan(
        columns=columns,
        layout=layout,
        rules=job.rules,
        seed=job.seed,
        names=np.array(scan.names, dtype=np.int64 if kind == "int" else object),
        kind=kind,
        dates=scan.dates,
        zone=zone,
        assignment=assignment,
        orders=job.row_orders,
        buckets=buckets,
        rows_expected=int(scan.rows_per_date[assignment.labels >= 0].sum()),
        compression=job.compression,
    )


ReaderOf = Callable[[int, int], Any]
"""What a task gets to read buckets ``[first, stop)`` from."""


def _move(tasks: _Tasks, units: Sequence[Unit], plan: Plan, plan_future: Future, rows: int) -> tuple[list[UnitSummary], ReaderOf]:
    """Bring the rows of each bucket together, by scratch files or by Dask's P2P shuffle."""
    job, scratch, num_buckets = tasks.job, tasks.staging.scratch, len(plan.buckets.split)
    measure = lambda summary: (summary.rows, summary.nbytes)  # noqa: E731
    if job.exchange == "files":
        arguments = [(unit, plan_future, scratch, job.run, job.source_options) for unit in units]
        summaries = tasks.run("scatter", scatter.scatter_unit, arguments, measure, rows)
        reader = ScratchReader(scratch, len(units), num_buckets, plan.layout)
        return summaries, lambda first, stop: reader
    frames = p2p.exchange(tasks.client, units, plan, plan_future, scratch, job.run, job.source_options)
    p2p.wait(tasks.client, frames)
    summaries = tasks.run("scatter", p2p.read_summary, [(unit, scratch) for unit in units], measure, rows)
    return summaries, lambda first, stop: (first, frames[first:stop], plan.layout)


def _count(tasks: _Tasks, plan: Plan, plan_future: Future, reader_of: ReaderOf) -> list[BucketCount]:
    buckets = range(len(plan.buckets.split))
    arguments = [(bucket, plan_future, reader_of(bucket, bucket + 1)) for bucket in buckets]
    total = plan.rows_expected
    counts: list[BucketCount] = tasks.run("count", _count_bucket, arguments, lambda count: (count.rows, 0), total)
    duplicates = sum(count.duplicates for count in counts)
    if duplicates and plan.rules.duplicates == "error":
        shown = [item for count in counts for item in count.shown]
        lines = ", ".join(
            f"({name!r}, {pd.Timestamp(date)}: {size} rows)" for date, name, size in shown[: gather.SHOWN_DUPLICATES]
        )
        raise DuplicateKeysError(
            f"{duplicates:,} rows repeat the (entity, date) of another: {lines}{', ...' if len(shown) > 10 else ''}. Correct the "
            f"source, or keep one of each by duplicates='first' or 'last' (in the order of the source)."
        )
    return counts


def _count_bucket(bucket: int, plan: Plan, reader: Any) -> BucketCount:
    return gather.count_bucket(bucket, plan, _open_reader(reader))


def _gather_shard(shard: Shard, plan: Plan, reader: Any, *rest: Any) -> ShardSummary:
    return gather.gather_shard(shard, plan, _open_reader(reader), *rest)


def _open_reader(reader: Any) -> Any:
    return p2p.FrameReader(*reader) if isinstance(reader, tuple) else reader


def _make_grids(plan: Plan, shards: Sequence[Shard]) -> dict[str, list[ArrayGrid]]:
    layout = plan.layout
    return {
        name: make_grids(
            name,
            sum(shard.num_rows for shard in shards if shard.split == index),
            num_features=layout.num_features,
            num_targets=layout.num_targets,
            weighted=layout.weighted,
            dtype=layout.dtype,
            chunk_rows=layout.chunk_rows,
            shard_rows=layout.shard_rows,
            compression=plan.compression,
        )
        for index, name in enumerate(plan.assignment.names)
    }


def _gather(
    tasks: _Tasks,
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
    return tasks.run("gather", _gather_shard, arguments, lambda summary: (summary.rows, sum(summary.sizes.values())), total)
