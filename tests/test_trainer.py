from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from panels import make_panel

import panelflow as pf
from panelflow.checkpoint import list_checkpoints
from panelflow.distributed import from_first, join
from panelflow.modeling import standardize

BATCH = 128  # 897 training rows: seven full batches and one row, so that all ranks but the first have none of the last


class Recorder(torch.optim.SGD):
    """Keeps the gradient of each step and moves nothing."""

    def __init__(self, parameters: Any, log: list[torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.0)
        self.log = log

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.log.append(torch.cat([g.flatten() for g in gradients]).clone())


def make_model(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)]
    return torch.nn.Sequential(*layers).double()


def gradients_on_rank(path: str, accumulate: int, clip_norm: float | None) -> list[torch.Tensor]:
    log: list[torch.Tensor] = []
    pf.fit(
        make_model(),
        pf.open(path),
        batch_size=BATCH,
        epochs=1,
        accumulate=accumulate,
        clip_norm=clip_norm,
        validation=None,
        optimizer=lambda parameters: Recorder(parameters, log),
        progress=False,
    )
    return log


def full_batch_gradients(dataset: pf.Dataset, accumulate: int) -> list[torch.Tensor]:
    """One process, one pass: the gradient of sum w l / sum w over the union of the batches of each step."""
    split, order = dataset["train"], pf.Loader(dataset["train"], BATCH).order
    rows = split.to_pandas()
    model = standardize(make_model(), dataset)
    expected = []
    for start in range(0, order.steps, accumulate):
        steps = range(start, min(start + accumulate, order.steps))
        chosen = np.concatenate([order.epoch(0).rows(step, range(order.lanes)) for step in steps])
        features = torch.tensor(rows[dataset.features].to_numpy()[chosen], dtype=torch.float64)
        target = torch.tensor(rows["ret"].to_numpy()[chosen], dtype=torch.float64)
        weight = torch.ones_like(target)
        if "size" in rows:
            weight = torch.tensor(rows["size"].to_numpy()[chosen], dtype=torch.float64)
        if weight.sum() == 0:
            continue
        model.zero_grad()
        ((model(features)[:, 0] - target) ** 2 * weight).sum().div(weight.sum()).backward()
        expected.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return expected


def gradients_in_every_world(path: str, cases: list[tuple[int, float | None]]) -> list[list[torch.Tensor]]:
    return [gradients_on_rank(path, accumulate, clip) for accumulate, clip in cases]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_every_step_is_the_full_batch_gradient(
    dataset: pf.Dataset, unweighted: pf.Dataset, world: int, weighted: bool
) -> None:
    chosen = dataset if weighted else unweighted
    assert chosen["train"].num_rows % BATCH == 1
    cases: list[tuple[int, float | None]] = [(1, None), (3, None), (1, 0.05)]
    for found in pf.launch(gradients_in_every_world, world, (chosen.folder.path(), cases)):
        for (accumulate, clip), log in zip(cases, found, strict=True):
            expected = full_batch_gradients(chosen, accumulate)
            assert len(log) == len(expected)
            for gradient, reference in zip(log, expected, strict=True):
                if clip is not None and reference.norm() > clip:
                    reference = reference * (clip / (reference.norm() + 1e-6))
                assert float((gradient - reference).norm() / reference.norm()) <= 1e-12


def test_a_batch_of_zero_weight_makes_no_update(prepare: Any) -> None:
    panel = make_panel()
    loader = pf.Loader(prepare(panel)["train"], BATCH)
    rows = loader.order.epoch(0).rows(2, range(loader.order.lanes))
    keys = loader.split.to_pandas().iloc[rows][["stock", "date"]].assign(zero=True)
    panel["size"] = panel.merge(keys, on=["stock", "date"], how="left")["zero"].isna().astype(np.float32)
    ds = prepare(panel, weight="size")
    for found in pf.launch(gradients_on_rank, 2, (ds.folder.path(), 1, None)):
        expected = full_batch_gradients(ds, 1)
        assert len(found) == len(expected) == loader.order.steps - 1
        for gradient, reference in zip(found, expected, strict=True):
            assert float((gradient - reference).norm() / reference.norm()) <= 1e-12


