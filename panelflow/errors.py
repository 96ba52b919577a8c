"""Every exception that panelflow raises on purpose.

::

    PanelflowError
    |-- OptionError (ValueError)             the call is at fault: an argument, a range, a pattern
    |   `-- MemoryBudgetError                the options need more memory than the workers have
    |-- PanelError (ValueError)              the source is at fault: a column, a key, a value
    |   `-- DuplicateKeysError               two rows with one (entity, date)
    |-- DatasetError                         the dataset on disk is at fault
    |   |-- DatasetNotFoundError (FileNotFoundError)
    |   |-- DatasetExistsError (FileExistsError)
    |   |-- DatasetBusyError                 another writer holds the lease
    |   `-- CorruptDatasetError              bytes are missing, torn or flipped
    |-- StorageError (OSError)               a disk or object store refused a read or write
    |-- WorkerError (RuntimeError)           Dask workers were lost for good
    |-- ConservationError (RuntimeError)     rows went missing: a defect of panelflow, never of the data
    |-- NonFiniteLossError (ArithmeticError) a training loss is NaN or infinite; names the rows
    |-- CheckpointError                      a checkpoint does not fit the run that wants to resume
    `-- RankError (RuntimeError)             a training rank failed; carries its traceback

``Preempted`` (SystemExit) is no error: the run was asked to stop, saved its state, and the process leaves with exit code 75.

Each is built from one readable paragraph, so that all of them travel between processes by pickle.
"""

from __future__ import annotations


class PanelflowError(Exception):
    """Base class of all errors that panelflow raises on purpose."""


class OptionError(PanelflowError, ValueError):
    """An argument of the call is wrong; the message ends with the offending value."""


class MemoryBudgetError(OptionError):
    """The options need more memory per worker than there is; the message holds the numbers."""


class PanelError(PanelflowError, ValueError):
    """The source panel is at fault; the message names file, column, value and remedy."""


class DuplicateKeysError(PanelError):
    """Several rows share one (entity, date); the message names up to ten of them and the count."""


class DatasetError(PanelflowError):
    """The dataset on disk is at fault."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """There is no committed dataset at this place."""


class DatasetExistsError(DatasetError, FileExistsError):
    """The output exists and ``overwrite`` was not asked for, or is impossible there."""


class DatasetBusyError(DatasetError):
    """Another process is writing this dataset."""


class CorruptDatasetError(DatasetError):
    """A file of the dataset is missing, truncated or altered; the message names it and its rows."""


class StorageError(PanelflowError, OSError):
    """A file system refused a read or a write; the message names the path and the bytes."""


class WorkerError(PanelflowError, RuntimeError):
    """Dask workers were lost so often that the work was given up; finished pieces are kept."""


class ConservationError(PanelflowError, RuntimeError):
    """Row counts or key checksums do not add up; the dataset is not committed."""


class CheckpointError(PanelflowError):
    """A checkpoint is unreadable or belongs to another run."""


class NonFiniteLossError(PanelflowError, ArithmeticError):
    """A training loss is NaN or infinite; the message names the step and rows."""


class RankError(PanelflowError, RuntimeError):
    """A rank of a training job failed; the message carries the traceback of that rank."""


PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Preempted(SystemExit):
    """The run was asked to stop (SIGTERM) and did so after a step.

    Attributes
    ----------
    code : int
        75, the exit code where nobody catches it.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)

    def __reduce__(self) -> tuple[type[Preempted], tuple[()]]:
        return Preempted, ()
