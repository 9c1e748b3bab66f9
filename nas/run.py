"""A run: the configuration of a study and the folder that holds everything it produces.

run.yaml meta.json trials.jsonl trials.csv pareto.csv architectures/ trials/<trial_id>/ plots/
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from costmodel.cost import Budget
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from costmodel.schema import decode
from costmodel.units import parse_bytes, parse_seconds
from costmodel.yamlfile import dump, load_mapping
from nas import ledger
from nas.candidate import Candidate
from nas.config import ScaleName
from nas.ledger import Record
from nas.recipes import recipe_for
from nas.searcher import SearcherName
from search_spaces.notation import Named
from search_spaces.space import SearchSpace, load_space

RUNS = Path("runs")
CONFIG_FILE = "run.yaml"
KEPT_FILES = {"space": "space.yaml", "network": "network.yaml", "testbed": "testbed.yaml"}  # the user's own, copied
MAX_SEED = 2**63 - 1  # torch's generators take 64 bits
META_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """What to search, within which budget, and on what.

    Args:
        budget_latency: most seconds a model may take per token, with a unit, such as 5min.
        budget_comm: most bytes all parties together may send per token, with a unit, such as 8GB.
        space: a shipped search space or the path of a space's YAML file.
        seq_len: tokens in the prompt, for pricing and for training.
        protocol: the MPC protocol that prices a model: published, semi2k, aby3 or cheetah.
        network: between the parties, for protocols other than published: lan, wan, another preset or a .yaml file.
        testbed: a .yaml file of compute seconds from `python -m costmodel calibrate`, instead of the committed ones.
        searcher: how candidates are chosen.
        num_trials: candidates to train, baselines not counted.
        time_budget: stop after this long, with a unit; the run can be resumed.
        scale: how large, how long and how fast a candidate is trained.
        tokens: training tokens of a candidate at full fidelity; by default the scale's.
        data: stdlib, codeparrot, languini (codeparrot:FOLDER is a local copy), or the path of a text, jsonl or
            parquet file or folder.
        max_concurrent: trials at a time; by default one per core, or as many as share the GPUs.
        gpus_per_trial: share of a GPU that a trial takes.
        ray_address: an existing Ray cluster whose nodes share the run folder.
        seed: the same seed gives the same trials and, on a CPU, the same numbers.
    """

    budget_latency: str
    budget_comm: str | None = None
    space: str = "gpt2-small"
    seq_len: int = 128
    protocol: str = "published"
    network: str | None = None
    testbed: str | None = None
    searcher: SearcherName = "evolution"
    num_trials: int = 20  # five generations of four: two before the first feedback, three after it
    time_budget: str | None = None
    scale: ScaleName = "proxy"
    tokens: int | None = None
    data: str = "stdlib"
    max_concurrent: int | None = None
    gpus_per_trial: float = 0.0
    ray_address: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seq_len", "num_trials", "tokens", "max_concurrent"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{flag(name)} must be at least 1, but got {value}.")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed must be from 0 to {MAX_SEED}, but got {self.seed}.")
        if not 0 <= self.gpus_per_trial < float("inf"):
            raise ValueError(f"--gpus-per-trial must be finite and not negative, but got {self.gpus_per_trial}.")
        if self.gpus_per_trial > 1 and self.gpus_per_trial % 1:
            raise ValueError(f"--gpus-per-trial must be whole or below 1, but got {self.gpus_per_trial}.")
        _ = self.budget, self.time_budget_s

    @property
    def budget(self) -> Budget:
        comm = None if self.budget_comm is None else parse_bytes(self.budget_comm, "--budget-comm")
        return Budget(latency_s=parse_seconds(self.budget_latency, "--budget-latency"), sent_bytes=comm)

    @property
    def time_budget_s(self) -> float | None:
        return None if self.time_budget is None else parse_seconds(self.time_budget, "--time-budget")


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def study_candidate(config: StudyConfig, member: Named) -> Candidate:
    """A member of the space with the recipe that the study trains it with."""
    return candidate_at(member, config.scale, seq_len=config.seq_len, tokens=config.tokens, data=config.data)


def candidate_at(member: Named, scale: ScaleName, *, seq_len: int | None, tokens: int | None, data: str) -> Candidate:
    """A member at a scale; None keeps the scale's own sequence length or tokens."""
    changes: dict[str, Any] = {"seq_len": seq_len, "tokens": tokens}
    given = {name: value for name, value in changes.items() if value is not None}
    recipe = recipe_for(scale, data, entropy_regularised=member.entropy_regularised)
    recipe = replace(recipe, scale=replace(recipe.scale, **given))
    return Candidate(architecture=member.architecture, recipe=recipe)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What a run was made with, beyond its configuration.

    reference: the hypervolume's reference point: (latency_s, natural log of the unigram model's perplexity).
    """

    schema_version: int = META_SCHEMA_VERSION
    created: str
    versions: dict[str, str]
    hardware: dict[str, str]
    cost_model_id: str
    corpus: str
    tokenizer: str
    split: str
    vocab_size: int
    reference: tuple[float, float]
    num_members: int
    num_feasible: int

    def __post_init__(self) -> None:
        if self.schema_version != META_SCHEMA_VERSION:
            raise ValueError(f"`schema_version` must be {META_SCHEMA_VERSION}, but got {self.schema_version}.")


def new_folder(output_dir: Path | None) -> Path:
    """The folder of a new run, made if need be: `output_dir`, or `runs/<UTC time>`.

    Raises ValueError if it already holds a run or cannot be written.
    """
    folder = (output_dir or RUNS / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")).absolute()
    if _is_file(folder / CONFIG_FILE):
        raise ValueError(f"--output-dir {folder} already holds a run; continue it with --resume {folder}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--output-dir {folder} must be a folder we can write to: {error.strerror}.") from None
    return folder


def find_run(run: str) -> Path:
    """The folder of an existing run; `latest` is the newest under `runs/`. Raises ValueError if there is none."""
    if run == "latest":
        runs = sorted(RUNS.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
        if not runs:
            raise ValueError(f"there is no run under {RUNS}/ yet; start one with python -m nas.search.")
        return runs[-1].parent.absolute()
    folder = Path(run).absolute()
    if not _is_file(folder / CONFIG_FILE):
        raise ValueError(f"RUN must be the folder of a run (with run.yaml) or `latest`, but got {run!r}.")
    return folder


def write_config(folder: Path, config: StudyConfig) -> None:
    """Makes the folder a run, so it comes last; a space, network and testbed of the user's own are kept with it."""
    for field, name in KEPT_FILES.items():
        given = getattr(config, field)
        if given is not None and given.endswith((".yaml", ".yml")) and not (folder / name).exists():
            replace_file(folder / name, Path(given).read_bytes().decode("utf-8"))
    replace_file(folder / CONFIG_FILE, dump(asdict(config)))


