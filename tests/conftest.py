import gc
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Here and in processes that tests start, which are not to compile every module anew.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from costmodel import ops
from costmodel.cost import Budget, Price
from costmodel.engine.children import kept_children
from costmodel.engine.registry import INSTALL_CRYPTEN
from costmodel.estimate import Pricer
from costmodel.protocols import TRUST
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.ngrams import NgramBaseline
from nas.recipe.candidate import recipe_at
from nas.run.folder import Meta
from nas.run.ledger import Record
from nas.study.trials import Trials
from nas.study.worker import run_trial
from search_spaces.bases import base_architecture
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.space import load_space

# `make test-all` asks for the second. A busy machine is no failure.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("quick")

# marker -> the packages a test of it needs, and where they come from
EXTRAS = {
    "needs_engine": (("spu",), "the MPC engine: pip install 'spu==0.9.5'"),
    "needs_crypten": (("crypten",), f"the engine CrypTen: {INSTALL_CRYPTEN}"),
    "needs_hf": (("datasets", "transformers"), "the extra hf: pip install -e '.[hf]'"),
}
# Under xdist the tests of a file run in one process, and so do those of these folders and files, which share what is
# costly to start.
GROUPS = {
    "engine": (
        "costmodel/engine",
        "costmodel/protocols/test_crypten.py",
        "costmodel/protocols/test_measured_bytes.py",
        "costmodel/protocols/test_variants.py",
        "costmodel/calibration",
        "costmodel/deployment/test_deploy.py",
        "costmodel/execution/test_memory.py",
        "costmodel/tracing/test_models.py",
        "docs",
        "nas/private",
        "nas/conversion/test_families.py",
        "nas/conversion/test_fold.py",
        "nas/test_llama.py",
    ),
    "search": ("nas/test_search.py",),
    "ray": ("experiments/test_gpu.py", "nas/study/test_cluster.py", "nas/study/test_ray_tune.py"),
}
# The groups and these files are run first, so that the processes end together: each takes a tenth of a minute or more.
LONG = (
    "costmodel/test_main.py",
    "nas/attention/test_cuda_triton.py",
    "nas/conversion/test_huggingface.py",
    "nas/conversion/test_parent.py",
    "nas/report/html/test_page.py",
    "nas/run/test_own_space.py",
    "nas/searchers/test_searchers.py",
    "nas/searchers/test_trellis.py",
    "nas/study/test_blocks.py",
    "nas/study/test_sharing.py",
    "nas/test_api.py",
    "nas/test_train.py",
    "nas/training/test_compilation.py",
    "nas/training/test_trainer.py",
    "search_spaces/budget/test_feasible.py",
    "search_spaces/budget/test_priced_space.py",
)
SECONDS: dict[type, float] = {ops.Gelu: 9.0, ops.Relu: 3.0, ops.LayerNorm: 4.0, ops.Linear: 1.0}


class ToyPricer(Pricer):
    """Seconds per op kind, whatever the shape."""

    protocol, network, cost_model_id, range_over = "toy", None, "0", "nothing"
    trust = TRUST["published"]

    def price(self, op):
        return Price(latency_s=SECONDS.get(type(op), 0.5), sent_bytes=1.0)


def group_of(nodeid: str) -> str:
    """The group of a test: a name in `GROUPS`, or its file."""
    file = Path(nodeid.partition("::")[0]).relative_to("tests")
    parts = {file.as_posix(), *(folder.as_posix() for folder in file.parents)}
    return next((name for name, members in GROUPS.items() if parts & set(members)), file.as_posix())


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A group of tests is in one process, group after group as they are collected."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    named = [*LONG, *(path for members in GROUPS.values() for path in members)]
    missing = [path for path in named if not (Path(__file__).parent / path).exists()]
    assert not missing, f"groups and files of tests/conftest.py must be there, but got {missing}"
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what takes longest first where xdist runs it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {name: place for place, name in enumerate((*GROUPS, *LONG))}
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose extra is not installed."""
    for marker, (packages, remedy) in EXTRAS.items():
        if item.get_closest_marker(marker) and not all(map(find_spec, packages)):
            pytest.skip(f"needs {remedy}")


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """Acts, here and in the processes that tests start, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage() -> Iterator[None]:
    """Trainings collect garbage at their end, which takes half a second where all modules are looked through."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Ledgers and checkpoints are written through by the hundred; none has to outlive the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_parties() -> Iterator[None]:
    """Processes of the MPC engine go from test to test, each with a fresh runtime, instead of importing it anew."""
    with kept_children():
        yield


@contextmanager
def trials_here() -> Iterator[None]:
    """Searches train one trial after another in this process; none starts Ray, or workers that import torch."""

    def run_trials(trials: Trials, *resources: object, **settings: object) -> None:
        while (trial := trials.next_trial()) is not None:
            trials.started(trial)
            for record in run_trial(trial):
                trials.happened(record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nas.study.ray_tune.run_trials", run_trials)
        yield


@pytest.fixture
def without_ray() -> Iterator[None]:
    """Runs trials as `trials_here` does."""
    with trials_here():
        yield


@pytest.fixture
def free_peers() -> Callable[[int], tuple[tuple[str, int], ...]]:
    """`free_peers(2)`: so many hosts and ports of this machine, each free and with a free one after it."""

    def peers(count: int) -> tuple[tuple[str, int], ...]:
        addresses: dict[int, tuple[str, int]] = {}
        while len(addresses) < count:
            with socket.create_server(("127.0.0.1", 0)) as first:
                port = first.getsockname()[1]
                with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                    if not addresses.keys() & {port - 1, port, port + 1}:
                        addresses[port] = ("127.0.0.1", port)
        return tuple(addresses.values())

    return peers


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`snapshot("table", text)`: the text is that of snapshots/table.txt beside the test, but for far decimal places.

    A JSON document is a line for each of its keys there. `SNAPSHOTS=write pytest PATH` writes the files anew.
    """

    def compare(name: str, text: str) -> None:
        path = request.path.parent / "snapshots" / (re.sub("[^a-z0-9]+", "-", name.lower()) + ".txt")
        if text.startswith("{"):
            document, *rest = text.splitlines()
            text = "\n".join([*(f"{key}: {json.dumps(value)}" for key, value in json.loads(document).items()), *rest])
        rounded = re.sub(r"\d+\.\d{7,}(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", text)
        if os.environ.get("SNAPSHOTS") == "write":
            path.parent.mkdir(exist_ok=True)
            path.write_text(rounded)
        assert rounded.splitlines() == path.read_text().splitlines(), f"{path} differs; SNAPSHOTS=write writes it"

    return compare


