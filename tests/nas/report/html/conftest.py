import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from costmodel.protocols import load_pricer
from nas.corpus.ngrams import NgramBaseline
from nas.recipe.candidate import recipe_at
from nas.report.html.page import write_report
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import ParentResult, write_config, write_meta
from nas.run.ledger import Record
from nas.run.run import Run
from search_spaces.architecture import arch_id
from search_spaces.bases import base_architecture
from search_spaces.budget.priced_space import price_architecture
from search_spaces.deployed import deployed
from search_spaces.notation import parse, placement
from tests.conftest import made_meta, made_record


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run's folder of records; further arguments are those of `write_run`."""
    return lambda records, **rest: write_run(tmp_path / "run", records, **rest)


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that tests leave as it is, its page in it: a front of four, a baseline, one that diverged."""
    diverged = record(0, "SM+LN+G", "candidate", 0, None, reason="loss above the first one", tokens=512)
    completed = (
        record(index, name, role, seed, loss)
        for index, (name, role, losses) in enumerate(MEMBERS, 1)
        for seed, loss in enumerate(losses)
    )
    folder = write_run(tmp_path_factory.mktemp("whole") / "run", [diverged, *completed])
    write_report(Run.read(folder))
    return folder


BASE = base_architecture("gpt2-small")
PRICER = load_pricer("published")
MEMBERS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    # placement, role, validation loss with each seed
    ("7xlHlRo-5xlHooo", "candidate", (math.log(15.5), math.log(15.7))),
    ("6xoSoRo-6xooooo", "candidate", (math.log(16.9),)),
    ("4xlSlRo-8xlSooo", "candidate", (math.log(12.1), math.log(12.0))),
    ("10xlSlRo-2xooooo", "candidate", (math.log(8.1), math.log(8.15))),
    ("SM+LN+R", "baseline", (math.log(7.1),)),
)


def record(index: int, name: str, role: str, seed: int, loss: float | None, **changes: Any) -> Record:
    """A record of one trial, priced as a search prices it."""
    member = parse(name, BASE)
    runs_as = deployed(member.architecture)
    priced = price_architecture(member.architecture, PRICER, StudyConfig(budget_latency="5min").workload, "folded")
    facts: dict[str, Any] = {"trial_id": f"trial{index}-s{seed}-a0", "arch_id": arch_id(member.architecture)}
    facts |= {"notation": name, "placement": placement(member.architecture)}
    facts |= {"role": "replicate" if seed else role, "status": "completed" if loss is not None else "diverged"}
    facts |= {"scale": "proxy", "width": 96, "tokens": 4096, "val_loss": loss}
    facts |= {"perplexity": None if loss is None else math.exp(loss), "cost_model_id": PRICER.cost_model_id}
    facts |= {"sent_bytes": priced.price.sent_bytes, "latency_s": priced.price.latency_s}
    facts |= {"latency_s_range": priced.latency_s_range, "seed": seed, "deployed_id": arch_id(runs_as)}
    facts |= {"deployed": placement(runs_as)}
    return made_record(index, **{**facts, **changes})


def write_run(folder: Path, records: Sequence[Record], *, meta: dict[str, Any] | None = None, **config: Any) -> Path:
    """Makes a run's folder of records. meta: changes of what it says of itself; the rest is of its configuration."""
    folder.mkdir()
    write_config(folder, StudyConfig(**{"budget_latency": "5min", **config}))
    facts: dict[str, Any] = {
        "cost_model_id": PRICER.cost_model_id,
        "corpus": "c0ffee",
        "reference": (300.0, math.log(213.0)),
        "num_members": 10**30,
        "num_feasible": 12345,
        "base": BASE,
        "recipe": recipe_at("proxy", "stdlib", entropy_regularised=True),
        "parent": ParentResult(name="builtin", notation="SM+LN+G", val_loss=math.log(6.9), latency_s=473.4),
        "ngrams": NgramBaseline(tokens=3_900_000, losses=tuple(map(math.log, (213.0, 36.0, 16.2, 12.7, 11.5)))),
    }
    write_meta(folder, made_meta(**{**facts, **(meta or {})}))
    ledger.append(folder / ledger.FILE_NAME, *records)
    return folder
