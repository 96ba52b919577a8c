"""What stands around the user's network: standardised inputs in front of it, losses per row behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from panelflow.errors import OptionError
from panelflow.store import Dataset

RowLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(predictions [rows, targets], targets [rows, targets]) -> losses [rows]."""


class Standardized(nn.Module):
    """A network behind the standardisation of its inputs.

    The training statistics are buffers, so that they travel with the weights and no other dataset's are ever used. A missing
    value becomes 0 after standardising, the mean that is; a constant or never observed column becomes 0.

    Parameters
    ----------
    model
        Maps [rows, num_features] to [rows] or [rows, num_targets].
    mean, scale
        float [num_features]; ``scale`` is 1 / standard deviation, or 0.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, model: nn.Module, mean: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Standardise and apply the network."""
        inputs = (features.to(self.mean.dtype) - self.mean) * self.scale
        predictions: torch.Tensor = self.model(torch.nan_to_num(inputs, nan=0.0))
        return predictions


def standardize(model: nn.Module, dataset: Dataset) -> Standardized:
    """Put the training statistics of a dataset in front of a network, in the dtype of its parameters."""
    table = dataset.statistics
    constant = ~(table["max"].astype(float) > table["min"].astype(float))
    mean = table["mean"].astype(float).fillna(0.0).to_numpy()
    deviation = table["std"].astype(float).to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(constant | ~(deviation > 0), 0.0, 1.0 / deviation)
    dtype, device = dtype_of(model), next((p.device for p in model.parameters()), torch.device("cpu"))
    return Standardized(model, torch.tensor(mean, dtype=dtype, device=device), torch.tensor(scale, dtype=dtype, device=device))


class MLP(nn.Sequential):
    """A plain network: linear layers with ReLU between them.

    Parameters
    ----------
    num_features, num_targets
        Inputs and outputs.
    hidden
        Units of each hidden layer; none makes a linear regression.
    """

    def __init__(self, num_features: int, num_targets: int = 1, hidden: Sequence[int] = (32, 16, 8)) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in zip((num_features, *hidden), hidden, strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers, nn.Linear((num_features, *hidden)[-1], num_targets))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Floating type of a network's parameters: batches are converted to it."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _mse(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    squares: torch.Tensor = (predictions - targets) ** 2
    return squares.mean(dim=1)


def _mae(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions - targets).abs().mean(dim=1)


def _huber(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.huber_loss(predictions, targets, reduction="none").mean(dim=1)


LOSSES: dict[str, RowLoss] = {"mse": _mse, "mae": _mae, "huber": _huber}


def resolve_loss(loss: str | RowLoss) -> RowLoss:
    """A loss by name, or the callable given.

    Raises
    ------
    OptionError
        An unknown name.
    """
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise OptionError(f"loss is one of {', '.join(LOSSES)} or a callable that returns one loss per row; loss={loss!r}")
    return LOSSES[loss]


def predict_rows(
    model: nn.Module, features: torch.Tensor, num_targets: int, *, precision: str, device: torch.device
) -> torch.Tensor:
    """Predictions [rows, num_targets] in the dtype of the parameters, under autocast for ``"bf16"``.

    Raises
    ------
    OptionError
        The network returns another shape; nothing is broadcast in silence.
    """
    dtype = dtype_of(model)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        outputs: torch.Tensor = model(features.to(dtype))
    predictions = outputs.to(dtype)
    if predictions.ndim == 1 and num_targets == 1:
        predictions = predictions.unsqueeze(1)
    if predictions.shape != (len(features), num_targets):
        raise OptionError(
            f"The model must return [rows, targets] = {(len(features), num_targets)}; it returned {tuple(predictions.shape)}"
        )
    return predictions


def row_losses(loss: RowLoss, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses [rows].

    Raises
    ------
    OptionError
        The loss returned another shape, a mean for example.
    """
    losses: torch.Tensor = loss(predictions, targets.to(predictions.dtype))
    if losses.shape != (len(predictions),):
        raise OptionError(
            f"A loss returns one value per row, shape {(len(predictions),)}, and never a mean; it returned {tuple(losses.shape)}"
        )
    return losses
