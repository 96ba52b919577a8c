"""Evaluate a model on a split over all ranks, and predict.

A split in date order is cut into blocks of whole dates, fixed by the dataset and the batch size alone; each rank takes a run
of blocks. So every number of ranks feeds the model the very same batches, and no collective runs inside the loop.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from panelflow.distributed import Place, gather_objects, join
from panelflow.errors import OptionError, StorageError
from panelflow.metrics import DateRecord, Metrics, record_date, summarize
from panelflow.modeling import RowLoss, predict_rows, resolve_loss, row_losses
from panelflow.reading import read_ranges
from panelflow.store import Split

EVALUATION_ROWS = 65536

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """Rows of a block: codes, dates in nanoseconds, targets and predictions [rows, targets], weights, losses [rows]."""

    entity: npt.NDArray[np.int32]
    date: npt.NDArray[np.int64]
    target: Floats
    prediction: Floats
    weight: Floats
    loss: Floats


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    loss: str | RowLoss = "mse",
    batch_size: int = EVALUATION_ROWS,
    precision: str = "fp32",
    device: torch.device | str | None = None,
) -> Metrics:
    """Metrics of a model on a split, the same for every number of ranks.

    Parameters
    ----------
    model
        Maps [rows, num_features] to [rows] or [rows, num_targets].
    split
        Streamed by date where it is stored in date order; a split in hash order is collected first, on every rank: about
        45 bytes a row for one target, three times while it is sorted.
    loss
        As in :func:`panelflow.fit`.
    batch_size
        Rows of a block; a date with more rows is one block.
    precision, device
        As in :func:`panelflow.fit`.

    Returns
    -------
    Metrics
        Equal on every rank: all ranks of a job must call this together.

    Raises
    ------
    OptionError
        The model or the loss returns another shape.
    CorruptDatasetError
        A damaged shard.
    """
    place = join()
    where = torch.device(device) if device is not None else place.device
    model.to(where)
    blocks = list(_score(model, split, resolve_loss(loss), batch_size, precision, where, place))
    if split.date_rows is None:
        blocks = [block for part in gather_objects(blocks, place) for block in part]
        return _metrics(split, [_records(_by_date(blocks), len(split.dataset.targets))] if blocks else [])
    parts = [_records(block, len(split.dataset.targets)) for block in blocks]
    return _metrics(split, [part for rank in gather_objects(parts, place) for part in rank])


@dataclass(frozen=True)
class _Records:
    """Dates of one block: a list for each target, and (loss, weight) sums of each date."""

    targets: list[list[DateRecord]]
    losses: list[tuple[float, float]]


def _records(block: Scored, num_targets: int) -> _Records:
    bounds = np.flatnonzero(np.diff(block.date, prepend=block.date[:1] - 1, append=block.date[-1:] + 1))
    targets: list[list[DateRecord]] = [[] for _ in range(num_targets)]
    losses = []
    for start, stop in pairwise(bounds):
        weight = block.weight[start:stop]
        for number, records in enumerate(targets):
            prediction, target = block.prediction[start:stop, number], block.target[start:stop, number]
            records.append(record_date(int(block.date[start]), prediction, target, weight))
        known = ~np.isnan(block.target[start:stop]).any(axis=1)
        losses.append((float((block.loss[start:stop] * weight)[known].sum()), float(weight[known].sum())))
    return _Records(targets, losses)


def _metrics(split: Split, parts: list[_Records]) -> Metrics:
    names = split.dataset.targets
    total = sum(weight for part in parts for _, weight in part.losses)
    loss = sum(value for part in parts for value, _ in part.losses) / total if total > 0 else float("nan")
    records = {name: [r for part in parts for r in part.targets[number]] for number, name in enumerate(names)}
    return Metrics(loss, {name: summarize(records[name]) for name in names})


def _by_date(blocks: list[Scored]) -> Scored:
    """All rows of a split in hash order, sorted by date and entity."""
    fields = {name: np.concatenate([getattr(b, name) for b in blocks]) for name in Scored.__dataclass_fields__}
    order = np.lexsort((fields["entity"], fields["date"]))
    return Scored(**{name: values[order] for name, values in fields.items()})


@torch.no_grad()  # as a decorator it is off again between two blocks
def _score(
    model: nn.Module, split: Split, loss: RowLoss, batch_size: int, precision: str, device: torch.device, place: Place
) -> Iterator[Scored]:
    """Predictions and losses of this rank's blocks, in stored order."""
    ranges = split_blocks(split, batch_size, place.rank, place.world_size)
    was_training = model.training
    model.eval()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="panelflow-read") as pool:
            for arrays in read_ranges(pool, split.readers(), iter(ranges)):
                features = torch.from_numpy(arrays["features"]).to(device)
                targets = torch.from_numpy(arrays["targets"]).to(device)
                predictions = predict_rows(model, features, targets.shape[1], precision=precision, device=device)
                losses = row_losses(loss, predictions, targets)
                rows = len(features)
                yield Scored(
                    arrays["entity"],
                    arrays["date"],
                    arrays["targets"].astype(np.float64),
                    predictions.double().cpu().numpy(),
                    arrays["weight"].astype(np.float64) if "weight" in arrays else np.ones(rows),
                    losses.double().cpu().numpy(),
                )
    finally:
        model.train(was_training)


