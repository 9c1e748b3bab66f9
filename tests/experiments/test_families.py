"""The committed table of published models is what is computed."""

import pytest

pytest.importorskip("transformers")

from experiments.__main__ import settings_of
from experiments.families import HEADER, PAGE, row, rows

SETTINGS = settings_of("families")


@pytest.mark.parametrize(
    ("model", "protocol"), [("opt-125m", "cheetah"), ("opt-125m", "sigma"), ("Qwen3-0.6B", "semi2k")]
)
def test_a_row_of_the_page_is_as_computed(model: str, protocol: str) -> None:
    assert row(model, protocol, SETTINGS.seq_len) in PAGE.read_text().splitlines()


def test_the_page_has_every_model_under_every_protocol() -> None:
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEADER[0])
    table = lines[start + 2 : lines.index("<!-- end -->") - 1]
    assert [tuple(line.split(" | ")[:2]) for line in table] == [(f"| {name}", by) for name, by in rows(SETTINGS)]
