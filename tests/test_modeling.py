from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from panels import make_panel

import panelflow as pf
from panelflow.modeling import resolve_loss, standardize


def test_standardised_by_training_statistics_missing_and_constant_to_zero(prepare: Any) -> None:
    panel = make_panel()
    panel["f1"] = np.float32(0.1)
    panel.loc[::5, "f2"] = np.nan
    panel["f3"] = np.nan
    ds = prepare(panel)
    inputs = []
    probe = torch.nn.Linear(4, 1).double()
    probe.register_forward_hook(lambda _m, args, _o: inputs.append(args[0]))
    model = standardize(probe, ds)
    rows = ds["train"].to_pandas()[ds.features].astype(np.float64)
    model(torch.tensor(rows.to_numpy()))
    found = inputs[0].numpy()
    np.testing.assert_allclose(found[:, 0], (rows["f0"] - rows["f0"].mean()) / rows["f0"].std(ddof=0), rtol=1e-9, atol=1e-9)
    assert (found[:, 1] == 0).all()
    assert (found[rows["f2"].isna().to_numpy(), 2] == 0).all()
    assert (found[:, 3] == 0).all()
    model(torch.full((2, 4), 1e30, dtype=torch.float64))
    assert (inputs[1][:, [1, 3]] == 0).all()  # a constant column stays 0 whatever comes


def test_statistics_travel_with_the_weights(dataset: pf.Dataset, prepare: Any) -> None:
    other = prepare(make_panel(seed=9))
    model, stranger = standardize(pf.MLP(4), dataset), standardize(pf.MLP(4), other)
    stranger.load_state_dict(model.state_dict())
    features = torch.randn(5, 4)
    assert torch.equal(model(features), stranger(features))


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
def test_losses_are_per_row(name: str) -> None:
    p, t = torch.randn(7, 3), torch.randn(7, 3)
    losses = resolve_loss(name)(p, t)
    assert losses.shape == (7,)
    functional = {"mse": torch.nn.functional.mse_loss, "mae": torch.nn.functional.l1_loss}
    reference = functional.get(name, torch.nn.functional.huber_loss)
    torch.testing.assert_close(losses.mean(), reference(p, t))


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(pf.OptionError, match="loss='rmse'"):
        resolve_loss("rmse")
