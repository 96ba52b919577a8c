"""Panels prepared on Dask, streamed from Zarr, trained by exact PyTorch DDP.

``prepare`` turns a panel into a dataset, ``open`` opens it, ``Loader`` streams it, ``fit`` trains on it under ``launch`` or
``torchrun``, ``evaluate`` and ``predict`` apply a model. Names are imported when they are first used, so that Dask workers
never load torch and training ranks never load Dask.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from panelflow.distributed import launch as launch
    from panelflow.errors import CheckpointError as CheckpointError
    from panelflow.errors import ConservationError as ConservationError
    from panelflow.errors import CorruptDatasetError as CorruptDatasetError
    from panelflow.errors import DatasetBusyError as DatasetBusyError
    from panelflow.errors import DatasetError as DatasetError
    from panelflow.errors import DatasetExistsError as DatasetExistsError
    from panelflow.errors import DatasetNotFoundError as DatasetNotFoundError
    from panelflow.errors import DuplicateKeysError as DuplicateKeysError
    from panelflow.errors import MemoryBudgetError as MemoryBudgetError
    from panelflow.errors import NonFiniteLossError as NonFiniteLossError
    from panelflow.errors import OptionError as OptionError
    from panelflow.errors import PanelError as PanelError
    from panelflow.errors import PanelflowError as PanelflowError
    from panelflow.errors import Preempted as Preempted
    from panelflow.errors import RankError as RankError
    from panelflow.errors import StorageError as StorageError
    from panelflow.errors import WorkerError as WorkerError
    from panelflow.evaluation import evaluate as evaluate
    from panelflow.evaluation import predict as predict
    from panelflow.integrity import verify as verify
    from panelflow.loader import Batch as Batch
    from panelflow.loader import Loader as Loader
    from panelflow.metrics import Metrics as Metrics
    from panelflow.metrics import TargetMetrics as TargetMetrics
    from panelflow.modeling import MLP as MLP
    from panelflow.modeling import Standardized as Standardized
    from panelflow.preparation import prepare as prepare
    from panelflow.record import Result as Result
    from panelflow.sizing import Estimate as Estimate
    from panelflow.sizing import estimate as estimate
    from panelflow.sizing import estimate_size as estimate_size
    from panelflow.splits import DateSplit as DateSplit
    from panelflow.store import Dataset as Dataset
    from panelflow.store import Split as Split
    from panelflow.store import open as open
    from panelflow.trainer import fit as fit

_HOME = {
    "Batch": "loader",
    "CheckpointError": "errors",
    "ConservationError": "errors",
    "CorruptDatasetError": "errors",
    "Dataset": "store",
    "DatasetBusyError": "errors",
    "DatasetError": "errors",
    "DatasetExistsError": "errors",
    "DatasetNotFoundError": "errors",
    "DateSplit": "splits",
    "DuplicateKeysError": "errors",
    "Estimate": "sizing",
    "Loader": "loader",
    "MLP": "modeling",
    "MemoryBudgetError": "errors",
    "Metrics": "metrics",
    "NonFiniteLossError": "errors",
    "OptionError": "errors",
    "PanelError": "errors",
    "PanelflowError": "errors",
    "Preempted": "errors",
    "RankError": "errors",
    "Result": "record",
    "Split": "store",
    "Standardized": "modeling",
    "StorageError": "errors",
    "TargetMetrics": "metrics",
    "WorkerError": "errors",
    "estimate": "sizing",
    "estimate_size": "sizing",
    "evaluate": "evaluation",
    "fit": "trainer",
    "launch": "distributed",
    "open": "store",
    "predict": "evaluation",
    "prepare": "preparation",
    "verify": "integrity",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'panelflow' has no attribute {name!r}")
    return getattr(import_module(f"panelflow.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
