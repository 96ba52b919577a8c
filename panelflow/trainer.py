"""``fit``: the training loop that every rank runs, exact whatever their number.

For a global batch with rows i, weights w_i and losses l_i(theta), one process would follow the gradient of
sum_i w_i l_i / sum_i w_i. Rank k of W backpropagates its own sum of w_i l_i, without dividing; DDP averages, which gives
1/W of the whole sum; multiplying by W / sum_i w_i gives the gradient of one process to rounding, however rows, weights and
accumulated batches are spread over ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from panelflow import checkpoint
from panelflow.checkpoint import RunState
from panelflow.distributed import Place, from_first, join, sum_over_ranks
from panelflow.errors import Preempted
from panelflow.evaluation import evaluate
from panelflow.hashing import fold
from panelflow.loader import Batch, Loader
from panelflow.metrics import Metrics
from panelflow.modeling import RowLoss, predict_rows, resolve_loss, row_losses, standardize
from panelflow.progress import Reporter
from panelflow.recipe import VALIDATION, OptimizerFactory, check_options, choose_splits, make_optimizer
from panelflow.record import Record, Result
from panelflow.replica import check_buffers, exact_batch_norm, replica_of, without_synchronisation, wrap
from panelflow.stopping import Request, explain_nonfinite, heed_sigterm, write_status
from panelflow.store import Dataset


def fit(
    model: nn.Module,
    dataset: Dataset,
    *,
    loss: str | RowLoss = "mse",
    batch_size: int = 8192,
    epochs: int = 10,
    lr: float = 1e-3,
    optimizer: str | OptimizerFactory = "adam",
    weight_decay: float = 0.0,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    scheduler_interval: str = "epoch",
    clip_norm: float | None = None,
    accumulate: int = 1,
    precision: str = "fp32",
    early_stopping: int | None = None,
    monitor: str = "loss",
    nonfinite: str = "raise",
    standardized: bool = True,
    train: str | None = None,
    validation: str | None = VALIDATION,
    seed: int = 0,
    lanes: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: str = "auto",
    progress: bool = True,
) -> Result:
    """Train a model on this rank, in step with all others.

    Call it on every rank: plain Python is one rank; :func:`panelflow.launch` and ``torchrun`` start several. The result does
    not depend on their number, but for rounding (and dropout, whose masks are drawn per rank).

    Parameters
    ----------
    model
        Maps [rows, num_features] to [rows] or [rows, num_targets]; trained in place, in the dtype of its parameters
        (``model.double()`` trains in float64). Rank 0's initial parameters are everyone's.
    dataset
        An open dataset.
    loss
        ``"mse"``, ``"mae"``, ``"huber"`` or a callable (predictions, targets) -> one loss per row, shape [rows].
    batch_size
        Rows of a global batch, over all ranks.
    epochs
        Epochs in all; a resumed run completes them.
    lr, weight_decay
        Of the named optimizers.
    optimizer
        ``"adam"``, ``"adamw"``, ``"sgd"``, or a factory that takes the parameters.
    scheduler
        A factory that takes the optimizer. ``ReduceLROnPlateau`` gets ``monitor`` after each epoch.
    scheduler_interval
        Step any other scheduler after each ``"epoch"`` or each ``"step"``, that is optimizer step.
    clip_norm
        Largest norm of the exact gradient.
    accumulate
        Global batches that make one optimizer step, weighted as their union; ranks synchronise once for all of them.
    precision
        ``"fp32"`` (no autocast) or ``"bf16"`` (autocast, losses in the dtype of the parameters).
    early_stopping
        Epochs without improvement of ``monitor`` after which to stop; ``None`` never stops early.
    monitor
        ``loss``, ``r2``, ``r2_zero``, ``ic``, ``icir``, ``rank_ic`` or ``rank_icir`` of the validation split.
    nonfinite
        What a loss that is NaN or infinite does: ``"raise"`` ends the run before the update, ``"continue"`` lets it pass.
    standardized
        Put the training statistics in front of the model; see :class:`panelflow.Standardized`.
    train, validation
        Names of splits; by default the one training split, and ``validation`` if there is one.
    seed
        Seed of the order of batches and of dropout.
    lanes
        See :class:`panelflow.Loader`.
    checkpoint_dir
        Where rank 0 writes checkpoints, each whole or absent: at the end of each epoch and every ``checkpoint_every``
        optimizer steps; the newest two are kept.
    resume
        ``"auto"`` continues from the newest whole checkpoint if there is one, ``"must"`` wants one, ``"never"`` refuses one. The
        learning rate and other state of the optimizer come from the checkpoint.
    progress
        Report progress on standard error of rank 0.

    Returns
    -------
    Result

    Raises
    ------
    OptionError
        An argument, or the shape that model or loss returns; on several ranks BatchNorm without CUDA, parameters that take no
        part in the prediction, or buffers that each rank changes in its own way.
    CheckpointError
        The checkpoint belongs to another dataset, order or model.
    CorruptDatasetError
        A damaged shard, on the rank that reads it.
    NonFiniteLossError
        See ``nonfinite``; names the step and the rows.
    Preempted
        SIGTERM came: all ranks stopped after the same step, and rank 0 wrote a checkpoint; the exit code is 75. The same call
        continues.

    Notes
    -----
    Deterministic: on the same number of ranks and the same libraries, a run that was interrupted after any step and resumed ends
    with bit-equal parameters. torch's generator is seeded before each global batch from (seed, epoch, step, rank). Memory: the
    model, and ``Loader.memory_bytes``.
    """
    place = join()
    choices = {"precision": precision, "monitor": monitor, "resume": resume, "scheduler_interval": scheduler_interval}
    check_options(choices | {"nonfinite": nonfinite}, accumulate, early_stopping, epochs, checkpoint_every, clip_norm)
    train_split, validation_split = choose_splits(dataset, train, validation, early_stopping)
    whole = standardize(model, dataset) if standardized else model
    whole = exact_batch_norm(whole, place).to(place.device)
    run = _Run(
        place=place,
        model=whole,
        replica=whole,
        loss=resolve_loss(loss),
        optimizer=make_optimizer(optimizer, whole, lr, weight_decay),
        scheduler=None,
        loader=Loader(
            train_split,
            batch_size,
            seed=seed,
            rank=place.rank,
            world_size=place.world_size,
            lanes=lanes,
            keys=False,
        ),
        accumulate=accumulate,
        clip_norm=clip_norm,
        precision=precision,
        monitor=monitor,
        step_scheduler=scheduler_interval == "step",
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        stops_at_nonfinite=nonfinite == "raise",
    )
    run.scheduler = None if scheduler is None else scheduler(run.optimizer)
    run.restore(resume)
    run.replica = wrap(whole, place, len(dataset.features), num_flags=2)
    with Reporter(progress and place.is_first) as reporter, heed_sigterm() as run.request:
        write_status(checkpoint_dir, place, "running")
        for epoch in range(run.loader.epoch, epochs):
            if run.record.stopped_early:
                break
            run.train_epoch(epoch, reporter)
            metrics = None
            if validation_split is not None:
                metrics = evaluate(run.model, validation_split, loss=run.loss, precision=precision)
            run.end_epoch(epoch, metrics, early_stopping)
            if run.asked_to_stop:
                run.stop(epoch)
    write_status(checkpoint_dir, place, "finished", updates=run.record.updates)
    return run.record.result(run.model, choose_best=early_stopping is not None)


@dataclass
class _Run:
    """One training run on one rank."""

    place: Place
    model: nn.Module
    replica: nn.Module
    loss: RowLoss
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    loader: Loader
    accumulate: int
    clip_norm: float | None
    precision: str
    monitor: str
    step_scheduler: bool
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_every: int | None
    stops_at_nonfinite: bool
    record: Record = field(default_factory=Record)
    request: Request = field(default_factory=Request)
    asked_to_stop: bool = False  # by any rank
    losses: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (step, losses of rows) since the last update

    # The loop -------------------------------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, reporter: Reporter) -> None:
        """All steps of an epoch that are left."""
        self.loader.set_epoch(epoch)
        reporter.phase(f"epoch {epoch}", self.loader.order.num_rows)
        started = time.perf_counter() - self.record.seconds
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, dtype=torch.float64, device=self.place.device)  # weighted loss, weight: this rank's share
        batch_weight = 0.0
        for batch in self.loader:
            torch.manual_seed(_step_seed(self.loader.order.seed, epoch, batch.step, self.place.rank))
            ends_epoch = batch.step + 1 == len(self.loader)
            ends_update = ends_epoch or (batch.step + 1) % self.accumulate == 0
            with contextlib.nullcontext() if ends_update else without_synchronisation(self.replica):
                batch_weight += self._backward(batch.to(self.place.device), sums)
            if not ends_update:
                continue
            self._read_flags(epoch)
            self._update(self._global_weight(batch_weight))
            batch_weight = 0.0
            self.record.updates += 1
            reporter.advance(self.accumulate * self.loader.order.batch_size)
            due = self.checkpoint_every and self.record.updates % self.checkpoint_every == 0
            if due and not ends_epoch:  # at the end of an epoch validation comes first, and a checkpoint after it
                self.record.seconds = time.perf_counter() - started
                self._save(sums)
            if self.asked_to_stop and not ends_epoch:
                self.record.seconds = time.perf_counter() - started
                if not due:
                    self._save(sums)
                self.stop(epoch, batch.step)
        self.record.seconds = time.perf_counter() - started
        self.record.sums = self._total(sums)
        reporter.finish()

    def _backward(self, batch: Batch, sums: torch.Tensor) -> float:
        """Add the gradient of the weighted sum of losses; returns the weight of this batch, this rank's or the global one."""
        predictions = predict_rows(
            self.replica, batch.features, batch.targets.shape[1], precision=self.precision, device=self.place.device
        )
        losses = row_losses(self.loss, predictions, batch.targets)
        if batch.weight is None:
            weighted, weight = losses.sum(), float(batch.global_rows)
            sums += torch.stack([weighted.detach().double(), sums.new_tensor(float(len(batch)))])
        else:
            weighted, weight = (losses * batch.weight.to(losses.dtype)).sum(), float(batch.weight.double().sum())
            sums += torch.stack([weighted.detach().double(), sums.new_tensor(weight)])
        self.losses.append((batch.step, losses.detach()))
        flags = replica_of(self.replica).flags
        asked = flags.new_full((), float(self.request.received))
        values = torch.stack([asked, (~torch.isfinite(weighted.detach())).to(flags.dtype)])
        (weighted + (flags * values).sum()).backward()  # type: ignore[no-untyped-call]  # torch ships it without a signature
        return weight

    def _read_flags(self, epoch: int) -> None:
        """Learn what any rank met since the last update, before this one is made."""
        flags = replica_of(self.replica).flags
        assert flags.grad is not None
        asked, nonfinite = flags.grad.tolist()
        flags.grad = None
        self.asked_to_stop = self.asked_to_stop or asked > 0
        if nonfinite and self.stops_at_nonfinite:
            raise explain_nonfinite(self.loader, epoch, self.losses, self.place)
        self.losses = []

    def stop(self, epoch: int, step: int | None = None) -> NoReturn:
        """Leave as asked, once rank 0 has written its checkpoint."""
        write_status(self.checkpoint_dir, self.place, "preempted", epoch=epoch, step=step, updates=self.record.updates)
        from_first(None, self.place)
        if self.place.is_first:
            saved = "the state is saved, the same call goes on" if self.checkpoint_dir is not None else "without checkpoint_dir"
            print(f"panelflow: asked to stop, stopped after {self.record.updates:,} updates; {saved}", file=sys.stderr)
        raise Preempted

    def _global_weight(self, batch_weight: float) -> float:
        """Weight of the union of the accumulated batches over all ranks; known without asking where rows weigh one."""
        if "weight" not in self.loader.split.grids:
            return batch_weight
        return sum_over_ranks([batch_weight], self.place)[0]

    def _update(self, weight: float) -> None:
        """Scale the averaged sums to the exact gradient, clip it, and step; nothing to learn from a batch of weight zero."""
        if weight > 0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, self.place.world_size / weight)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and self.step_scheduler and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _total(self, sums: torch.Tensor) -> list[float]:
        """Sums of the epoch so far over all ranks and over the run before an interruption."""
        here = sum_over_ranks(sums.tolist(), self.place)
        return [before + now for before, now in zip(self.record.sums, here, strict=True)]

    # Epochs and checkpoints -----------------------------------------------------------------------------------------------

    def end_epoch(self, epoch: int, metrics: Metrics | None, patience: int | None) -> None:
        """Keep the figures and the best weights, decide whether to stop, step the scheduler, save."""
        record = self.record
        figures = {"steps": len(self.loader), "learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        check_buffers(self.model, self.place)
        record.end_epoch(epoch, figures, metrics, self.monitor, patience, self.model)
        record.stopped_early = bool(from_first(record.stopped_early, self.place))
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(math.inf if metrics is None else metrics.value(self.monitor))
        elif self.scheduler is not None and not self.step_scheduler:
            self.scheduler.step()
        self._save(None)
        if self.checkpoint_dir is not None and self.place.is_first:
            record.write(Path(self.checkpoint_dir, "metrics.jsonl"))

    def _save(self, sums: torch.Tensor | None) -> None:
        """Write a checkpoint; ``sums`` of the running epoch are joined over ranks first."""
        if self.checkpoint_dir is None:
            return
        total = self.record.sums if sums is None else self._total(sums)
        if not self.place.is_first:
            return
        checkpoint.save(self.checkpoint_dir, self.record.updates, self._state().state_dict(sums=total))

    def _state(self) -> RunState:
        recipe = {
            "optimizer": type(self.optimizer).__name__,
            "scheduler": None if self.scheduler is None else type(self.scheduler).__name__,
            "accumulate": self.accumulate,
            "monitor": self.monitor,
        }
        return RunState(self.model, self.optimizer, self.scheduler, self.loader, self.record, recipe)

    def restore(self, resume: str) -> None:
        """Continue from the newest whole checkpoint, as ``resume`` says; rank 0 reads it for all."""
        saved = checkpoint.find(self.checkpoint_dir, resume) if self.place.is_first else None
        saved = from_first(saved, self.place)
        if saved is None or self.checkpoint_dir is None:
            return
        self.record = self._state().load_state_dict(saved, self.checkpoint_dir)
        if self.place.is_first:
            self.record.write(Path(self.checkpoint_dir, "metrics.jsonl"))


def _step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    return int(fold(seed, epoch, step, rank)[0] >> np.uint64(1))