def split_blocks(split: Split, batch_size: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Row ranges of the blocks that a rank evaluates: whole dates where the split is stored by date.

    Blocks do not depend on the number of ranks; ranks take runs of them with about equal rows.
    """
    if batch_size < 1:
        raise OptionError(f"A block has at least one row; batch_size={batch_size}")
    if split.date_rows is None:
        stops = [min(start + batch_size, split.num_rows) for start in range(0, split.num_rows, batch_size)]
    else:
        stops = _date_blocks(np.cumsum(split.date_rows[1]), batch_size)
    starts = [0, *stops[:-1]]
    shares = [split.num_rows * part // world_size for part in range(world_size + 1)]
    return [(start, stop) for start, stop in zip(starts, stops, strict=False) if shares[rank] <= start < shares[rank + 1]]


def _date_blocks(ends: npt.NDArray[np.int64], batch_size: int) -> list[int]:
    """Ends of blocks of whole dates with at most ``batch_size`` rows, or one date."""
    stops: list[int] = []
    start, date = 0, 0
    while date < len(ends):
        date = max(int(np.searchsorted(ends, start + batch_size, side="right")), date + 1)
        start = int(ends[date - 1])
        stops.append(start)
    return stops


def predict(
    model: nn.Module,
    split: Split,
    *,
    batch_size: int = EVALUATION_ROWS,
    precision: str = "fp32",
    device: torch.device | str | None = None,
    to: str | os.PathLike[str] | None = None,
) -> pd.DataFrame | None:
    """Predictions of a model for every row of a split, in date order.

    Parameters
    ----------
    model
        For instance ``result.model`` of :func:`panelflow.fit`, which holds its own standardisation.
    split
        Any split; one in hash order is sorted by date and entity, in memory.
    batch_size
        Rows of a block.
    precision, device
        As in :func:`panelflow.fit`; by default a GPU if there is one.
    to
        Write a Parquet file instead of returning a frame: one block in memory at a time, the file appears whole.

    Returns
    -------
    DataFrame or None
        Columns ``entity``, ``date`` (in the zone of the panel), ``target`` and ``prediction`` (with ``_name`` behind them where
        there are several targets), one row for each row of the split. ``None`` under ``to``.

    Raises
    ------
    OptionError
        The model returns another shape.
    CorruptDatasetError
        A damaged shard.
    StorageError
        The Parquet file could not be written.

    Notes
    -----
    Runs in the calling process alone, without any collective, whether or not it is a rank.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model.to(where)
    blocks: Iterator[Scored] = _score(model, split, _no_loss, batch_size, precision, where, Place(0, 1, where))
    if split.date_rows is None:
        collected = list(blocks)
        blocks = iter([_by_date(collected)] if collected else [])
    frames = (_frame(split, block) for block in blocks)
    if to is None:
        parts = list(frames)
        return pd.concat(parts, ignore_index=True) if parts else _frame(split, _empty(split))
    _write_parquet(frames, _frame(split, _empty(split)), os.fspath(to))
    return None


def _no_loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(predictions), device=predictions.device)


def _empty(split: Split) -> Scored:
    none = np.empty((0, len(split.dataset.targets)))
    return Scored(np.empty(0, np.int32), np.empty(0, np.int64), none, none, np.empty(0), np.empty(0))


def _frame(split: Split, block: Scored) -> pd.DataFrame:
    names = split.dataset.targets
    columns: dict[str, Any] = {
        "entity": split.dataset.entity_names[block.entity],
        "date": split.dataset.to_datetime(block.date),
    }
    for number, name in enumerate(names):
        suffix = f"_{name}" if len(names) > 1 else ""
        columns[f"target{suffix}"] = block.target[:, number]
        columns[f"prediction{suffix}"] = block.prediction[:, number]
    return pd.DataFrame(columns)


def _write_parquet(frames: Iterator[pd.DataFrame], empty: pd.DataFrame, path: str) -> None:
    partial = f"{path}.{uuid.uuid4().hex}.tmp"
    schema = pa.Schema.from_pandas(empty, preserve_index=False)
    if pa.types.is_null(schema.field("entity").type):
        schema = schema.set(0, pa.field("entity", pa.string()))
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for frame in frames:
                writer.write_table(pa.Table.from_pandas(frame, schema=schema, preserve_index=False))
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"The predictions {path} could not be written: {error.strerror or error}") from error
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
