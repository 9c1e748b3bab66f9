"""The notebooks in `examples/` run as they are. To write their outputs anew: `python tests/examples/test_notebooks.py`.

Cells of code are run one after another, what they print is their output. Of the notebook of prices, which are exact,
the stored outputs must still be true; trainings differ from machine to machine.
"""

import json
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"


def read(name: str) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any], folder: Path) -> list[str]:
    """What every cell of code prints, run in a folder that its files stay in."""
    names, printed = {"__name__": "__main__"}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for number, cell in enumerate(code_cells(notebook), 1):
            with redirect_stdout(StringIO()) as out:
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            printed.append(out.getvalue())
    return printed


def stored(notebook: dict[str, Any]) -> list[str]:
    return ["".join(part for output in cell["outputs"] for part in output["text"]) for cell in code_cells(notebook)]


def test_the_notebook_of_prices_says_what_prices_are(tmp_path):
    notebook = read("price.ipynb")
    assert outputs(notebook, tmp_path) == stored(notebook), "python tests/examples/test_notebooks.py writes them anew"


@pytest.mark.usefixtures("without_ray")
def test_the_notebook_of_a_search_runs(tmp_path):
    notebook = read("search.ipynb")
    size, progress, front, files, _ = outputs(notebook, tmp_path)
    assert size == stored(notebook)[0]
    assert progress.count("completed: ") >= 6
    assert front.split()[:2] == ["notation", "deployed"]
    assert "plots/pareto.png\n" in files
    assert files.endswith("report.html\n")


def test_a_cell_that_fails_fails_the_test(tmp_path):
    broken = {"cells": [{"cell_type": "code", "source": ["import nas\n", "nas.Study(budget_latency='0s')"]}]}
    with pytest.raises(UserError, match="must be a positive number with a unit"):
        outputs(broken, tmp_path)


def renew(name: str) -> None:
    """Runs a notebook and stores what it prints."""
    notebook = read(name)
    with tempfile.TemporaryDirectory() as folder:
        printed = outputs(notebook, Path(folder))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (EXAMPLES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        renew(path.name)
