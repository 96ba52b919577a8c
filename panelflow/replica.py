"""This rank's replica of the model: DDP around it, with the traps of DDP taken care of."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from panelflow.distributed import Place, gather_objects
from panelflow.errors import OptionError
from panelflow.modeling import dtype_of


def exact_batch_norm(model: nn.Module, place: Place) -> nn.Module:
    """The model with batch statistics joined over ranks, where it has any.

    Raises
    ------
    OptionError
        BatchNorm on several ranks without CUDA.
    """
    if place.world_size == 1 or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    if place.device.type != "cuda":
        raise OptionError(
            "BatchNorm normalises each rank by its own rows, so that several ranks would not compute what one does; torch can "
            "join the statistics on CUDA only. Use LayerNorm, or train on one rank."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # as torch ships it
    return converted


class Replica(nn.Module):
    """A model beside flags of each rank, whose sum over ranks is a gradient: it travels with that of the model.

    Attributes
    ----------
    flags
        A parameter of zeros. ``(flags * values).sum()`` added to the loss makes ``values`` its gradient.
    """

    def __init__(self, model: nn.Module, num_flags: int) -> None:
        super().__init__()
        self.model = model
        device = next((p.device for p in model.parameters()), None)
        self.flags = nn.Parameter(torch.zeros(num_flags, dtype=dtype_of(model), device=device))

    def forward(self, features: torch.Tensor) -> Any:
        """Apply the model."""
        return self.model(features)


def replica_of(wrapped: nn.Module) -> Replica:
    """The replica within what :func:`wrap` returned."""
    found = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    assert isinstance(found, Replica)
    return found


def wrap(model: nn.Module, place: Place, num_features: int, num_flags: int) -> nn.Module:
    """A replica of the model, in DDP where there are several ranks, its gradient buckets settled without touching any state.

    DDP rebuilds its buckets after the first backward pass, which changes the order of summation on three or more ranks. One
    pass over two rows of zeros before the first step makes the layout of a fresh and of a resumed run the same.

    Raises
    ------
    OptionError
        A parameter takes no part in the prediction, so that DDP would wait for its gradient.
    """
    own = Replica(model, num_flags)
    if place.world_size == 1:
        return own
    devices = [place.device.index] if place.device.type == "cuda" else None
    # Buffers are made equal here, once; torch renamed the option that broadcasts them before each pass.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    known = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    replica = DistributedDataParallel(own, device_ids=devices, **options)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = replica(torch.zeros(2, num_features, device=place.device, dtype=dtype_of(model)))
    (outputs.sum() + own.flags.sum()).backward()
    idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise OptionError(
            f"A parameter has no part in the prediction; use it, or freeze it by requires_grad_(False): {idle[0]!r}"
        )
    replica.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return replica


def without_synchronisation(replica: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which backward passes stay on this rank, their gradients adding up."""
    return replica.no_sync() if isinstance(replica, DistributedDataParallel) else contextlib.nullcontext()


def check_buffers(model: nn.Module, place: Place) -> None:
    """Refuse buffers that drifted apart: whatever updates them sees the rows of one rank only.

    Raises
    ------
    OptionError
        Names the buffer.
    """
    digests = {name: _digest(buffer) for name, buffer in model.named_buffers()}
    for other in gather_objects(digests, place):
        for name, digest in digests.items():
            if other[name] != digest:
                raise OptionError(
                    f"A buffer differs between ranks, because the model updates it from the rows of each rank; several ranks "
                    f"would not compute what one does. Train on one rank, or do without it: {name!r}"
                )


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
