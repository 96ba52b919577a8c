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
from panelflow.allocator import keep_pages, release_pages
from panelflow.cluster import Failure, Workers, as_they_finish, collect, guarded, run_everywhere, run_tasks
from panelflow.count import SHOWN_DUPLICATES, BucketCount, count_distinct, count_written
from panelflow.errors import DuplicateKeysError, PanelError
from panelflow.format import make_grids, write_manifest, write_metadata
from panelflow.gather import ShardSummary
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
_COUNTED_AT_ONCE = 64


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
    run_everywhere(client, keep_pages)
    try:
        scan = _scan(tasks, units, columns)
        plan = _plan(scan, columns, layout, job)
        plan_future = client.submit(_same, plan, key=tasks.key("plan"), pure=False)
        tasks.held.append(plan_future)
        summaries, reader_of = _move(tasks, units, plan, plan_future, scan.rows)
        counts = _count(tasks, plan, plan_future, reader_of)
        rows = np.array([count.rows for count in counts], dtype=np.int64)
        shards = make_shards(plan.buckets, rows, len(plan.orders), layout.shard_rows)
        total = scatter.add_summaries(summaries)
        if not job.allow_empty:
            _check_not_emptied(plan, shards, total)
        grids = _make_grids(plan, shards)
        written = _gather(tasks, plan, plan_future, shards, grids, reader_of)
    finally:
        client.cancel(tasks.held, force=True)
        run_everywhere(client, release_pages)
    conservation = prove_conservation(plan, scan, total, counts, written)
    content = describe_content(plan, job, total, written, conservation)
    write_metadata(staging.dataset, grids, features=columns.features, targets=columns.targets, names=plan.names)
    write_manifest(
        staging.dataset, content, describe_storage(plan, written), describe_provenance(job, budget, summaries, written, started)
    )


def _same(plan: Plan) -> Plan:
    """The plan as the result of a task, so that the scheduler can make it again where a worker is lost."""
    return plan


class _Tasks:
    """Runs one kind of task after another and reports them; ``held`` are futures to be let go at the end."""

    def __init__(self, client: Client, job: Job, staging: Staging, reporter: Reporter) -> None:
        self.client, self.job, self.staging, self.reporter = client, job, staging, reporter
        self.held: list[Future] = []
        self._nonce = time.time_ns()

    def key(self, name: str) -> str:
        """Key of a kind of task, of this call alone."""
        return f"panelflow-{name}-{self.job.run[:16]}-{self._nonce}"

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
        results = run_tasks(
            self.client, function, arguments, self.key(name), lambda result: self.reporter.advance(*measure(result))
        )
        reused = sum(bool(getattr(result, "reused", False)) for result in results)
        self.reporter.finish(f"{reused} of {len(results)} pieces were there already" if reused else "")
        return results


def _scan(tasks: _Tasks, units: Sequence[Unit], columns: Columns) -> Scan:
    """Scan every unit and merge the scans on the workers; only the last comes here."""
    client, reporter, job = tasks.client, tasks.reporter, tasks.job
    reporter.phase("scan", sum(unit.nbytes for unit in units), "bytes")
    futures = [
        client.submit(guarded, scan_unit, unit, columns, job.seed, job.source_options, key=f"{tasks.key('scan')}-{unit.index}")
        for unit in units
    ]
    tasks.held += futures
    sizes = {future.key: unit.nbytes for future, unit in zip(futures, units, strict=True)}
    merged, level = futures, 0
    while len(merged) > 1:
        groups = [merged[start : start + _MERGED_AT_ONCE] for start in range(0, len(merged), _MERGED_AT_ONCE)]
        level += 1
        merged = [client.submit(_merge, group, key=f"{tasks.key('merge')}-{level}-{i}") for i, group in enumerate(groups)]
        tasks.held += merged
    for future in as_they_finish(client, futures):
        reporter.advance(sizes[future.key])
    results: list[Scan] = collect(client, merged)
    reporter.finish()
    if not results or results[0].rows == 0:
        raise PanelError(f"The source has no rows: {job.source_text}")
    return results[0]


def _merge(scans: Sequence[Scan | Failure]) -> Scan | Failure:
    """One scan of several, or the first failure in the order of the source."""
    for scan in scans:
        if isinstance(scan, Failure):
            return scan
    merged: Scan | Failure = guarded(merge_scans, scans)
    return merged


def _check_not_emptied(plan: Plan, shards: Sequence[Shard], total: UnitSummary) -> None:
    for index, name in enumerate(plan.assignment.names):
        if not any(shard.split == index for shard in shards):
            raise PanelError(
                f"Split {name!r} ends up without rows: {total.missing_target[index]:,} rows of its dates have no target. Fill "
                f"the targets, move the range, pass missing_target='keep' (evaluation splits), or allow_empty=True."
            )


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
    if job.exchange == "files" or num_buckets == 0:
        arguments = [(unit, plan_future, scratch, job.run, job.source_options) for unit in units]
        summaries = tasks.run("scatter", scatter.scatter_unit, arguments, measure, rows)
        reader = ScratchReader(scratch, len(units), num_buckets, plan.layout)
        return summaries, lambda first, stop: reader
    frames = p2p.exchange(tasks.client, units, plan, plan_future, scratch, job.run, job.source_options)
    tasks.held += frames
    p2p.wait(tasks.client, frames)
    summaries = tasks.run("scatter", p2p.read_summary, [(unit, scratch) for unit in units], measure, rows)
    return summaries, lambda first, stop: (first, frames[first:stop], plan.layout)


def _count(tasks: _Tasks, plan: Plan, plan_future: Future, reader_of: ReaderOf) -> list[BucketCount]:
    """Final rows of every bucket, in their order."""
    num_buckets, total = len(plan.buckets.split), plan.rows_expected
    if plan.rules.duplicates != "error":
        return _count_distinct(tasks, plan, plan_future, reader_of)
    step = 1 if tasks.job.exchange == "p2p" else _COUNTED_AT_ONCE  # frames would travel to be counted, files do not
    ranges = [(first, min(first + step, num_buckets)) for first in range(0, num_buckets, step)]
    arguments = [(*bounds, reader_of(*bounds)) for bounds in ranges]
    measure = lambda counts: (sum(count.rows for count in counts), 0)  # noqa: E731
    return [item for counts in tasks.run("count", _count_written, arguments, measure, total) for item in counts]


def _count_distinct(tasks: _Tasks, plan: Plan, plan_future: Future, reader_of: ReaderOf) -> list[BucketCount]:
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
    measure = lambda summary: (summary.rows, sum(summary.sizes.values()))  # noqa: E731
    try:
        return tasks.run("gather", _gather_shard, arguments, measure, total)
    except DuplicateKeysError:
        raise _explain_duplicates(_count_distinct(tasks, plan, plan_future, reader_of)) from None
