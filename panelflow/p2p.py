"""The same exchange by Dask's own P2P shuffle: for clusters whose workers share no fast scratch, and as the oracle.

Float columns travel as integers of the same width, so that every bit of a NaN arrives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from dask import delayed
from distributed import Client, Future

from panelflow.cluster import Failure, as_they_finish, guarded
from panelflow.errors import PanelflowError, WorkerError
from panelflow.files import Folder
from panelflow.panel import Unit, make_batches
from panelflow.plan import Layout, Plan
from panelflow.scatter import route_units
from panelflow.scratch import Block, Keys, Routed, UnitSummary

_KEYS = ["unit", "row", "code", "date"]


def exchange(
    client: Client, units: Sequence[Unit], plan: Plan, plan_future: Future, scratch: Folder, run: str, options: dict[str, Any]
) -> list[Future]:
    """Shuffle all rows to one data frame per bucket, held by the workers."""
    import dask.dataframe as dd

    columns = [np.empty(0, plan.layout.dtype)] * plan.layout.width
    empty = _frame(0, Routed(columns, np.empty(0, np.int64), np.empty((0, 2), np.int32), np.empty(0, np.int64)))
    routed = [delayed(_route)(batch, plan_future, scratch, options) for batch in make_batches(units)]
    frame = dd.from_delayed(routed, meta=empty, verify_meta=False, prefix=f"panelflow-route-{run[:16]}")
    num_buckets = len(plan.buckets.split)
    shuffled = frame.set_index("bucket", divisions=list(range(num_buckets + 1)), shuffle_method="p2p")
    futures: list[Future] = client.compute(shuffled.to_delayed())
    return futures


def wait(client: Client, frames: Sequence[Future]) -> None:
    """Wait for the shuffle.

    Raises
    ------
    PanelflowError
        What a task met while it read the source.
    """
    for frame in as_they_finish(client, frames):
        if frame.status == "error":
            error = frame.exception()
            cause = error
            while cause is not None and not isinstance(cause, PanelflowError):
                cause = cause.__cause__
            raise cause if cause is not None else WorkerError(f"Dask's P2P shuffle failed: {error}. Run the same call again.")


def summary_name(unit: int) -> str:
    return f"units/{unit:08d}.json"


def read_summary(unit: Unit, scratch: Folder) -> UnitSummary:
    """What routing a unit left about it."""
    return UnitSummary(**json.loads(scratch.read(summary_name(unit.index))))


def _route(units: Sequence[Unit], plan: Plan, scratch: Folder, options: dict[str, Any]) -> pd.DataFrame:
    outcome = guarded(_route_all, units, plan, options)
    if isinstance(outcome, Failure):
        raise outcome.error
    for unit, (_, summary) in zip(units, outcome, strict=True):
        scratch.write(summary_name(unit.index), [json.dumps(asdict(summary)).encode()])
    return pd.concat([_frame(unit.index, routed) for unit, (routed, _) in zip(units, outcome, strict=True)])


def _route_all(units: Sequence[Unit], plan: Plan, options: dict[str, Any]) -> list[tuple[Routed, UnitSummary]]:
    return list(route_units(units, plan, options))


def _frame(unit: int, routed: Routed) -> pd.DataFrame:
    columns = {
        "bucket": routed.buckets,
        "unit": np.full(len(routed), unit, dtype=np.int32),
        "row": np.arange(len(routed), dtype=np.int32),
        "code": routed.keys[:, 0],
        "date": routed.keys[:, 1],
        **{f"v{i}": column[routed.rows].view(f"i{column.itemsize}") for i, column in enumerate(routed.columns)},
    }
    return pd.DataFrame(columns)


class FrameReader:
    """Buckets ``first``, ``first + 1``, ... as data frames, each put back into source order."""

    def __init__(self, first: int, frames: Sequence[pd.DataFrame], layout: Layout) -> None:
        self._first, self._layout = first, layout
        self._frames = [frame.reset_index().sort_values(["unit", "row"]) for frame in frames]

    def _segments(self, first: int, stop: int) -> list[pd.DataFrame]:
        segments = []
        for bucket in range(first, stop):
            frame = self._frames[bucket - self._first]
            segments.append(frame[frame["bucket"] == bucket])
        return segments

    def rows(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        return np.array([len(frame) for frame in self._segments(first, stop)], dtype=np.int64)

    def keys(self, first: int, stop: int) -> list[Keys]:
        return [frame[["code", "date"]].to_numpy(np.int32) for frame in self._segments(first, stop)]

    def read_segment(self, number: int, first: int, stop: int, out: Block) -> None:
        columns = [f"v{i}" for i in range(self._layout.width)]
        values = np.ascontiguousarray(self._segments(first, stop)[number][columns].to_numpy())
        out[:] = values.view(self._layout.dtype)
