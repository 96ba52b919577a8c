"""Checkpoints that exist whole or not at all, the newest whole one being found again."""

from __future__ import annotations

import io
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from panelflow.errors import CheckpointError, OptionError, StorageError
from panelflow.loader import Loader
from panelflow.record import Record

_NAME = re.compile(r"step-(\d{10})\.pt")
_KEPT = 2


@dataclass
class RunState:
    """All that a checkpoint holds; ``recipe`` is what must be the same for a run to be one run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    loader: Loader
    record: Record
    recipe: dict[str, Any]

    def state_dict(self, sums: list[float]) -> dict[str, Any]:
        """The state as plain values; ``sums`` of the running epoch over all ranks."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "progress": {**vars(self.record), "sums": sums},
            "recipe": self.recipe,
        }

    def load_state_dict(self, saved: dict[str, Any], folder: str | os.PathLike[str]) -> Record:
        """Take over a saved state; returns its record.

        Raises
        ------
        CheckpointError
            It is the state of another dataset, order, model or recipe.
        """
        self.loader.load_state_dict(saved["loader"])
        for name, value in self.recipe.items():
            if saved["recipe"][name] != value:
                raise CheckpointError(
                    f"The run in {os.fspath(folder)} has {name}={saved['recipe'][name]!r} and cannot go on with {value!r}."
                )
        try:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"The checkpoint in {os.fspath(folder)} is of another model: {error}") from error
        if self.scheduler is not None and saved["scheduler"] is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        return Record(**saved["progress"])


def save(folder: str | os.PathLike[str], updates: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint beside its name, flush it, rename it, and drop all but the newest two.

    Raises
    ------
    StorageError
        The disk refused; older checkpoints stay.
    """
    path = Path(folder, f"step-{updates:010d}.pt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, state)
    except OSError as error:
        raise StorageError(
            f"The checkpoint {path} could not be written: {error.strerror or error}. Older ones are kept."
        ) from error
    for old in list_checkpoints(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def write_atomic(path: Path, state: Any) -> None:
    """``torch.save`` that leaves either the old file or the whole new one, also through a power cut."""
    buffer = io.BytesIO()  # torch hides the error of a full disk
    torch.save(_plain(state), buffer)
    partial = path.with_suffix(".tmp")
    try:
        with open(partial, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """The same with numpy scalars as Python numbers, which safe loading accepts."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    if not os.path.isdir(folder):
        return []
    return sorted(path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name))


def find(folder: str | os.PathLike[str] | None, resume: str) -> dict[str, Any] | None:
    """The checkpoint to go on from, ``None`` where there is none; ``resume`` as in :func:`panelflow.fit`.

    Raises
    ------
    OptionError, CheckpointError
        There is none and must be one, or there is one and may be none.
    """
    if folder is None:
        if resume == "must":
            raise OptionError("resume='must' needs a checkpoint_dir")
        return None
    saved = load_newest(folder)
    if saved is None and resume == "must":
        raise CheckpointError(f"There is no checkpoint in {os.fspath(folder)} to resume from.")
    if saved is not None and resume == "never":
        raise CheckpointError(f"{os.fspath(folder)} holds checkpoints of a run; resume it or choose another folder.")
    return saved


def load_newest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, ``None`` where there is none.

    Raises
    ------
    CheckpointError
        There are checkpoints, but none is whole.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            warnings.warn(f"{path} is not whole, or not a checkpoint of panelflow, and is passed over: {error}", stacklevel=2)
            continue
        return state
    if paths:
        raise CheckpointError(f"None of the {len(paths)} checkpoints in {folder} can be read; move them away to start afresh.")
    return None
