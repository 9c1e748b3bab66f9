"""A run: the configuration of a study and the folder that holds everything it produces.

run.yaml meta.json parent/ blocks.csv trials.jsonl trials.csv pareto.csv architectures/ trials/<trial_id>/ plots/
report.html, what `nas.export` makes of it in exports/, and of the user's own network, testbed and space a copy
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import dump, load_mapping
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from nas.corpus.ngrams import NgramBaseline
from nas.recipe.recipe import SCALES, Recipe
from nas.results import ledger
from nas.results.ledger import Record
from nas.results.parent import ParentResult
from nas.storage import RUNS, newest, replace_file
from nas.study.config import StudyConfig, study_recipe
from nas.study.schedule import GENERATION_SIZE
from search_spaces.architecture import Architecture, canonical
from search_spaces.definition import load_definition
from search_spaces.space import SearchSpace, build_space

CONFIG_FILE = "run.yaml"
KEPT_FILES = {"space": "space.yaml", "network": "network.yaml", "testbed": "testbed.yaml"}  # the user's own, copied
FORMER_SPACES = {"gpt2-small": "gpt2-papers"}
FORMER_PROXY = replace(SCALES["proxy"], batch=4, micro_batch=4, learning_rate=6e-3)  # moved by AdamW
META_SCHEMA_VERSION = 3  # 1 did not hold the base, 2 not the recipe
PARENT_FOLDER = "parent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What a run was made with, beyond its configuration.

    reference: the hypervolume's reference point: (latency_s, natural log of the unigram model's perplexity).
    base: the dimensions that all members share (its own layers are of no account).
    recipe: what candidates are trained with (`nas.study.config.study_candidate`).
    parent: what the parent reaches, which is kept in PARENT_FOLDER; None without one.
    ngrams: what n-gram models reach of the training tokens that a candidate sees; None in runs from before there were.
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
    base: Architecture
    recipe: Recipe
    parent: ParentResult | None = None
    ngrams: NgramBaseline | None = None

    def __post_init__(self) -> None:
        if self.schema_version != META_SCHEMA_VERSION:
            raise UserError(f"`schema_version` must be {META_SCHEMA_VERSION}, but got {self.schema_version}.")


def new_folder(output_dir: Path | None) -> Path:
    """The folder of a new run, made if need be: `output_dir`, or `runs/<UTC time>`.

    Raises UserError if it already holds a run or cannot be written.
    """
    folder = (output_dir or RUNS / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")).absolute()
    if _is_file(folder / CONFIG_FILE):
        raise UserError(f"--output-dir {folder} already holds a run; continue it with --resume {folder}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output-dir {folder} must be a folder we can write to: {error.strerror}.") from None
    return folder


def find_run(run: str) -> Path:
    """The folder of an existing run; `latest` is the newest under `runs/`. Raises UserError if there is none."""
    if run == "latest":
        if (newest_run := newest(CONFIG_FILE)) is None:
            raise UserError(f"there is no run under {RUNS}/ yet; start one with python -m nas.search.")
        return newest_run.absolute()
    folder = Path(run).absolute()
    if not _is_file(folder / CONFIG_FILE):
        raise UserError(f"RUN must be the folder of a run (with run.yaml) or `latest`, but got {run!r}.")
    return folder


def write_config(folder: Path, config: StudyConfig) -> None:
    """Makes the folder a run, so it comes last; a space, network and testbed of the user's own are kept with it."""
    for field, name in KEPT_FILES.items():
        given = getattr(config, field)
        if given is not None and given.endswith((".yaml", ".yml")) and not (folder / name).exists():
            replace_file(folder / name, Path(given).read_bytes().decode("utf-8"))
    replace_file(folder / CONFIG_FILE, dump(asdict(config)))


def run_space(folder: Path | None, config: StudyConfig, tables: Architecture | None = None) -> SearchSpace:
    """The space of a run; None is a run to be. tables: whose vocabulary and context its base has instead of its own."""
    definition = load_definition(own_file(folder, config, "space") or config.space)
    if tables is not None:
        dimensions = replace(definition.dimensions, vocab=tables.vocab_size, context=tables.context)
        definition = replace(definition, dimensions=dimensions)
    return build_space(definition)


def run_pricer(
    folder: Path | None, config: StudyConfig, network: str | None = None, testbed: Path | None = None
) -> Pricer:
    """What a run is priced under, on its own network and testbed unless others are given; None is a run to be."""
    own = own_file(folder, config, "testbed")
    return load_pricer(
        config.protocol,
        network or own_file(folder, config, "network"),
        testbed or (None if own is None else Path(own)),
        None if config.weights is None else EngineSetting(weights=config.weights),
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
    """Raises UserError, naming the file, if it is damaged."""
    data = load_mapping(folder / CONFIG_FILE)
    data.setdefault("parent", "none")
    if "accounting" not in data:  # of a time when candidates were priced as written, and gpt2-small had fewer choices
        data |= {"accounting": "written", "space": FORMER_SPACES.get(data["space"], data["space"])}
    data.setdefault("finalist_seeds", 0)  # of a time when every candidate had one seed
    data.setdefault("generation_size", GENERATION_SIZE)
    data.setdefault("gpus_per_trial", 0.0)
    return decode(StudyConfig, data, str(folder / CONFIG_FILE))


def write_meta(folder: Path, meta: Meta) -> None:
    data = asdict(meta) | {"base": canonical(meta.base)}
    replace_file(folder / "meta.json", json.dumps(data, indent=2) + "\n")


def read_meta(folder: Path) -> Meta:
    """Raises UserError, naming the file, if it is missing or damaged."""
    path = folder / "meta.json"
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} must be the JSON a run writes at its start, but: {error}") from None
    if isinstance(data, dict) and data.get("schema_version") in (1, 2):
        config = read_config(folder)
        former = study_recipe(config, None)
        if config.scale == "proxy":
            tokens, seq_len = config.tokens or FORMER_PROXY.tokens, config.seq_len
            former = replace(former, optimizer="adamw", scale=replace(FORMER_PROXY, tokens=tokens, seq_len=seq_len))
        added = {"base": canonical(run_space(folder, config).base), "recipe": asdict(former)}
        data = added | data | {"schema_version": META_SCHEMA_VERSION}
    return decode(Meta, data, str(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name too long, a folder we may not enter
        raise UserError(f"{path} cannot be opened: {error.strerror}.") from None
