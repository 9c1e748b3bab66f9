"""The folder of a run, with the configuration of its study and all its results.

run.yaml meta.json parent/ blocks.csv trials.jsonl trials.csv pareto.csv architectures/ trials/<trial_id>/ plots/
report.html, exports/ of `nas.export`, and copies of the user's own network, testbed and space
"""

import errno
import json
import math
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from costmodel.config.files import MOST_YAML, decode, dump, load_file, read_json, read_text
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from nas.corpus.documents import Reading
from nas.corpus.held_out import HeldOut
from nas.corpus.ngrams import NgramBaseline, require_losses
from nas.provenance import SCHEMA_VERSION
from nas.recipe.recipe import Recipe
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.intervals import Documents
from nas.storage import RUNS, newest, replace_file
from search_spaces.architecture import Architecture, canonical, num_heads
from search_spaces.bases import OWN
from search_spaces.forms import FFNS, OF_FEWER_HEADS, Attention, Ffn, Norm
from search_spaces.inner import inner_choices
from search_spaces.space import Choices, Definition, SearchSpace, Withheld, build_space, load_definition

CONFIG_FILE = "run.yaml"
KEPT_FILES = ("space", "network", "testbed")  # fields that may name files of the user, which the run copies
PARENT_FOLDER = "parent"
# attentions and FFNs that `own_space` offers
FORMS: tuple[Attention, ...] = ("softmax", "bounded", "power8", "softmax-half", "none")
LINEAR: tuple[Ffn, ...] = ("fused", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentResult:
    """The unmodified parent of a run's candidates, with its validation and cost.

    name: as the user wrote it, or the folder of a training. notation: name or layer codes of its architecture.
    val_loss: nats per token. latency_s: predicted seconds per token, in the dimensions of the space. documents: weight
    in the mean loss, and loss in nats per token, of each validation document; empty if not recorded.
    """

    name: str
    notation: str
    val_loss: float
    latency_s: float
    documents: Documents = ()

    def __post_init__(self) -> None:
        require_losses("the parent", self.val_loss)

    @property
    def perplexity(self) -> float:
        return math.exp(self.val_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondCorpus:
    """The second corpus on which completed trials are validated.

    data: as the user named it. fingerprint, held_out: as in `Corpus`. ngrams: baselines on it that count the training
    tokens of `Meta.ngrams`. parent_loss: the parent's loss on it, nats per token; None from scratch.
    """

    data: str
    fingerprint: str
    held_out: HeldOut
    ngrams: NgramBaseline
    parent_loss: float | None

    def __post_init__(self) -> None:
        require_losses("the parent on the second corpus", self.parent_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """The facts with which a run was made, besides its configuration.

    corpus: fingerprint. reference: reference point of the hypervolume: (latency budget in seconds, loss of a unigram
    model in nats). num_members, num_feasible: members of the space, and those within the budget. base: the dimensions
    of all members; its own layers are not used. recipe: the recipe that `study_candidate` adapts to each candidate.
    parent: the parent's results, None from scratch; its weights are in PARENT_FOLDER. ngrams: n-gram baselines of a
    candidate's training tokens, or with a parent of the whole training split; None if not counted. withheld: forms of
    attention removed from layers where the parent's scores would leave fixed-point range. held_out: the validation
    text. prior: mean and standard deviation, in nats, of the weights in the surrogate of `trellis` that were fitted to
    other parents (`nas.searchers.surrogate.Priors`); empty for other searchers. read: which files of `--data`'s folders
    were read or left out. planned_tokens: a candidate's training tokens before a short time budget reduced them; None
    if they were not reduced. begin_of_text: the token that begins each sequence, or None.
    """

    schema_version: int = SCHEMA_VERSION
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
    withheld: Withheld = field(default_factory=Withheld)
    held_out: HeldOut | None = None
    prior: dict[str, tuple[float, float]] = field(default_factory=dict)
    read: tuple[Reading, ...] = ()
    second: SecondCorpus | None = None
    planned_tokens: int | None = None
    begin_of_text: str | None = None

    def __post_init__(self) -> None:
        require_losses("the unigram model", self.reference[1])
        if self.vocab_size < 1:
            raise UserError(f"`vocab_size` of a run must be at least 1, but got {self.vocab_size}.")

    @property
    def weak_parent(self) -> str:
        """A warning, with advice, if the parent is no better than a model without context; else empty."""
        baseline = min(self.reference[1], math.log(self.vocab_size))
        if self.parent is None or self.parent.val_loss < baseline:
            return ""
        return (
            f"parent {self.parent.name} has perplexity {self.parent.perplexity:.2f} on the validation tokens, no "
            f"better than a model without context ({math.exp(baseline):.2f}), so candidates are likely to diverge; "
            "train it first, or check its weights, its tokenizer and --data"
        )


def new_folder(output_dir: Path | None) -> Path:
    """Return the folder of a new run, `output_dir` or a new `runs/<UTC time>`, and create it if needed.

    Raises UserError if it already holds a run or cannot be written.
    """
    folder = (output_dir or RUNS / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")).absolute()
    try:
        while output_dir is None and not _made(folder):  # by another search, within this second
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        require_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output-dir {folder} must be a folder we can write to: {error.strerror}.") from None
    return folder


def _made(folder: Path) -> bool:
    """Create a folder, and return whether it is new. Raises OSError."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def require_free(folder: Path) -> None:
    """Raise UserError if a folder holds a run already, or cannot be made or written to. Writes nothing."""
    if _is_file(folder / CONFIG_FILE):
        raise UserError(f"--output-dir {folder} already holds a run; continue it with --resume {folder}.")
    if _is_file(folder / ledger.FILE_NAME):
        raise UserError(f"--output-dir {folder} has a run without its {CONFIG_FILE}; choose another.")
    there = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    if not os.path.isdir(there):
        raise UserError(f"--output-dir {folder} must be a folder we can write to: {os.strerror(errno.ENOTDIR)}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--output-dir {folder} must be a folder we can write to: {os.strerror(errno.EACCES)}.")


def find_run(run: str) -> Path:
    """Return the folder of a run; `latest` is the newest under `runs/`.

    Raises UserError if there is none, or if anything in it is a pipe or device, which could block whoever opens it, or
    a link, which leads elsewhere.
    """
    if run == "latest":
        if (newest_run := newest(CONFIG_FILE)) is None:
            raise UserError(f"there is no run under {RUNS}/ yet; start one with python -m nas.search.")
        run = str(newest_run)
    folder = Path(run).absolute()
    if not _is_file(folder / CONFIG_FILE):
        raise UserError(f"RUN must be the folder of a run (with run.yaml) or `latest`, but got {run!r}.")
    for top, folders, names in os.walk(folder):
        for path in (os.path.join(top, name) for name in (*folders, *names)):
            with suppress(FileNotFoundError):  # the run goes on
                mode = os.lstat(path).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise UserError(
                        f"{path} must be a file or folder of the run itself, but is a link, pipe or device; replace it."
                    )
    return folder


def write_config(folder: Path, config: StudyConfig) -> None:
    """Copy the user's own .yaml files into a folder, and then write the configuration, which makes the folder a run.

    A run keeps the copies that it has.
    """
    is_run = (folder / CONFIG_FILE).exists()
    for setting, protocol in product(KEPT_FILES, config.protocols):
        given, name = _given(config, setting, protocol)
        if given is not None and given.endswith((".yaml", ".yml")) and not (is_run and (folder / name).exists()):
            replace_file(folder / name, read_text(Path(given), MOST_YAML))
    replace_file(folder / CONFIG_FILE, dump(asdict(config)))


def is_on_parent(folder: Path | None, config: StudyConfig) -> bool:
    """Whether the space of a run takes its dimensions from the parent. folder: None for a new run."""
    return config.space == OWN or _definition(folder, config).base == OWN


def run_space(folder: Path | None, config: StudyConfig, tables: Architecture | None = None) -> SearchSpace:
    """Build the space of a run. folder: None for a new run.

    tables: the parent's architecture if the space takes its dimensions from it (`is_on_parent`). For another space, an
    architecture whose vocabulary and context replace those of the space's base, or None. Raises UserError if the
    parent's architecture is missing, or the space is unknown or not valid.
    """
    if is_on_parent(folder, config):
        if tables is None:
            raise UserError(f"--space {config.space} is on the dimensions of a trained model; give --parent.")
        return own_space(tables) if config.space == OWN else build_space(_definition(folder, config), tables)
    definition = _definition(folder, config)
    if tables is not None:
        dimensions = replace(definition.dimensions, vocab=tables.vocab_size, context=tables.context)
        definition = replace(definition, dimensions=dimensions)
    return build_space(definition)


def own_space(parent: Architecture) -> SearchSpace:
    """Build the space that offers every layer the parts of the parent's first layer and replacements of them."""
    layer = parent.layers[0]
    is_gated = FFNS[layer.ffn].is_gated
    halved = num_heads(parent, replace(layer, attention="softmax-half")) < parent.num_heads  # not with one key head
    refused = OF_FEWER_HEADS if parent.block_facts.is_shaped else () if halved else ("softmax-half",)
    activations = [ffn for ffn, form in FFNS.items() if form.replaces and form.is_gated == is_gated]

    def norms(norm: Norm) -> tuple[Norm, ...]:
        frozen: Norm = "frozen-rmsnorm" if norm.endswith("rmsnorm") else "frozen-layernorm"
        return tuple(dict.fromkeys((norm, frozen, "none"))) if norm != "none" else ("none",)

    choices = Choices(
        norm1=norms(layer.norm1),
        attention=tuple(form for form in FORMS if form not in refused),
        norm2=norms(layer.norm2),
        ffn=tuple(dict.fromkeys((layer.ffn, *activations, *LINEAR))),
        stabiliser=("none",),
        **inner_choices(parent),
    )
    return build_space(Definition(name=OWN, base=OWN, choices=choices), parent)


def _definition(folder: Path | None, config: StudyConfig) -> Definition:
    return load_definition(own_file(folder, config, "space", config.protocols[0]) or config.space)


def run_pricer(
    folder: Path | None, config: StudyConfig, protocol: str, network: str | None = None, testbed: str | None = None
) -> Pricer:
    """Load the pricer of one of a run's protocols. folder: None for a new run. network, testbed: None for the run's."""
    return load_pricer(
        protocol,
        network or own_file(folder, config, "network", protocol),
        testbed or own_file(folder, config, "testbed", protocol),
        config.setting_of(protocol),
    )


def run_pricers(folder: Path | None, config: StudyConfig) -> tuple[Pricer, ...]:
    """Load the pricers under all protocols of a run, in order; the front uses the first."""
    return tuple(run_pricer(folder, config, protocol) for protocol in config.protocols)


def own_file(folder: Path | None, config: StudyConfig, field: str, protocol: str) -> str | None:
    """Return the path of the run's copy of a user's file, or without a copy, what the configuration says for the field.

    field: one of KEPT_FILES. folder: None for a new run.
    """
    given, name = _given(config, field, protocol)
    copy = None if folder is None else folder / name
    return str(copy) if given is not None and copy is not None and copy.exists() else given


def _given(config: StudyConfig, field: str, protocol: str) -> tuple[str | None, str]:
    """Value of a field in `KEPT_FILES` for a protocol, and the name of the run's copy of the file."""
    of_all = getattr(config, field)
    given = config.asked[protocol].get(field, of_all)
    return given, f"{field}.yaml" if given == of_all else f"{field}-{protocol}.yaml"


def read_config(folder: Path) -> StudyConfig:
    """Read the configuration of a run. Raises UserError, naming the file, if it is missing, damaged or not valid."""
    return load_file(StudyConfig, folder / CONFIG_FILE)


def write_meta(folder: Path, meta: Meta) -> None:
    data = asdict(meta) | {"base": canonical(meta.base)}
    replace_file(folder / "meta.json", json.dumps(data, indent=2) + "\n")


def read_meta(folder: Path) -> Meta:
    """Read the `Meta` of a run. Raises UserError, naming the file, if it is missing, damaged or of another version."""
    path = folder / "meta.json"
    return decode(Meta, read_json(path, "must be the JSON that a run writes at its start"), str(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name that is too long, or a folder without access
        raise UserError(f"{path} cannot be opened: {error.strerror}.") from None
