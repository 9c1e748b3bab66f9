"""Resolves a study: decides on its parent, devices, data and folder before any trial starts, and logs them."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from costmodel.config.units import format_count
from costmodel.errors import StoppedError, UserError
from costmodel.ops import SoftmaxForm
from nas.attention.causal import has_native
from nas.conversion.parent import BUILTIN, Parent, kept_parent, load_parent, parent_of, require_fit
from nas.conversion.pretrained import Pretrained, write_pretrained
from nas.conversion.score_bounds import bounding_tokens, unheld_by_parent
from nas.conversion.verified_fold import LOG_SUMS
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.documents import OWN_RULE, Reading
from nas.corpus.second import DEPENDENCIES, require_sequences, second_corpus, second_source
from nas.corpus.sources import open_source
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, trained_architecture
from nas.run.config import NO_PARENT, StudyConfig, study_recipe
from nas.run.folder import PARENT_FOLDER, Meta, new_folder
from nas.run.run import Run
from nas.study.meta import checked_meta, new_meta, opening_lines
from nas.study.priced_study import PricedStudy
from nas.study.resources import (
    Node,
    Resources,
    choose_share,
    choose_threads,
    resolved,
    resource_lines,
    study_resources,
    this_machine,
)
from nas.study.throughput import threads
from nas.study.trials import RunHaltedError
from nas.training.device import lowered, on_device
from nas.training.memory import available_bytes, require_memory, training_memory
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace, check_feasible, priced_anew
from search_spaces.space import Withheld, without

_log = logging.getLogger(__name__)

ONE_KIND = (
    "note: --data stdlib is Python alone. On unseen text SmolLM2-135M lost 6 to 35 % when recovered on Python, and "
    "4 to 9 % on seven kinds of text (docs/llama-results.md); give --data of the kinds that the model will read"
)

NO_SECOND = "none"
WITHHELD = {"bounded": "bounded softmax", "power8": "eighth powers"}  # names of forms of attention in messages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolvedStudy:
    """A study that is ready to train.

    config: the configuration, with defaults replaced by the values chosen for machine and parent. feasible: members
        within the budget; where the parent's scores are too far apart for a form of attention, layers do not offer it.
        parent: the model that candidates start from; None from scratch. second: the second corpus on which completed
        trials are validated, or None. folder: the run's folder.
    """

    config: StudyConfig
    feasible: FeasibleSpace
    resources: Resources
    parent: Parent | None
    corpus: Corpus
    second: Corpus | None
    meta: Meta
    folder: Path


def resolve_study(priced: PricedStudy, output_dir: Path | None) -> ResolvedStudy:
    """Return a study that is ready to train. A new study gets a folder: `output_dir` or, if None, one under runs/.

    Raises UserError for bad input, too little memory for a new study on this machine, or a parent or data that have
    changed since a run began; InfeasibleError if no member within the budget stays within fixed-point range with the
    parent's scores; StoppedError if the cluster cannot be reached; OSError if cache or folder cannot be written.
    """
    config, run, parent = priced.config, priced.run, priced.parent
    if run is None:
        parent = parent or usual_parent(config, priced.feasible.space.base)
    elif run.meta.parent is not None and (distillation := run.meta.recipe.distillation) is not None:
        parent = kept_parent(run.folder / PARENT_FOLDER, run.meta.parent.name, distillation.parent)
    if parent is None and config.begin_of_text != OWN_RULE:
        raise UserError("--begin-of-text is of the tokenizer of a --parent, and there is none; drop it.")
    nodes: Sequence[Node] = (this_machine(),)
    if config.ray_address is not None:
        from nas.study.ray_cluster import cluster_nodes  # imported late, because Ray takes long

        try:
            nodes = cluster_nodes(config.ray_address)
        except RunHaltedError as error:
            raise StoppedError(f"{error}; start it, or give another --ray-address or none") from error
    return _new(priced, parent, nodes, output_dir) if run is None else _resumed(priced, run, parent, nodes)


def _new(priced: PricedStudy, parent: Parent | None, nodes: Sequence[Node], output_dir: Path | None) -> ResolvedStudy:
    feasible, base = priced.feasible, priced.feasible.space.base
    config = _on_devices(priced.config, study_resources(priced.config, nodes), nodes, base, parent)
    resources = study_resources(config, nodes)
    corpus, read = _corpus(config, resources, base, parent)
    second = study_second(config, corpus, parent)
    feasible = feasible if parent is None else _held(feasible, parent, corpus, config.sequence_len)
    config = replace(
        config,
        parent=NO_PARENT if parent is None else parent.name,
        second_eval_data=NO_SECOND if second is None else second.data,
    )
    recipe = study_recipe(config, parent and parent.distillation)
    on = "cuda" if config.gpus_per_trial else "cpu"
    memory = training_memory(Candidate(architecture=base, recipe=recipe), on)
    _log.info(f"{memory.line}, each trial at most about that")
    if resources.ray_address is None:
        on_one = int(1 / resources.gpus_per_trial) if config.gpus_per_trial else resources.at_a_time
        require_memory(memory, available_bytes(on), on_one)
    with threads(1):
        meta = new_meta(config, feasible, corpus, second, parent, device_of(config), read)
    for line in opening_lines(meta, corpus, parent, config.begin_of_text):
        _log.info(line)
    folder = new_folder(output_dir)
    if parent is not None:
        write_pretrained(parent.model, folder / PARENT_FOLDER)
    return ResolvedStudy(
        config=config,
        feasible=feasible,
        resources=resources,
        parent=parent,
        corpus=corpus,
        second=second,
        meta=meta,
        folder=folder,
    )


def _resumed(priced: PricedStudy, run: Run, parent: Parent | None, nodes: Sequence[Node]) -> ResolvedStudy:
    feasible, resources = priced.feasible, study_resources(priced.config, nodes)
    if bool(resources.gpus_per_trial) != bool(run.config.gpus_per_trial):
        _log.info("trials continue on another kind of device; their numbers differ from there on beyond rounding")
    config = resolved(priced.config, resources)
    corpus, _ = _corpus(config, resources, feasible.space.base, parent)
    return ResolvedStudy(
        config=config,
        feasible=feasible,
        resources=resources,
        parent=parent,
        corpus=corpus,
        meta=checked_meta(run, config, feasible, corpus),
        second=run_second(run, config, corpus, parent),
        folder=run.folder,
    )


def _corpus(
    config: StudyConfig, resources: Resources, base: Architecture, parent: Parent | None
) -> tuple[Corpus, tuple[Reading, ...]]:
    for line in resource_lines(config, resources):
        _log.info(line)
    scale = SCALES[config.scale]
    found = training_corpus(
        config.data,
        parent and parent.model,
        vocab_size=scale.vocab_size or base.vocab_size,
        seq_len=config.sequence_len,
        tokens=config.tokens or scale.tokens,
    )
    if not config.gpus_per_trial:
        has_native(scale.head_dim or base.head_dim)  # once, before any worker starts: compiles the kernel
    return found


def training_corpus(
    data: str, model: Pretrained | None, *, vocab_size: int, seq_len: int, tokens: int
) -> tuple[Corpus, tuple[Reading, ...]]:
    """Return the corpus of trainings and, for each folder in `data`, which files were read or left out; log these.

    data: as for --data. model: the model that trainings start from, whose tokenizer is used; None from scratch.
    vocab_size: largest size of the vocabulary. tokens: training tokens. Raises errors as `open_source` and `prepare`.
    """
    source = open_source(data)
    for line in (line for read in source.read for line in read.lines):
        _log.info(line)
    if data == "stdlib" and model is not None and model.windows is None:  # a model of others, as far as is known
        _log.info(ONE_KIND)
    corpus = prepare(
        data,
        vocab_size=vocab_size,
        seq_len=seq_len,
        tokens=tokens,
        tokenizer=model and model.tokenizer,
        of_parent=model and model.windows,
        source=source,
    )
    return corpus, source.read


def _on_devices(
    config: StudyConfig, resources: Resources, nodes: Sequence[Node], base: Architecture, parent: Parent | None
) -> StudyConfig:
    """Decide where the trials of a new run train, how many are chosen at a time, and in which precision they train."""

    def largest() -> Candidate:
        return Candidate(architecture=base, recipe=study_recipe(config, parent and parent.distillation))

    share = resources.gpus_per_trial
    if config.gpus_per_trial is None and resources.num_gpus:
        share = choose_share(config, nodes[0], largest())
    recipe = on_device(config.recipe, "cuda" if share else "cpu", config.scale)
    config = replace(config, gpus_per_trial=share, recipe=recipe)
    resources = study_resources(config, nodes)
    config = resolved(config, resources)
    if config.threads_per_trial is None:
        config = replace(config, threads_per_trial=choose_threads(config, resources, nodes[0], largest()))
    return config


def usual_parent(config: StudyConfig, base: Architecture) -> Parent | None:
    """Return the builtin parent if the study names none, its scale is proxy, and the parent fits `base`; else None.

    Raises UserError if the builtin parent's tokenizer lacks the token of --begin-of-text.
    """
    if config.parent is not None or config.scale != "proxy":
        return None
    parent = load_parent(BUILTIN)
    parent = parent_of(parent.name, parent.model, config.begin_of_text)
    try:
        require_fit(parent, trained_architecture(base, replace(SCALES[config.scale], seq_len=config.sequence_len)))
    except UserError as misfit:
        _log.info(f"candidates train from scratch: {misfit}")
        return None
    return parent


def study_second(config: StudyConfig, corpus: Corpus, parent: Parent | None) -> Corpus | None:
    """Return the second corpus of a new study, or None.

    By default it is `dependencies` for the builtin parent on stdlib, else None. Raises UserError if the corpus cannot
    be read, has no sequence, or repeats more than half of a document in the first corpus or the parent's training text
    (`dependencies` may); or if the cache cannot be written.
    """
    usual = DEPENDENCIES if parent is not None and parent.name == BUILTIN and config.data == "stdlib" else NO_SECOND
    if (data := config.second_eval_data or usual) == NO_SECOND:
        return None
    second = second_corpus(data, second_source(data), corpus, parent and parent.model.windows)
    require_sequences(second, config.sequence_len)
    return second


def run_second(run: Run, config: StudyConfig, corpus: Corpus, parent: Parent | None) -> Corpus | None:
    """Return a resumed run's second corpus, or None. Raises UserError as `study_second`, or if its text has changed."""
    if run.meta.second is None:
        return None
    second = study_second(config, corpus, parent)
    if second is None or second.fingerprint != run.meta.second.fingerprint:
        raise UserError(
            f"the second corpus of {run.folder}, {run.meta.second.data}, must be the one it was validated on, but its "
            f"text has changed; restore it, or start a new run."
        )
    return second


