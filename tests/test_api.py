from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import panelflow as pf

NAMES = pf.__all__


def test_all_is_sorted_complete_and_importable() -> None:
    assert sorted(NAMES) == NAMES
    assert dir(pf) == NAMES
    for name in NAMES:
        assert getattr(pf, name) is not None
    source = Path(pf.__file__).read_text()
    typed = set(re.findall(r"import (\w+) as \1", source))
    assert typed == set(NAMES)
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = pf.fitt


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(pf, name)
    text = inspect.getdoc(value)
    assert text
    if inspect.isfunction(value):
        for section in ("Parameters", "Returns", "Raises"):
            assert f"{section}\n{'-' * len(section)}" in text, section
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"\b{parameter}\b", text), parameter
    elif inspect.isclass(value) and not issubclass(value, Exception):
        assert "Parameters\n" in text or "Attributes\n" in text
        for attribute, member in vars(value).items():
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                described = (inspect.getdoc(member) or "") + (text if re.search(rf"\b{attribute}\b", text) else "")
                assert described, f"{name}.{attribute}"


def test_every_error_is_public_and_in_the_tree() -> None:
    from panelflow import errors

    kinds = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, pf.PanelflowError)}
    assert kinds <= set(NAMES)
    assert all(name in (errors.__doc__ or "") for name in kinds)


def test_typed() -> None:
    assert (Path(pf.__file__).parent / "py.typed").exists()
