"""What a run would take, by arithmetic: tasks, files, bytes and memory, from footers or from the size of a panel alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from dask.system import CPU_COUNT
from dask.utils import parse_bytes
from distributed.system import MEMORY_LIMIT

from panelflow.budget import Budget, check_budget, largest_of, make_budget, page_bytes_of, unit_bytes_for
from panelflow.errors import OptionError
from panelflow.files import open_input
from panelflow.panel import make_batches, make_units, row_bytes_of
from panelflow.plan import Layout, make_groups, make_layout
from panelflow.source import ENTITY_FROM_NAME, Columns, FileInfo, inspect_file, list_files, select_columns

_SAMPLED_FILES = 16
_SAMPLED_BYTES = 2**16


@dataclass(frozen=True)
class Estimate:
    """What a run takes at most, all rows being written.

    Attributes
    ----------
    rows, features, workers, threads
        Of the panel and of the cluster.
    passes
        1, or 2 where segments of one pass would be too small.
    units
        Pieces of the source, each of which becomes one scratch file.
    shards
        Shards of all splits together, their borders aside.
    tasks
        Tasks of each kind.
    scratch_files, scratch_bytes
        Scratch files, and the bytes in them.
    segments, segment_bytes
        Reads that gather all shards from scratch, and the mean bytes of one.
    output_bytes
        Bytes of the dataset without compression.
    bytes_read, bytes_written
        Bytes that cross the file systems; the source counts with its size, once for keys and once for rows.
    unit_bytes
        Bytes of a unit, decoded.
    worker_bytes, memory_limit
        Memory that a worker needs, by the formula, and what it has.
    """

    rows: int
    features: int
    workers: int
    threads: int
    passes: int
    units: int
    shards: int
    tasks: dict[str, int]
    scratch_files: int
    scratch_bytes: int
    segments: int
    segment_bytes: int
    output_bytes: int
    bytes_read: int
    bytes_written: int
    unit_bytes: int
    worker_bytes: int
    memory_limit: int | None

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def estimate(
    source: Any,
    *,
    entity: str,
    date: str,
    features: Sequence[str],
    targets: Sequence[str],
    weight: str | None = None,
    chunk_rows: int | None = None,
    shard_bytes: int | str = "64MiB",
    dtype: str = "float32",
    workers: int | None = None,
    threads_per_worker: int = 1,
    memory_limit: int | str = "auto",
    storage_options: dict[str, Any] | None = None,
) -> Estimate:
    """Say what :func:`panelflow.prepare` would take, from footers and headers; nothing is read beyond, and nothing written.

    Parameters
    ----------
    source, entity, date, features, targets, weight, chunk_rows, shard_bytes, dtype, storage_options
        As in :func:`panelflow.prepare`; a source of files. Rows of CSV are guessed from the length of its first lines.
    workers, threads_per_worker, memory_limit
        Of the cluster; by default one worker per processor, which share the memory of this machine.

    Returns
    -------
    Estimate

    Raises
    ------
    OptionError
        An argument is wrong, or the workers have too little memory (:class:`MemoryBudgetError`).
    PanelError
        The source is at fault, as far as footers and headers show.
    """
    options = storage_options or {}
    template, entity = (entity, ENTITY_FROM_NAME) if "{entity}" in entity else (None, entity)
    files = list_files(source, template, options)
    with ThreadPoolExecutor() as pool:
        infos = [info for info in pool.map(lambda file: inspect_file(file, options), files) if not info.empty]
    columns = select_columns(infos, entity=entity, date=date, features=features, targets=targets, weight=weight)
    layout = make_layout(columns, dtype, chunk_rows, int(parse_bytes(shard_bytes)))
    count, limit = _cluster(workers, threads_per_worker, memory_limit)
    page_bytes = page_bytes_of(infos, 2 + layout.width)
    units = make_units(infos, columns, unit_bytes_for(limit, threads_per_worker, 2 + layout.width, page_bytes))
    budget = make_budget(layout, largest_of(units), page_bytes, threads_per_worker, limit)
    check_budget(budget, limit)
    return _estimate(
        rows=_count_rows(infos, options),
        layout=layout,
        units=len(units),
        batches=len(make_batches(units)),
        unit_bytes=largest_of(units),
        source_bytes=sum(info.size for info in infos),
        workers=count,
        budget=budget,
        limit=limit,
    )


def estimate_size(
    rows: int,
    features: int,
    *,
    targets: int = 1,
    chunk_rows: int | None = None,
    shard_bytes: int | str = "64MiB",
    dtype: str = "float32",
    workers: int | None = None,
    threads_per_worker: int = 1,
    memory_limit: int | str = "auto",
) -> Estimate:
    """Say what preparing a panel of a size would take, without a panel.

    Parameters
    ----------
    rows, features, targets
        Numbers of rows and of columns. The source is taken to be Parquet of four bytes a value, in small row groups.
    chunk_rows, shard_bytes, dtype, workers, threads_per_worker, memory_limit
        As in :func:`panelflow.estimate`.

    Returns
    -------
    Estimate

    Raises
    ------
    OptionError
        An argument is wrong, or the workers have too little memory (:class:`MemoryBudgetError`).
    """
    names = (tuple(f"f{i}" for i in range(features)), tuple(f"t{i}" for i in range(targets)))
    columns = Columns("entity", "date", *names, None)
    layout = make_layout(columns, dtype, chunk_rows, int(parse_bytes(shard_bytes)))
    count, limit = _cluster(workers, threads_per_worker, memory_limit)
    unit_bytes = unit_bytes_for(limit, threads_per_worker, 2 + layout.width)
    budget = make_budget(layout, unit_bytes, 0, threads_per_worker, limit)
    check_budget(budget, limit)
    units = -(-rows * row_bytes_of(columns) // unit_bytes)
    source_bytes = rows * 4 * (2 + features + targets)
    return _estimate(
        rows=rows,
        layout=layout,
        units=units,
        batches=units,
        unit_bytes=unit_bytes,
        source_bytes=source_bytes,
        workers=count,
        budget=budget,
        limit=limit,
    )


def _cluster(workers: int | None, threads: int, memory_limit: int | str) -> tuple[int, int | None]:
    """Workers and the memory of each, as a local cluster of these options would have them."""
    count = workers or max(CPU_COUNT // threads, 1)
    if memory_limit == "auto":
        return count, int(MEMORY_LIMIT * min(1, threads / CPU_COUNT))
    try:
        return count, int(parse_bytes(memory_limit)) or None
    except ValueError:
        raise OptionError(f"memory_limit is bytes, text such as '1GiB', or 'auto'; memory_limit={memory_limit!r}") from None


def _estimate(
    *,
    rows: int,
    layout: Layout,
    units: int,
    batches: int,
    unit_bytes: int,
    source_bytes: int,
    workers: int,
    budget: Budget,
    limit: int | None,
) -> Estimate:
    block_bytes = rows * layout.row_bytes
    shards = -(-rows // layout.shard_rows)
    buckets = -(-rows // layout.bucket_rows)
    groups = len(make_groups(block_bytes, layout.shard_rows * layout.row_bytes, units, buckets)) - 1
    passes = min(groups, 2)
    second = 0 if passes == 1 else groups * -(-block_bytes // (groups * unit_bytes))
    files_of_a_shard = units if passes == 1 else -(-second // groups)
    segments = shards * files_of_a_shard
    value_bytes = layout.row_bytes + 4  # the date of a row takes 8 bytes in the dataset, 4 in scratch
    return Estimate(
        rows=rows,
        features=layout.num_features,
        workers=workers,
        threads=budget.threads,
        passes=passes,
        units=units,
        shards=shards,
        tasks={"scan": batches, "scatter": batches, "regroup": second, "count": -(-buckets // 64), "gather": shards},
        scratch_files=units + second,
        scratch_bytes=passes * block_bytes,
        segments=segments,
        segment_bytes=block_bytes // max(segments, 1),
        output_bytes=rows * value_bytes,
        bytes_read=2 * source_bytes + passes * block_bytes,
        bytes_written=passes * block_bytes + rows * value_bytes,
        unit_bytes=unit_bytes,
        worker_bytes=budget.worker,
        memory_limit=limit,
    )


def _count_rows(infos: Sequence[FileInfo], options: dict[str, Any]) -> int:
    """Rows by the footers, or by the length of the first lines of some CSV files."""
    text = [info for info in infos if info.file.format == "csv"]
    if not text:
        return sum(sum(info.groups) for info in infos)
    lines = length = 0
    for info in text[:: -(-len(text) // _SAMPLED_FILES)]:
        with open_input(info.file.path, options | {"compression": "infer"}) as stream:
            stream.readline()
            sample = stream.read(_SAMPLED_BYTES)
        lines, length = lines + max(sample.count(b"\n"), 1), length + len(sample)
    packed = 1 if os.path.splitext(text[0].file.path)[1].lower() not in (".gz", ".bz2", ".xz", ".zst") else 4
    return int(sum(info.size for info in text) * packed * lines / max(length, 1))
