"""Checkpoints that exist whole or not at all, the newest whole one being found again."""

from __future__ import annotations

import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panelflow.errors import CheckpointError, StorageError

_NAME = re.compile(r"step-(\d{10})\.pt")
_KEPT = 2


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
