"""What a training run is made of: options checked, splits chosen, the optimizer made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from panelflow.errors import OptionError
from panelflow.record import MONITORS
from panelflow.splits import is_training
from panelflow.store import Dataset, Split

VALIDATION = "validation"
"""Name of the split that is validated on where there is one."""
OptimizerFactory = Callable[..., torch.optim.Optimizer]
_OPTIMIZERS: dict[str, OptimizerFactory] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def make_optimizer(optimizer: str | OptimizerFactory, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """An optimizer by name, or what the factory makes of the parameters.

    Raises
    ------
    OptionError
        An unknown name, or a learning rate that the optimizer refuses.
    """
    if callable(optimizer):
        return optimizer(model.parameters())
    if optimizer not in _OPTIMIZERS:
        raise OptionError(f"optimizer is one of {', '.join(_OPTIMIZERS)} or a factory; optimizer={optimizer!r}")
    try:
        return _OPTIMIZERS[optimizer](model.parameters(), lr=float(lr), weight_decay=float(weight_decay))
    except ValueError as error:
        raise OptionError(f"{optimizer} refuses its options ({error}); lr={lr}, weight_decay={weight_decay}") from error


def choose_splits(
    dataset: Dataset, train: str | None, validation: str | None, early_stopping: int | None
) -> tuple[Split, Split | None]:
    """The splits to train and to validate on.

    Raises
    ------
    OptionError
        No such split, or no rows in it.
    """
    if train is None:
        names = [name for name in dataset if is_training(name)]
        if len(names) != 1:
            raise OptionError(f"Name the split to train on; train is one of {names}")
        train = names[0]
    if dataset[train].num_rows == 0:
        raise OptionError(f"The split to train on has no rows; train={train!r}")
    found = None if validation is None else dataset.get(validation)
    if found is None and validation not in (None, VALIDATION):
        raise OptionError(f"The dataset has the splits {list(dataset)}; validation={validation!r}")
    if found is None and early_stopping is not None:
        raise OptionError(f"Early stopping needs a validation split among {list(dataset)}; validation={validation!r}")
    return dataset[train], found


_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16"),
    "monitor": tuple(MONITORS),
    "resume": ("auto", "must", "never"),
    "scheduler_interval": ("epoch", "step"),
    "nonfinite": ("raise", "continue"),
}


def check_options(
    choices: dict[str, str],
    accumulate: int,
    early_stopping: int | None,
    epochs: int,
    checkpoint_every: int | None,
    clip_norm: float | None,
) -> None:
    """Refuse options out of range, with their value."""
    for name, value in choices.items():
        if value not in _CHOICES[name]:
            raise OptionError(f"{name} is one of {', '.join(map(repr, _CHOICES[name]))}; {name}={value!r}")
    counts = {"accumulate": accumulate, "epochs": epochs, "early_stopping": early_stopping, "checkpoint_every": checkpoint_every}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OptionError(f"{name} is at least 1; {name}={count}")
    if clip_norm is not None and not clip_norm > 0:
        raise OptionError(f"A norm to clip at is positive; clip_norm={clip_norm}")