def refusals(name: str, test_file: str) -> list[tuple[str, str]]:
    """Arguments of a command and what it says of them, from a file beside the test: `$ ARGUMENTS`, then a line."""
    lines = Path(test_file).with_name(name).read_text(encoding="utf-8").splitlines()
    return [(args.removeprefix("$").strip(), message) for args, message in zip(lines[::2], lines[1::2], strict=True)]


def python(*args: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """What a process of Python prints, which must end well; env: added to that of this process."""
    command, around = [sys.executable, *args], {**os.environ, **(env or {})}
    done = subprocess.run(command, env=around, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def feasible():
    return within_budget(price_space(load_space("tiny"), ToyPricer(), 16), Budget(latency_s=25.0))


def made_record(index: int = 0, **changes: Any) -> Record:
    """A record of a ledger with the fields a test does not care about filled in."""
    fields: dict[str, Any] = {"event": "finished", "trial_id": f"t{index}-s0-a0", "candidate_id": f"c{index}"}
    fields |= {"arch_id": f"a{index}", "notation": "SM+ScFuFFN", "placement": "2xoSoFs"}
    fields |= {"entropy_regularised": False, "index": index, "generation": 0, "role": "candidate"}
    fields |= {"status": "completed", "scale": "smoke", "width": 8, "tokens": 100, "corpus": "c"}
    fields |= {"tokenizer": "bpe", "split": "validation", "val_loss": 2.0, "perplexity": 7.389}
    fields |= {"protocol": "published", "network": None, "cost_model_id": "m", "rounds": None}
    fields |= {"sent_bytes": 1e9, "latency_s": 100.0, "latency_s_range": (90.0, 110.0), "seed": 0}
    fields |= {"versions": {"python": "3.11"}}
    return Record(**{**fields, **changes})


@pytest.fixture
def make_record() -> Callable[..., Record]:
    return made_record


def over_seeds(index: int, *losses: float | None, role: str = "candidate", **changes: Any) -> list[Record]:
    """The records of one candidate, from its loss with each seed; None for one that diverged."""
    records = []
    for seed, loss in enumerate(losses):
        fields = {"seed": seed, "trial_id": f"t{index}-s{seed}-a0", "role": "replicate" if seed else role}
        fields |= {"val_loss": loss, "perplexity": None if loss is None else math.exp(loss)}
        status = "diverged" if loss is None else "completed"
        records.append(made_record(index, status=status, **fields, **changes))
    return records


@pytest.fixture(name="over_seeds")
def over_seeds_() -> Callable[..., list[Record]]:
    return over_seeds


@pytest.fixture
def ngrams() -> NgramBaseline:
    """Perplexities 200, 40, 18, 15 and 14 of 524,288 tokens."""
    losses = tuple(math.log(perplexity) for perplexity in (200.0, 40.0, 18.0, 15.0, 14.0))
    return NgramBaseline(tokens=524_288, losses=losses)


def made_meta(**changes: Any) -> Meta:
    """What a run says of itself, with the fields a test does not care about filled in."""
    fields: dict[str, Any] = {"created": "2026-01-01T00:00:00+00:00", "versions": {"python": "3.11"}}
    fields |= {"hardware": {"cores": "2"}, "cost_model_id": "1-m", "corpus": "c", "tokenizer": "bpe"}
    fields |= {"split": "validation", "vocab_size": 512, "reference": (300.0, 5.0), "num_members": 10}
    fields |= {"num_feasible": 5, "base": base_architecture("tiny")}
    fields |= {"recipe": recipe_at("smoke", "stdlib", entropy_regularised=True)}
    return Meta(**{**fields, **changes})


@pytest.fixture
def make_meta() -> Callable[..., Meta]:
    return made_meta


def write_text(path: Path) -> Path:
    """Text of which a tokenizer and n-grams learn something."""
    path.write_text("".join(f"value_{index % 7} = {index * index % 10_007}\n" for index in range(2_000)))
    return path


def write_email(folder: Path) -> Path:
    """A corpus of text that nobody made up: the package `email` of the standard library."""
    folder.mkdir()
    for path in sorted(Path(os.__file__).parent.joinpath("email").glob("*.py")):
        (folder / path.name).write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    return prepare(str(text), 300, tmp_path_factory.mktemp("cache"))