def test_a_weight_of_two_is_the_row_twice(unweighted: pf.Dataset) -> None:
    rows = torch.randn(6, 4).double()
    target = torch.randn(6, 1).double()
    model = make_model()
    weight = torch.tensor([2.0, 1, 1, 1, 1, 1]).double()
    ((model(rows) - target)[:, 0] ** 2 * weight).sum().div(weight.sum()).backward()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    twice = torch.cat([rows, rows[:1]]), torch.cat([target, target[:1]])
    ((model(twice[0]) - twice[1]) ** 2).mean().backward()
    for left, right in zip(once, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def train_on_rank(path: str, options: dict[str, Any]) -> tuple[list[dict[str, Any]], torch.Tensor]:
    result = pf.fit(make_model(), pf.open(path), batch_size=BATCH, progress=False, **options)
    return result.history, torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_every_world_trains_the_same_model_in_the_same_steps(dataset: pf.Dataset) -> None:
    options = {"epochs": 2, "lr": 1e-2, "clip_norm": 1.0, "accumulate": 2}
    alone = train_on_rank(dataset.folder.path(), options)
    for world in (2, 3):
        for history, parameters in pf.launch(train_on_rank, world, (dataset.folder.path(), options)):
            torch.testing.assert_close(parameters, alone[1], rtol=1e-10, atol=1e-13)
            for entry, reference in zip(history, alone[0], strict=True):
                assert (entry["steps"], entry["updates"]) == (reference["steps"], reference["updates"])
                assert entry["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-10)
                assert entry["validation"]["loss"] == pytest.approx(reference["validation"]["loss"], rel=1e-10)


# Resume -----------------------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


class Stopping(torch.optim.AdamW):
    """Raises after a number of steps, on every rank at once."""

    def __init__(self, parameters: Any, after: int) -> None:
        super().__init__(parameters, lr=1e-2)
        self.left = after

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.left == 0:
            raise Stopped
        self.left -= 1
        super().step()


def state_of(result: pf.Result) -> dict[str, Any]:
    parameters = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    losses = [(entry["train_loss"], entry["validation"]["loss"]) for entry in result.history]
    return {"parameters": parameters, "losses": losses, "best": result.best_epoch}


def runs_on_rank(path: str, dropout: float, accumulate: int, stops: list[int]) -> dict[int, dict[str, Any]]:
    """The uninterrupted run (key -1), and for each stop the run that was interrupted there and resumed."""
    dataset, runs = pf.open(path), {}

    def fit(folder: str, after: int) -> pf.Result:
        return pf.fit(
            make_model(dropout),
            dataset,
            batch_size=BATCH,
            epochs=2,
            accumulate=accumulate,
            optimizer=lambda parameters: Stopping(parameters, after),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            scheduler_interval="step",
            early_stopping=5,
            checkpoint_dir=folder,
            checkpoint_every=1,
            progress=False,
        )

    with tempfile.TemporaryDirectory() as root:
        root = from_first(root, join())
        runs[-1] = state_of(fit(f"{root}/whole", 10**6))
        for stop in stops:
            with pytest.raises(Stopped):
                fit(f"{root}/{stop}", stop)
            runs[stop] = state_of(fit(f"{root}/{stop}", 10**6))
        torch.distributed.barrier() if join().world_size > 1 else None
    return runs


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("dropout", "accumulate"), [(0.0, 1), (0.5, 1), (0.5, 3)])
def test_interrupted_after_any_step_and_resumed_is_bit_equal(
    dataset: pf.Dataset, world: int, dropout: float, accumulate: int
) -> None:
    stops = list(range(1, 9 if accumulate == 1 else 4))
    for runs in pf.launch(runs_on_rank, world, (dataset.folder.path(), dropout, accumulate, stops)):
        for stop in stops:
            assert torch.equal(runs[stop]["parameters"], runs[-1]["parameters"]), stop
            assert runs[stop]["best"] == runs[-1]["best"]
            np.testing.assert_allclose(runs[stop]["losses"], runs[-1]["losses"], rtol=1e-14)


def begin(path: str, folder: str, after: int) -> None:
    with pytest.raises(Stopped):
        train_to(path, folder, after)


def train_to(path: str, folder: str, after: int) -> torch.Tensor:
    result = pf.fit(
        make_model(),
        pf.open(path),
        batch_size=BATCH,
        epochs=2,
        optimizer=lambda parameters: Stopping(parameters, after),
        checkpoint_dir=folder,
        checkpoint_every=1,
        progress=False,
    )
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_resumed_on_another_number_of_ranks(dataset: pf.Dataset, tmp_path: Path) -> None:
    path = dataset.folder.path()
    whole = train_to(path, str(tmp_path / "whole"), 10**6)
    pf.launch(begin, 2, (path, str(tmp_path / "moved"), 5))
    pf.launch(begin, 3, (path, str(tmp_path / "moved"), 4))
    found = train_to(path, str(tmp_path / "moved"), 10**6)
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-14)