def run_space(folder: Path | None, config: StudyConfig) -> SearchSpace:
    """The space of a run; None is a run to be."""
    return load_space(own_file(folder, config, "space") or config.space)


def run_pricer(
    folder: Path | None, config: StudyConfig, network: str | None = None, testbed: Path | None = None
) -> Pricer:
    """What a run is priced under, on its own network and testbed unless others are given; None is a run to be."""
    own = own_file(folder, config, "testbed")
    return load_pricer(
        config.protocol, network or own_file(folder, config, "network"), testbed or (None if own is None else Path(own))
    )


def own_file(folder: Path | None, config: StudyConfig, field: str) -> str | None:
    """What the configuration names in a field of `KEPT_FILES`: the run's copy of it, where there is one."""
    given: str | None = getattr(config, field)
    copy = None if folder is None else folder / KEPT_FILES[field]
    return str(copy) if given is not None and copy is not None and copy.exists() else given


def read_ledger(folder: Path) -> tuple[Record, ...]:
    """The records of a run, none if it has not started a trial yet; a torn last line is left out with a warning."""
    path = folder / ledger.FILE_NAME
    return ledger.read(path) if path.exists() else ()


def read_config(folder: Path) -> StudyConfig:
    """Raises ValueError, naming the file, if it is damaged."""
    return decode(StudyConfig, load_mapping(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


def write_meta(folder: Path, meta: Meta) -> None:
    replace_file(folder / "meta.json", json.dumps(asdict(meta), indent=2) + "\n")


def read_meta(folder: Path) -> Meta:
    """Raises ValueError, naming the file, if it is missing or damaged."""
    path = folder / "meta.json"
    try:
        data: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be the JSON a run writes at its start, but: {error}") from None
    return decode(Meta, data, str(path))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run for this process. Raises ValueError if another process is running it."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being run by another process; wait for it or stop it first.") from None
        yield


def is_running(folder: Path) -> bool:
    """Whether a process holds the run."""
    try:
        with locked(folder):
            return False
    except ValueError:
        return True


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file, through to the disk, or leaves the old one."""
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name too long, a folder we may not enter
        raise ValueError(f"{path} cannot be opened: {error.strerror}.") from None
