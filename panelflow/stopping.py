"""What ends a training run before its time: a request to stop (SIGTERM), and a loss that is not finite.

Both are flags that travel with the gradient, see :class:`panelflow.replica.Replica`, so that all ranks stop after the same step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from panelflow.distributed import Place, gather_objects, on_sigterm
from panelflow.errors import NonFiniteLossError
from panelflow.loader import Loader

_SHOWN = 5


class Request:
    """Whether this process was asked to stop."""

    received = False

    def receive(self) -> None:
        """Note the request."""
        self.received = True


@contextlib.contextmanager
def heed_sigterm() -> Iterator[Request]:
    """Turn SIGTERM into a flag, for the step under way to be finished first."""
    request = Request()
    with on_sigterm(request.receive):
        yield request


def write_status(folder: str | os.PathLike[str] | None, place: Place, status: str, **figures: Any) -> None:
    """Leave a run's ``status.json``: ``running``, ``preempted`` or ``finished``, and where it stands."""
    if folder is None or not place.is_first:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    partial = Path(folder, "status.tmp")
    partial.write_text(json.dumps({"status": status, **figures}) + "\n")
    partial.replace(Path(folder, "status.json"))


def explain_nonfinite(loader: Loader, epoch: int, losses: Sequence[tuple[int, torch.Tensor]], place: Place) -> NonFiniteLossError:
    """The error of a loss that is not finite, the same on every rank.

    Parameters
    ----------
    losses
        (step, losses of this rank's rows) of the batches of one update.
    """
    mine = [row for step, values in losses for row in _name_rows(loader, epoch, step, values)]
    found = [row for rows in gather_objects(mine, place) for row in rows]
    step = losses[-1][0]
    if not found:
        return NonFiniteLossError(f"The sum of losses overflows at epoch {epoch}, step {step}; nothing was updated.")
    shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    return NonFiniteLossError(
        f"The loss is not finite for {len(found):,} row(s) at epoch {epoch}, step {step} (entity, date, loss): {shown}. This "
        f"update was not made. Look at those rows, lower lr or clip the norm; nonfinite='continue' goes on all the same."
    )


def _name_rows(loader: Loader, epoch: int, step: int, losses: torch.Tensor) -> list[str]:
    """(entity, date, loss) of the rows whose loss is not finite."""
    places = torch.nonzero(~torch.isfinite(losses)).flatten().tolist()
    if not places:
        return []
    split, stored = loader.split, loader.order.epoch(epoch).rows(step, loader.lanes)
    readers = split.readers()
    names = []
    for place in places:
        row = int(stored[place])
        code, date = (int(readers[name].read_rows(row, row + 1)[0]) for name in ("entity", "date"))
        names.append(f"({split.dataset.entity_names[code]!r}, {pd.Timestamp(date)}, {float(losses[place])})")
    return names
