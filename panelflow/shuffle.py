"""Run scan, scatter, count, gather and commit on a Dask cluster.

Only counts, checksums, distinct keys and statistics come back to the client. Each task owns its output file, writes it whole
and finds it again when it runs a second time, so that a lost worker or a killed run costs what was under way and no more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from distributed import Client

from panelflow.allocator import keep_pages, release_pages
from panelflow.budget import check_budget, largest_of, make_budget, page_bytes_of, unit_bytes_for
from panelflow.cluster import Failure, Workers, as_they_finish, ask_everywhere, collect, guarded, let_go
from panelflow.errors import PanelError
from panelflow.exchange import count_rows, gather_shards, move_rows
from panelflow.format import make_grids, write_manifest, write_metadata
from panelflow.manifest import Job, describe_content, describe_provenance, describe_storage, prove_conservation
from panelflow.panel import Unit, make_batches, make_units
from panelflow.plan import Layout, Plan, Shard, make_buckets, make_groups, make_shards
from panelflow.progress import Reporter
from panelflow.scan import Scan, merge_scans, scan_units
from panelflow.scatter import add_summaries
from panelflow.scratch import UnitSummary
from panelflow.shards import ArrayGrid
from panelflow.source import Columns, FileInfo
from panelflow.splits import assign, check_not_empty
from panelflow.staging import Staging
from panelflow.tasks import Tasks

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
    page_bytes = page_bytes_of(infos, 2 + layout.width)
    unit_bytes = unit_bytes_for(workers.memory_limit, workers.threads, 2 + layout.width, page_bytes)
    units = make_units(infos, columns, unit_bytes)
    budget = make_budget(layout, largest_of(units), page_bytes, workers.threads, workers.memory_limit)
    check_budget(budget, workers.memory_limit)
    tasks = Tasks(client, job, staging, reporter)
    ask_everywhere(client, keep_pages, budget.spare)
    try:
        scan = _scan(tasks, units, columns)
        plan = _plan(scan, columns, layout, job, len(units))
        plan_future = client.submit(_same, plan, key=tasks.key("plan"), pure=False)
        tasks.held.append(plan_future)
        summaries, reader_of = move_rows(tasks, units, plan, plan_future, scan.rows, largest_of(units))
        counts = count_rows(tasks, plan, plan_future, reader_of)
        rows = np.array([count.rows for count in counts], dtype=np.int64)
        shards = make_shards(plan.buckets, rows, len(plan.orders), layout.shard_rows)
        total = add_summaries(summaries)
        if not job.allow_empty:
            _check_not_emptied(plan, shards, total)
        grids = _make_grids(plan, shards)
        written = gather_shards(tasks, plan, plan_future, shards, grids, reader_of)
    finally:
        let_go(tasks.held)
        ask_everywhere(client, release_pages)
    conservation = prove_conservation(plan, scan, total, counts, written)
    content = describe_content(plan, job, total, written, conservation)
    write_metadata(staging.dataset, grids, features=columns.features, targets=columns.targets, names=plan.names)
    provenance = describe_provenance(job, budget, summaries, written, started, reporter.seconds)
    write_manifest(staging.dataset, content, describe_storage(plan, written), provenance)


def _same(plan: Plan) -> Plan:
    """The plan as the result of a task, so that the scheduler can make it again where a worker is lost."""
    return plan


def _scan(tasks: Tasks, units: Sequence[Unit], columns: Columns) -> Scan:
    """Scan every unit and merge the scans on the workers; only the last comes here."""
    client, reporter, job = tasks.client, tasks.reporter, tasks.job
    reporter.phase("scan", sum(unit.nbytes for unit in units), "bytes")
    batches = make_batches(units)
    futures = [
        client.submit(guarded, scan_units, batch, columns, job.seed, job.source_options, key=f"{tasks.key('scan')}-{i}")
        for i, batch in enumerate(batches)
    ]
    tasks.held += futures
    sizes = {future.key: sum(unit.nbytes for unit in batch) for future, batch in zip(futures, batches, strict=True)}
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


def _plan(scan: Scan, columns: Columns, layout: Layout, job: Job, num_units: int) -> Plan:
    zone, kind = next(iter(scan.zones)), next(iter(scan.kinds))
    assignment = assign(job.split, scan.dates, zone=zone, horizon=job.horizon, embargo=job.embargo)
    if not job.allow_empty:
        check_not_empty(assignment, scan.dates, scan.rows_per_date)
    buckets = make_buckets(assignment, scan.rows_per_date, job.row_orders, layout.bucket_rows)
    rows = int(scan.rows_per_date[assignment.labels >= 0].sum())
    shard_bytes = layout.shard_rows * layout.row_bytes
    groups = make_groups(rows * layout.row_bytes, shard_bytes, num_units, len(buckets.split))
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
        groups=groups,
        rows_expected=rows,
        compression=job.compression,
    )


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