def slow_train(path: str, folder: str) -> torch.Tensor:
    def slow(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return ((p - t) ** 2).mean(dim=1)

    result = pf.fit(
        make_model(0.5),
        pf.open(path),
        loss=slow,
        batch_size=BATCH,
        epochs=3,
        checkpoint_dir=folder,
        checkpoint_every=1,
        progress=False,
    )
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_a_job_that_was_killed_ends_as_if_it_had_not_been(dataset: pf.Dataset, tmp_path: Path) -> None:
    path = dataset.folder.path()
    whole = pf.launch(slow_train, 2, (path, str(tmp_path / "whole")))[0]
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import panelflow as pf; from test_trainer import slow_train\n"
        f"pf.launch(slow_train, 2, ({path!r}, {str(tmp_path / 'killed')!r}))\n"
    )
    job = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list_checkpoints(tmp_path / "killed")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    time.sleep(1)
    assert list_checkpoints(tmp_path / "killed")
    resumed = pf.launch(slow_train, 2, (path, str(tmp_path / "killed")))[0]
    assert torch.equal(resumed, whole)


def test_interrupted_while_validating(dataset: pf.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "checkpoint_every": 1, "progress": False}
    whole = pf.fit(make_model(), dataset, **options)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("panelflow.trainer.evaluate", lambda *_, **__: (_ for _ in ()).throw(Stopped()))
        pf.fit(make_model(), dataset, checkpoint_dir=tmp_path, **options)
    resumed = pf.fit(make_model(), dataset, checkpoint_dir=tmp_path, **options)
    assert [e["validation"] for e in resumed.history] == [e["validation"] for e in whole.history]
    assert [e["train_loss"] for e in resumed.history] == pytest.approx([e["train_loss"] for e in whole.history], rel=1e-14)


def test_schedulers_resume_too(dataset: pf.Dataset, tmp_path: Path) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    options: dict[str, Any] = {"batch_size": BATCH, "lr": 0.3, "progress": False}
    options["scheduler"] = lambda optimizer: plateau(optimizer, patience=0, factor=0.5)
    whole = pf.fit(make_model(), dataset, epochs=6, **options)
    for epochs in range(1, 7):
        parts = pf.fit(make_model(), dataset, epochs=epochs, checkpoint_dir=tmp_path, **options)
    rates = [entry["learning_rate"] for entry in whole.history]
    assert rates == [entry["learning_rate"] for entry in parts.history]
    assert rates[-1] < 0.3


