"""``prepare``: check every option, then turn a panel into a dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from dask.base import tokenize
from dask.utils import parse_bytes
from distributed import Client

from panelflow import frames
from panelflow.budget import page_bytes_of, unit_bytes_for
from panelflow.cluster import check_shared, connect, run_tasks, survey
from panelflow.errors import OptionError, PanelError
from panelflow.files import Folder
from panelflow.format import FORMAT_VERSION
from panelflow.hashing import HASH_VERSION
from panelflow.manifest import Job
from panelflow.plan import Rules, make_layout
from panelflow.progress import Reporter
from panelflow.shuffle import shuffle
from panelflow.source import ENTITY_FROM_NAME, FileInfo, SourceFile, inspect_file, list_files, select_columns
from panelflow.splits import DateSplit, is_training
from panelflow.staging import check_output, stage
from panelflow.store import Dataset

_CHOICES = {
    "duplicates": ("error", "first", "last"),
    "missing_target": ("drop", "error", "keep"),
    "infinite": ("error", "missing"),
    "empty_files": ("skip", "error"),
    "exchange": ("files", "p2p"),
    "compression": (None, "zstd"),
    "dtype": ("float16", "float32", "float64"),
}
_ORDERS = ("auto", "hash", "date")


def prepare(
    source: Any,
    output: str | os.PathLike[str],
    *,
    entity: str,
    date: str,
    features: Sequence[str],
    targets: Sequence[str],
    split: DateSplit,
    horizon: int,
    weight: str | None = None,
    embargo: int = 0,
    seed: int = 0,
    client: Client | None = None,
    scratch: str | os.PathLike[str] | None = None,
    duplicates: str = "error",
    missing_target: str = "drop",
    infinite: str = "error",
    empty_files: str = "skip",
    row_order: str | Mapping[str, str] = "auto",
    exchange: str = "files",
    chunk_rows: int | None = None,
    shard_bytes: int | str = "64MiB",
    compression: str | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
    resume: bool = True,
    allow_empty: bool = False,
    workers: int | None = None,
    threads_per_worker: int = 1,
    memory_limit: int | str = "auto",
    storage_options: dict[str, Any] | None = None,
    output_options: dict[str, Any] | None = None,
    progress: bool = True,
) -> Dataset:
    """Turn a panel into date-split, hash-shuffled Zarr arrays.

    Parameters
    ----------
    source
        A path, glob or list of Parquet or CSV files or directories (hive-partitioned too, local or any fsspec URL), a pandas
        DataFrame, or a Dask DataFrame. Keys in CSV files and in hive paths are read as text. A CSV file larger than a unit is
        cut at line ends, and must not hold line breaks inside quotes.
    output
        Where the dataset appears: a local path or an fsspec URL.
    entity
        Column of the instrument (text, integers or categories), or a file name template such as ``"{entity}_data.csv"``.
    date
        Column of the date: datetime64 of any unit, date32, ISO text, or yyyymmdd. It may carry a time of day and a zone.
    features, targets
        Column names or glob patterns, which expand to sorted names and never take keys, targets or weight.
    split
        Named, disjoint, half-open date ranges.
    horizon
        Number of observed dates after which a label is known. A date of a training split goes where its label window
        [date, date + horizon] meets that of an evaluation split; between two evaluation splits the earlier one loses it.
    weight
        Column of sample weights, finite and >= 0.
    embargo
        Further observed dates that training loses after an evaluation range.
    seed
        Any integer; another seed gives another order of rows.
    client
        A Dask client, left as it is found; by default the current one, else a local cluster for this call.
    scratch
        Folder for scratch files that all workers see; beside the output by default. Holds about the bytes of the output, twice
        where :func:`panelflow.estimate` says two passes. On an object store it is opened with ``output_options``.
    duplicates
        ``"error"``, or keep the ``"first"`` or ``"last"`` row of a key in canonical order (sorted path, then row).
    missing_target
        ``"drop"`` and count, ``"error"``, or ``"keep"`` such rows in evaluation splits, where metrics skip them.
    infinite
        ``"error"``, or turn infinite features to ``"missing"`` and count them.
    empty_files
        ``"skip"`` and name files of no bytes or no rows, or ``"error"``.
    row_order
        ``"auto"`` (training by hash, evaluation by date), ``"hash"`` or ``"date"``, for all splits or by name.
    exchange
        ``"files"``, or ``"p2p"`` for Dask's own shuffle; the result is the same.
    chunk_rows
        Rows of an inner chunk, a power of two; by default 1 to 2 MiB of features.
    shard_bytes
        Bytes of a shard of features, as a number or text such as ``"64MiB"``.
    compression
        ``None`` or ``"zstd"``.
    dtype
        ``"float32"``, ``"float16"`` or ``"float64"`` of features, targets and weight. A value that overflows is refused.
    overwrite
        Replace a dataset, in one step once the new one is whole.
    resume
        Keep finished pieces when a run fails or is stopped, and go on from those of an earlier call with the same options and
        source; ``False`` starts afresh and leaves nothing.
    allow_empty
        Accept splits without rows.
    workers, threads_per_worker, memory_limit
        Of the local cluster, where one is started; as in :class:`distributed.LocalCluster`.
    storage_options, output_options
        fsspec options of the source and of the output.
    progress
        Report progress on standard error.

    Returns
    -------
    Dataset
        The committed dataset.

    Raises
    ------
    OptionError
        An argument is wrong, or the workers have too little memory (:class:`MemoryBudgetError`).
    PanelError
        The source is at fault; names file, column, value and remedy. Nothing is left behind.
    DatasetExistsError, DatasetBusyError
        The output is taken.
    StorageError, WorkerError
        A disk or the cluster failed; finished pieces are kept and the same call continues.

    Notes
    -----
    Deterministic: the values depend on the rows, these options and the seed only, not on workers, partitioning, row order of
    the source, exchange, or memory. Memory of a worker: :func:`panelflow.plan.make_budget`, independent of the number of rows.
    """
    rules = Rules(duplicates, missing_target, infinite)
    _check_choices(rules, empty_files, exchange, compression, dtype)
    _check_numbers(horizon=horizon, embargo=embargo)
    if not isinstance(seed, int | np.integer):
        raise OptionError(f"The seed is an integer; seed={seed!r}")
    if not isinstance(split, DateSplit):
        raise OptionError(f"split wants a DateSplit; split={split!r}")
    orders = _resolve_orders(row_order, split)
    template, entity = (entity, ENTITY_FROM_NAME) if "{entity}" in entity else (None, entity)
    target = Folder(_absolute(output), output_options or {})
    check_output(target, overwrite)
    roles = {"entity": entity, "date": date, "features": features, "targets": targets, "weight": weight}
    with connect(client, workers=workers, threads_per_worker=threads_per_worker, memory_limit=memory_limit) as dask_client:
        available = survey(dask_client)
        listed = _inspect_source(dask_client, source, template, storage_options or {})
        infos = leave_out_empty(listed, empty_files)
        columns = select_columns(infos, **roles)  # type: ignore[arg-type]  # the roles are spelled once, above
        layout = make_layout(columns, dtype, chunk_rows, _parse_bytes(shard_bytes))
        options = [roles, template, repr(split), horizon, embargo, int(seed), repr(rules), orders, exchange, compression]
        num_columns = 2 + layout.width
        # How the source is cut, and not the workers themselves: a run goes on with more or fewer of them.
        cut = unit_bytes_for(available.memory_limit, available.threads, num_columns, page_bytes_of(infos, num_columns))
        run = _digest_run(options, repr(layout), cut, _fingerprint(source, listed))
        job = Job(
            split=split,
            horizon=horizon,
            embargo=embargo,
            seed=int(seed),
            rules=rules,
            row_orders=orders,
            exchange=exchange,
            compression=compression,
            allow_empty=allow_empty,
            source_options=storage_options or {},
            source_text=_describe(source),
            empty_files=[info.file.shown for info in listed if info.empty],
            run=run,
        )
        scratch_folder = None if scratch is None else _scratch_folder(_absolute(scratch), target)
        with Reporter(progress) as reporter, stage(target, scratch_folder, run, overwrite, resume=resume) as staging:
            if frames.is_frame(source):
                names = [*columns.keys, *columns.floats]
                files = frames.spool(dask_client, source, names, staging.scratch)
                job = replace(job, source_options=staging.scratch.options)
                infos = _inspect_files(dask_client, files, job.source_options)
                columns = select_columns(infos, **roles)  # type: ignore[arg-type]  # as above
            check_shared(dask_client, {staging.scratch.url: staging.scratch, staging.dataset.url: staging.dataset}.values())
            shuffle(dask_client, available, infos, columns, layout, job, staging, reporter)
            staging.commit(overwrite)
    return Dataset(target)


def _digest_run(*parts: Any) -> str:
    """Digest of all that scratch files depend on: another one starts afresh."""
    versions = [version("panelflow"), HASH_VERSION, FORMAT_VERSION]
    return hashlib.sha256(json.dumps([versions, *parts], sort_keys=True, default=str).encode()).hexdigest()


def _check_choices(rules: Rules, empty_files: str, exchange: str, compression: str | None, dtype: str) -> None:
    given = {
        "duplicates": rules.duplicates,
        "missing_target": rules.missing_target,
        "infinite": rules.infinite,
        "empty_files": empty_files,
        "exchange": exchange,
        "compression": compression,
        "dtype": dtype,
    }
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise OptionError(f"{name} is one of {', '.join(map(repr, _CHOICES[name]))}; {name}={value!r}")


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
            raise OptionError(f"{name} is a number of observed dates, 0 or more; {name}={value!r}")


def _resolve_orders(row_order: str | Mapping[str, str], split: DateSplit) -> tuple[str, ...]:
    given = row_order if isinstance(row_order, Mapping) else dict.fromkeys(split, row_order)
    for name, order in given.items():
        if name not in split:
            raise OptionError(f"row_order names a split that is not declared: {name!r}")
        if order not in _ORDERS:
            raise OptionError(f"row_order is one of {', '.join(map(repr, _ORDERS))}; row_order={order!r}")
    automatic = {name: "hash" if is_training(name) else "date" for name in split}
    chosen = {name: given.get(name, "auto") for name in split}
    return tuple(automatic[name] if order == "auto" else order for name, order in chosen.items())


def _parse_bytes(size: int | str) -> int:
    try:
        return int(parse_bytes(size))
    except (ValueError, TypeError, AttributeError):
        raise OptionError(f"shard_bytes is a number of bytes or text such as '64MiB'; shard_bytes={size!r}") from None


def _absolute(path: str | os.PathLike[str]) -> str:
    """A local path as workers elsewhere see it; URLs stay as they are."""
    text = os.fspath(path)
    return text if "://" in text else os.path.realpath(os.path.expanduser(text))


def _scratch_folder(place: str, output: Folder) -> Folder:
    """Scratch, opened with the options of the output where it lies on storage of the same kind."""
    same = place.partition("://")[0] == str(output.url).partition("://")[0] and "://" in place
    return Folder(place, output.options if same else {})


def _inspect_source(client: Client, source: Any, template: str | None, options: dict[str, Any]) -> list[FileInfo]:
    if frames.is_frame(source):
        if template is not None:
            raise OptionError(f"A file name template needs files, not a data frame; entity={template!r}")
        return [frames.frame_info(source)]
    return _inspect_files(client, list_files(source, template, options), options)


def leave_out_empty(infos: Sequence[FileInfo], empty_files: str) -> list[FileInfo]:
    """Files with rows in them.

    Raises
    ------
    PanelError
        No such file, or an empty one that the rule forbids.
    """
    empty = [info.file.shown for info in infos if info.empty]
    if empty and (empty_files == "error" or len(empty) == len(infos)):
        names = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise PanelError(
            f"{len(empty):,} of {len(infos):,} files hold no rows; remove them, or pass empty_files='skip' where others have "
            f"some: {names}"
        )
    return [info for info in infos if not info.empty]


def _inspect_files(client: Client, files: Sequence[SourceFile], options: dict[str, Any]) -> list[FileInfo]:
    groups = [files[start : start + 64] for start in range(0, len(files), 64)]
    key = f"panelflow-inspect-{os.urandom(8).hex()}"
    inspected = run_tasks(client, _inspect_group, [(group, options) for group in groups], key)
    return [info for group in inspected for info in group]


def _inspect_group(files: Sequence[SourceFile], options: dict[str, Any]) -> list[FileInfo]:
    return [inspect_file(file, options) for file in files]


def _fingerprint(source: Any, infos: Sequence[FileInfo]) -> list[Any]:
    """What tells this source from another, so that a run continues only over the same one."""
    if frames.is_frame(source):
        return [tokenize(source)]
    return [(info.file.path, info.size, info.changed) for info in infos]


def _describe(source: Any) -> str:
    if frames.is_frame(source):
        return f"a {type(source).__module__.split('.')[0]} data frame"
    return str([os.fspath(item) for item in source] if isinstance(source, list | tuple) else os.fspath(source))