def _held(feasible: FeasibleSpace, parent: Parent, corpus: Corpus, seq_len: int) -> FeasibleSpace:
    """Remove bounded softmaxes and eighth powers from layers where the parent's scores leave fixed-point range."""
    space, priced = feasible.space, feasible.priced
    offered = {layer.attention for layer in space.layers}
    forms: list[SoftmaxForm] = [form for form in LOG_SUMS if form in offered]
    if not forms:
        return feasible
    tokens = bounding_tokens(corpus, parent.model.architecture.vocab_size, seq_len)
    withheld = Withheld(**{form: unheld_by_parent(parent, form, tokens) for form in forms})
    if (narrowed := without(space, withheld)) is space:
        return feasible
    for form, layers in asdict(narrowed.definition.withheld).items():
        if layers:
            _log.info(
                f"no {WITHHELD[form]} in layers {', '.join(map(str, layers))} (from 0), where rows of the parent's "
                f"scores are too far apart"
            )
    feasible = priced_anew(feasible, narrowed, priced.workload)
    check_feasible(feasible)
    _log.info(f"{format_count(feasible.num_feasible)} members within the budget without those")
    return feasible


def device_of(config: StudyConfig) -> str:
    """Return where to score and validate the parent: `cuda` if trials use GPUs and this process has one, else `cpu`."""
    return "cuda" if config.gpus_per_trial and torch.cuda.is_available() else "cpu"


def memory_lines(priced: PricedStudy) -> list[str]:
    """Return lines with the estimated memory of the largest training on a CPU and, if trials may use one, on a GPU."""
    config, run = priced.config, priced.run
    recipe = run.meta.recipe if run is not None else study_recipe(config, priced.parent and priced.parent.distillation)
    largest = Candidate(architecture=priced.feasible.space.base, recipe=recipe)
    memories = {"CPU": training_memory(largest)}
    may_use_gpu = config.gpus_per_trial or config.ray_address is not None or torch.cuda.is_available()
    if config.gpus_per_trial != 0 and may_use_gpu:
        on_gpu = largest if run is not None else lowered(largest, "cuda", config.recipe)
        memories[f"GPU, {on_gpu.recipe.precision}"] = training_memory(on_gpu, "cuda")
    return [f"{memory.line}, each trial at most about that on a {device}" for device, memory in memories.items()]