def test_a_finished_run_is_not_trained_again(dataset: pf.Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "checkpoint_dir": tmp_path, "progress": False}
    first = pf.fit(make_model(), dataset, **options)
    again = pf.fit(make_model(), dataset, **options)
    assert again.history == first.history
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    longer = pf.fit(make_model(), dataset, **options | {"epochs": 3})
    straight = pf.fit(make_model(), dataset, **options | {"epochs": 3, "checkpoint_dir": None})
    assert all(torch.equal(a, b) for a, b in zip(longer.model.parameters(), straight.model.parameters(), strict=True))
    assert [json.loads(line)["epoch"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_resume_modes_and_foreign_checkpoints(dataset: pf.Dataset, unweighted: pf.Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 1, "checkpoint_dir": tmp_path, "progress": False}
    with pytest.raises(pf.CheckpointError, match="no checkpoint"):
        pf.fit(make_model(), dataset, resume="must", **options)
    pf.fit(make_model(), dataset, **options)
    with pytest.raises(pf.CheckpointError, match="resume it or choose another folder"):
        pf.fit(make_model(), dataset, resume="never", **options)
    with pytest.raises(pf.CheckpointError, match="dataset_id"):
        pf.fit(make_model(), unweighted, **options)
    with pytest.raises(pf.CheckpointError, match="another model"):
        pf.fit(pf.MLP(4, 1, (5,)), dataset, **options)
    with pytest.raises(pf.CheckpointError, match=r"optimizer='Adam'.*'SGD'"):
        pf.fit(make_model(), dataset, optimizer="sgd", **options)
    with pytest.raises(pf.CheckpointError, match="accumulate=1"):
        pf.fit(make_model(), dataset, accumulate=2, **options)
    with pytest.raises(pf.CheckpointError, match="batch_size=128"):
        pf.fit(make_model(), dataset, **options | {"batch_size": 64})


# Options --------------------------------------------------------------------------------------------------------------------


def test_the_history_is_a_data_frame_too(dataset: pf.Dataset) -> None:
    result = pf.fit(make_model(), dataset, batch_size=BATCH, epochs=2, progress=False)
    table = result.to_pandas()
    assert table.index.tolist() == [0, 1]
    assert table["train_loss"].tolist() == [entry["train_loss"] for entry in result.history]
    assert table["validation_loss"].tolist() == [entry["validation"]["loss"] for entry in result.history]


def test_early_stopping_keeps_the_best_and_the_last(dataset: pf.Dataset) -> None:
    result = pf.fit(make_model(), dataset, batch_size=BATCH, epochs=50, lr=0.2, early_stopping=2, progress=False)
    losses = [entry["validation"]["loss"] for entry in result.history]
    assert result.stopped_early
    assert result.best_epoch == int(np.argmin(losses)) == len(losses) - 3
    assert pf.evaluate(result.model, dataset["validation"]).loss == losses[result.best_epoch]
    assert result.best_state is not None
    result.model.load_state_dict(result.last_state)
    assert pf.evaluate(result.model, dataset["validation"]).loss == losses[-1]


def stopped_epoch(path: str) -> int:
    result = pf.fit(
        make_model(), pf.open(path), batch_size=BATCH, epochs=50, lr=0.2, early_stopping=2, monitor="ic", progress=False
    )
    return len(result.history)


def test_early_stopping_is_one_decision_of_all_ranks(dataset: pf.Dataset) -> None:
    assert len({stopped_epoch(dataset.folder.path()), *pf.launch(stopped_epoch, 2, (dataset.folder.path(),))}) == 1


def test_bf16_and_other_optimizers_and_losses_learn(dataset: pf.Dataset) -> None:
    for options in ({"precision": "bf16"}, {"optimizer": "sgd"}, {"optimizer": "adamw", "weight_decay": 0.1}, {"loss": "mae"}):
        result = pf.fit(pf.MLP(4), dataset, batch_size=64, epochs=4, lr=1e-2, progress=False, **options)
        assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def with_batch_norm(path: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    pf.fit(model, pf.open(path), batch_size=BATCH, epochs=1, progress=False)


def test_batch_norm_is_exact_or_refused(dataset: pf.Dataset) -> None:
    with pytest.raises(pf.RankError, match="LayerNorm"):
        pf.launch(with_batch_norm, 2, (dataset.folder.path(),))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    assert pf.fit(model, dataset, batch_size=100, epochs=1, progress=False).history


class Averaging(torch.nn.Linear):
    """Keeps a running mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training and len(features):
            self.seen += features.mean(dim=0).detach()
        return super().forward(features)


class Idle(torch.nn.Linear):
    """Has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.spare = torch.nn.Parameter(torch.zeros(1))


def train_module(path: str, kind: type[torch.nn.Module]) -> None:
    pf.fit(kind(), pf.open(path), batch_size=BATCH, epochs=1, progress=False)


@pytest.mark.parametrize(("kind", "text"), [(Averaging, "buffer differs between ranks.*'model.seen'"), (Idle, "'model.spare'")])
def test_what_ranks_could_not_compute_alike_is_refused(dataset: pf.Dataset, kind: type[torch.nn.Module], text: str) -> None:
    with pytest.raises(pf.RankError, match=text):
        pf.launch(train_module, 2, (dataset.folder.path(), kind))
    train_module(dataset.folder.path(), kind)  # one rank is free to


def damaged_train(path: str) -> None:
    pf.fit(make_model(), pf.open(path), batch_size=BATCH, epochs=1, progress=False)


def test_damage_on_one_rank_ends_the_job_with_the_name_of_the_file(
    dataset: pf.Dataset, tmp_path: Path, prepare: Callable[..., pf.Dataset]
) -> None:
    ds = prepare(make_panel(), output=tmp_path / "damaged.zarr")
    shard = tmp_path / "damaged.zarr" / "train" / "targets" / "c" / "2" / "0"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(pf.RankError, match=rf"(?s)CorruptDatasetError: {shard}.*rows 512 to 768") as caught:
        pf.launch(damaged_train, 2, (ds.folder.path(),))
    assert isinstance(caught.value.__cause__, pf.CorruptDatasetError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": "rmse"}, "loss='rmse'"),
        ({"optimizer": "lion"}, "optimizer='lion'"),
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"monitor": "accuracy"}, "monitor='accuracy'"),
        ({"epochs": 0}, "epochs=0"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"train": "training"}, "'training'"),
        ({"validation": "holdout"}, "validation='holdout'"),
        ({"early_stopping": 1, "validation": None}, "validation=None"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"resume": "must"}, "checkpoint_dir"),
        ({"loss": lambda p, t: ((p - t) ** 2).mean()}, "never a mean"),
    ],
)
def test_bad_options_are_refused_with_their_value(dataset: pf.Dataset, options: dict[str, Any], text: str) -> None:
    with pytest.raises(pf.OptionError, match=text):
        pf.fit(make_model(), dataset, batch_size=BATCH, progress=False, **{"epochs": 1, **options})


