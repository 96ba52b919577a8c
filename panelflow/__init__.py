"""Panels on Dask, training on DDP: N ranks compute exactly what one would have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "DateSplit": "splits",
    "prepare": "preparation",
    "open": "store",
    "verify": "store",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'panelflow' has no attribute {name!r}")
    return getattr(import_module(f"panelflow.{_HOME[name]}"), name)
