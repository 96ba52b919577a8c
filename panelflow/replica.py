"""This rank's replica of the model: DDP around it, with the traps of DDP taken care of."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from panelflow.distributed import Place
from panelflow.errors import OptionError
from panelflow.modeling import dtype_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def exact_batch_norm(model: nn.Module, place: Place) -> nn.Module:
    """The model with batch statistics joined over ranks, where it has any.

    Raises
    ------
    OptionError
        BatchNorm on several ranks without CUDA.
    """
    if place.world_size == 1 or not any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return model
    if place.device.type != "cuda":
        raise OptionError(
            "BatchNorm normalises each rank by its own rows, so that several ranks would not compute what one does; torch can "
            "join the statistics on CUDA only. Use LayerNorm, or train on one rank."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # as torch ships it
    return converted


def wrap(model: nn.Module, place: Place, num_features: int) -> nn.Module:
    """Wrap the model in DDP where there are several ranks, and settle its gradient buckets without touching any state.

    DDP rebuilds its buckets after the first backward pass, which changes the order of summation on three or more ranks. One
    pass over two rows of zeros before the first step makes the layout of a fresh and of a resumed run the same.
    """
    if place.world_size == 1:
        return model
    devices = [place.device.index] if place.device.type == "cuda" else None
    # Buffers are equal on all ranks from the start; torch renamed the option that broadcasts them before each pass.
    known = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    replica = DistributedDataParallel(model, device_ids=devices, **options)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    replica(torch.zeros(2, num_features, device=place.device, dtype=dtype_of(model))).sum().backward()
    replica.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return replica


def without_synchronisation(replica: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which backward passes stay on this rank, their gradients adding up."""
    return replica.no_sync() if isinstance(replica, DistributedDataParallel) else contextlib.nullcontext()