# Stopping before the end --------------------------------------------------------------------------------------------------


def slowly(path: str, folder: str) -> torch.Tensor:
    """A run that says how far it is, and takes a moment over each step."""

    model = make_model()
    model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    result = pf.fit(model, pf.open(path), batch_size=60, epochs=3, checkpoint_dir=folder, checkpoint_every=1000, progress=False)
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


PREEMPTIBLE = """
import sys
sys.path[:0] = [{tests!r}]
from test_trainer import slowly
import panelflow as pf
pf.launch(slowly, {ranks}, ({path!r}, {folder!r}))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_preempted_run_saves_leaves_with_75_and_goes_on_exactly(dataset: pf.Dataset, tmp_path: Path, ranks: int) -> None:
    path, folder = str(dataset.folder.path()), str(tmp_path / "run")
    undisturbed = pf.launch(slowly, ranks, (path, str(tmp_path / "undisturbed")))
    script = PREEMPTIBLE.format(tests=str(Path(__file__).parent), ranks=ranks, path=path, folder=folder)
    job = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    status = tmp_path / "run" / "status.json"
    wait_until(lambda: status.exists(), job)
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    assert "panelflow: asked to stop, stopped after" in errors
    left = json.loads(status.read_text())
    assert left["status"] == "preempted"
    (saved,) = (tmp_path / "run").glob("step-*.pt")
    assert saved.name == f"step-{left['updates']:010d}.pt"
    for before, after in zip(undisturbed, pf.launch(slowly, ranks, (path, folder)), strict=True):
        assert torch.equal(before, after)
    assert json.loads(status.read_text())["status"] == "finished"


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Poisoned(torch.nn.Module):
    """NaN for one row of the panel."""

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.linear, self.poison = torch.nn.Linear(4, 1), poison

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hit = (features[:, :1] == self.poison).double()
        return self.linear(torch.nan_to_num(features)) + torch.where(hit > 0, torch.nan, 0.0)


def poisoned_fit(path: str, poison: float, nonfinite: str) -> float:
    ds = pf.open(path)
    options = {"batch_size": 150, "epochs": 2, "standardized": False, "nonfinite": nonfinite, "progress": False}
    return float(pf.fit(Poisoned(poison).double(), ds, **options).model.linear.bias)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_row(unweighted: pf.Dataset, ranks: int) -> None:
    split, path = unweighted["train"], str(unweighted.folder.path())
    row = int(np.flatnonzero(np.isfinite(split.features[:, 0]))[17])
    name, day = unweighted.entity_names[int(split.entity[row])], pd.Timestamp(int(split.date[row]))
    poison = float(split.features[row, 0])
    with pytest.raises(pf.RankError, match=re.escape(f"({name!r}, {day}, nan)")) as caught:
        pf.launch(poisoned_fit, ranks, (path, poison, "raise"))
    assert isinstance(caught.value.__cause__, pf.NonFiniteLossError)
    assert "not finite for 1 row(s) at epoch 0, step" in str(caught.value)
    assert np.isnan(pf.launch(poisoned_fit, ranks, (path, poison, "continue"))).all()
