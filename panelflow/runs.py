"""The run directory of the command line: the model that it names, trained on ranks, written down, and found again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panelflow as pf
from panelflow.errors import CheckpointError, OptionError

MODEL = "model.pt"


def make_model(model: dict[str, Any], num_features: int, num_targets: int) -> Any:
    if model["factory"] is None:
        return pf.MLP(num_features, num_targets, model["hidden"])
    import torch

    factory = _load_factory(model["factory"])
    try:
        network = factory(num_features, num_targets)
    except Exception as error:  # it is the user's code: anything may happen
        raise OptionError(f"The factory failed ({type(error).__name__}: {error}); --model {model['factory']}") from error
    if not isinstance(network, torch.nn.Module):
        raise OptionError(f"The factory must return a torch.nn.Module, not {type(network).__name__}; --model {model['factory']}")
    return network


def _load_factory(name: str) -> Callable[[int, int], Any]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        factory: Callable[[int, int], Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise OptionError(f"The model factory cannot be imported ({error}); --model {name}") from error
    return factory


def train_rank(out: str, model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What each rank does; rank 0 also writes the model."""
    import torch

    from panelflow.checkpoint import write_atomic
    from panelflow.distributed import join

    dataset = pf.open(out)
    torch.manual_seed(options["seed"])
    network = make_model(model, len(dataset.features), len(dataset.targets))
    result = pf.fit(network, dataset, **options)
    if join().is_first:
        state = {
            "model": model,
            "state": result.model.state_dict(),
            "features": dataset.features,
            "targets": dataset.targets,
            "precision": options["precision"],
        }
        write_atomic(Path(options["checkpoint_dir"], MODEL), state)
    return {
        "dataset": dataset.folder.path(),
        "dataset_id": dataset.dataset_id,
        "model": model,
        "options": options,
        "history": result.history,
        "best_epoch": result.best_epoch,
        "stopped_early": result.stopped_early,
    }


def load_model(run_dir: Path, dataset: pf.Dataset) -> tuple[Any, str]:
    """The model of a run, with the standardisation it was trained with, and its precision.

    Raises
    ------
    CheckpointError
        No finished run, or a model of other features.
    """
    import torch

    from panelflow.modeling import standardize

    path = run_dir / MODEL
    if not path.exists():
        raise CheckpointError(f"{path} is missing: the run is not finished. Run panelflow train with --resume.")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        names = {"features": saved["features"], "targets": saved["targets"]}
    except Exception as error:  # whatever torch meets in a torn file
        raise CheckpointError(f"{path} is not whole ({error}); run panelflow train with --resume.") from error
    for role, trained in names.items():
        if trained != getattr(dataset, role):
            raise CheckpointError(
                f"{path} was trained on the {role} {trained}; {dataset.folder.path()} has {getattr(dataset, role)}"
            )
    model = standardize(make_model(saved["model"], len(dataset.features), len(dataset.targets)), dataset)
    try:
        model.load_state_dict(saved["state"])
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model that its factory makes now: {error}") from error
    return model.eval(), saved["precision"]
