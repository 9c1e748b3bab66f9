from pathlib import Path

import pytest
from rich.console import Console

from costmodel.config.schema import decode
from experiments.papers import run as papers
from experiments.papers.settings import Settings

DATA = {
    "scale": "smoke",
    "title": "tiny",
    "base": "tiny",
    "seeds": [0],
    "views": ["costs", "perplexities", "quarters", "maps", "steps", "thresholds", "margins", "nans"],
    "rows": {"EReg(SM(t)+ScFuFFN)": {"perplexity": 3.21}},
}


def ran(name: str, data: dict) -> str:
    console = Console(record=True, width=300)
    papers.run(name, decode(Settings, data, name), console)
    return console.export_text()


def test_one_training_makes_every_table_and_figure_and_is_shared_by_other_experiments(text: str, tmp_path: Path):
    told = ran("one", DATA | {"data": text})
    assert "1 of 1" in told
    assert "trained here at scale smoke, not the papers': 8,192 tokens" in told
    folder = tmp_path / "runs/experiments/one/smoke"
    written = {path.name for path in folder.iterdir()}
    assert {f"{view}.{ending}" for view in DATA["views"] for ending in ("md", "csv", "tex")} <= written
    assert {f"{view}.png" for view in ("quarters", "maps", "steps", "thresholds", "margins")} <= written
    for table in folder.glob("*.csv"):
        assert "at scale smoke" in table.read_text().splitlines()[0]
    lines = (folder / "maps.csv").read_text().splitlines()
    assert len(lines) == 1 + 2  # the layers of `tiny`
    entropies = [float(cell) for line in lines[1:] for cell in line.split(",")[2:]]
    assert len(entropies) == 2 * 2
    assert all(0 < entropy < 3.47 for entropy in entropies)  # ln 32
    again = ran("two", DATA | {"data": text, "title": "another"})
    assert "1 of 1" not in again  # nothing is trained
    assert (tmp_path / "runs/experiments/two/smoke/maps.csv").read_text() == (folder / "maps.csv").read_text()


def test_outcomes_of_other_experiments_are_kept_and_what_lost_its_folder_is_trained_anew(text: str, tmp_path: Path):
    rows = {"SM+R": {}, "leaky": {"net": "SM+LR", "slopes": "global"}}
    ran("one", DATA | {"data": text, "views": ["nans"], "rows": {"SM+R": {}}})
    told = ran("two", DATA | {"data": text, "views": ["nans", "slopes"], "rows": rows})
    assert "SM+LR" in told
    assert "seed 0 SM+R" not in told
    shared = tmp_path / "runs/experiments/papers/smoke"
    assert len((shared / "outcomes.csv").read_text().splitlines()) == 1 + 2
    slopes = (tmp_path / "runs/experiments/two/smoke/slopes.csv").read_text().splitlines()[1:]
    assert {tuple(line.split(",")[::2]) for line in slopes} == {("leaky", "layers.0")}  # one slope for all layers
    for path in shared.glob("*/diagnostics.jsonl"):
        path.unlink()
    with pytest.raises(ValueError, match="must hold the diagnostics of a training.*delete its folder"):
        ran("one", DATA | {"data": text, "views": ["steps"], "rows": {"SM+R": {}}})
