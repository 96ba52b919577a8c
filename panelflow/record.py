"""What is known of a training run besides its parameters: figures by epoch, the best weights, whether to stop."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from panelflow.metrics import Metrics

MONITORS = {"loss": "min", "r2": "max", "r2_zero": "max", "ic": "max", "icir": "max", "rank_ic": "max", "rank_icir": "max"}
"""Metrics that can be monitored, and whether the least or the greatest is best."""


@dataclass(frozen=True)
class Result:
    """What :func:`fit` returns on every rank.

    Attributes
    ----------
    model
        The trained model on its device, standardisation included: the best epoch's where early stopping is on, else the last.
    history
        One entry for each epoch: ``epoch``, ``train_loss``, ``steps``, ``seconds``, ``learning_rate`` and ``validation``.
    best_epoch
        Epoch with the best monitored metric, ``None`` without validation.
    best_state, last_state
        State dicts of both, on the CPU; ``best_state`` is ``None`` without validation.
    stopped_early
        Whether patience ended the run.
    """

    model: nn.Module
    history: list[dict[str, Any]]
    best_epoch: int | None
    best_state: dict[str, Any] | None
    last_state: dict[str, Any]
    stopped_early: bool

    def to_pandas(self) -> pd.DataFrame:
        """The history as a data frame indexed by epoch; figures of the validation split are columns ``validation_...``."""
        return pd.json_normalize(self.history, sep="_").set_index("epoch")


@dataclass
class Record:
    """State of a run that each checkpoint saves.

    Attributes
    ----------
    updates
        Optimizer steps taken.
    sums
        Weighted loss and weight of the running epoch, over all ranks.
    seconds
        Time spent in the running epoch.
    best, best_epoch, best_state
        Best monitored value, its epoch, and the weights then.
    """

    updates: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    best_epoch: int | None = None
    best_state: dict[str, Any] | None = None
    stopped_early: bool = False

    def end_epoch(
        self,
        epoch: int,
        figures: dict[str, Any],
        metrics: Metrics | None,
        monitor: str,
        patience: int | None,
        model: nn.Module,
    ) -> None:
        """Add an epoch to the history, keep the weights if they are the best, and see whether patience is at its end."""
        loss, weight = self.sums
        entry = {
            "epoch": epoch,
            "train_loss": loss / weight if weight > 0 else None,
            **figures,
            "updates": self.updates,
            "seconds": self.seconds,
            "validation": None if metrics is None else metrics.as_dict(),
        }
        self.history.append(entry)
        self.sums, self.seconds = [0.0, 0.0], 0.0
        if metrics is not None and self._improves(metrics.value(monitor), monitor):
            self.best, self.best_epoch = metrics.value(monitor), epoch
            self.best_state = _on_cpu(model.state_dict())
        since_best = epoch - (-1 if self.best_epoch is None else self.best_epoch)
        self.stopped_early = patience is not None and since_best >= patience

    def _improves(self, value: float, monitor: str) -> bool:
        if not math.isfinite(value) or self.best is None:
            return math.isfinite(value)
        return value < self.best if MONITORS[monitor] == "min" else value > self.best

    def write(self, path: Path) -> None:
        """Write the history as JSON lines, whole or not at all."""
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in self.history))
        partial.replace(path)

    def result(self, model: nn.Module, *, choose_best: bool) -> Result:
        """The outcome; the model gets its best weights back where ``choose_best``."""
        last = _on_cpu(model.state_dict())
        if choose_best and self.best_state is not None:
            model.load_state_dict(self.best_state)
        model.eval()
        return Result(model, self.history, self.best_epoch, self.best_state, last, self.stopped_early)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value).cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
