"""The API reference has every public name, and every name in it is documented."""

import inspect
import re
from pkgutil import resolve_name

import pytest

import costmodel
import nas
from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
NAMES = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def test_every_public_name_is_in_the_reference() -> None:
    in_reference = [resolve_name(name) for name in NAMES]
    for package in (costmodel, nas):
        missing = [name for name in package.__all__ if getattr(package, name) not in in_reference]
        assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_the_reference_is_documented(name: str) -> None:
    documented = resolve_name(name)
    assert inspect.getdoc(documented)
    for attribute, value in vars(documented).items() if inspect.isclass(documented) else ():
        if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(documented, attribute)), f"{name}.{attribute} has no docstring"
