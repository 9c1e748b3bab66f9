"""Perplexity against training tokens of a few placements of SmolLM2-135M, in one process and within a time limit.

First the model is trained on the text with several numbers of tokens; the best result is the parent. Then each
placement starts from the parent and its block library, and learns from the parent with each number of tokens in a
training of its own, at the best learning rate so far unless one is searched. A search may follow.

Every result is printed and written to `healing.csv` at once. A stopped run continues with the trainings that are
missing; results are used only while recipe, parent and corpus are unchanged.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from torch import Tensor

from costmodel.errors import UserError
from experiments.smollm2.corpora import ENGLISH, TEXT, english, text
from experiments.smollm2.results import (
    PARENT,
    Trained,
    best,
    rank_table,
    read_results,
    score_table,
    tokens_table,
    write_results,
)
from experiments.smollm2.search import SearchSettings, run_search
from experiments.smollm2.settings import Length, Rate, Settings
from experiments.smollm2.tables import kind_table
from experiments.trainings import DATA, Key
from nas.conversion.parent import Parent, load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.second import second_corpus, second_source
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.overrides import DistillationChanges, RecipeChanges, ScaleChanges, changed
from nas.recipe.papers import recipe_at
from nas.recipe.recipe import ScaleName
from nas.storage import RUNS, locked
from nas.training.batches import validate
from nas.training.device import Device, on_device, usual_device
from nas.training.distillation.library import initial_weights
from nas.training.distillation.sub_layers import from_csv
from nas.training.distillation.teacher import Teacher, teacher_of
from nas.training.trainer import TrainingRun
from search_spaces.resolve import resolve

RESULTS_FILE = "healing.csv"
SCALE: ScaleName = "parent"
UNMOVED = 1e-30  # learning rate of the one obligatory step of a training without tokens
LIBRARY_BATCH = 4  # sequences of a step of the block library, as in `experiments run smollm2`
MOST_MORE = 2  # rates that are tried beyond the given ones, while the best is the smallest or largest
ALL_TEXT = 1 << 40  # tokens: prepares the whole text


class Start(NamedTuple):
    """What trainings of one placement start from; without a teacher they learn from the text alone."""

    name: str
    placement: str
    parent: Parent
    initial: Mapping[str, Tensor]
    teacher: Teacher | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all trainings share; `results` and the `speeds` of trainings, in tokens per second, grow."""

    settings: Settings
    source: Parent
    device: Device
    folder: Path
    console: Console
    corpus: Corpus
    second: Corpus
    since_s: float
    results: list[Trained]
    speeds: list[float] = field(default_factory=list)


def run(name: str, settings: Settings, console: Console) -> None:
    """Run the trainings that are not done yet, and print the table. Raises UserError if the model's file is missing."""
    since_s = time.perf_counter()
    if not Path(settings.parent).exists():
        raise UserError(f"experiment {name} needs {settings.parent} in this folder; docs/llama.md says where it is.")
    folder = RUNS / "experiments" / name if settings.output_dir is None else Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        setting = _setting(settings, load_parent(settings.parent), folder, console, since_s)
        parent = tuned(setting)
        if "table" in settings.parts:
            heal(setting, parent)
            console.print(tokens_table(setting.results))
            if settings.scores is not None:
                scores = from_csv((DATA / settings.scores).read_text(encoding="utf-8"), settings.scores)
                console.print(score_table(setting.results, scores, parent.model.architecture))
        if settings.search is not None and "search" in settings.parts:
            rate = _rate_of_search(setting, settings.search)
            searched, scores = run_search(name, settings.search, rate, Path(parent.name), folder, console)
            console.print(kind_table(scores))
            console.print(rank_table(searched.members, scores, parent.model.architecture))


def _rate_of_search(setting: Setting, search: SearchSettings) -> float:
    """Return the best rate of the first placement with the most tokens that a candidate has; the first rate if none."""
    settings, name = setting.settings, setting.settings.searched[0]
    known = [one for one in best(setting.results).values() if one.name == name and 0 < one.tokens <= search.tokens]
    longest = max(known, key=lambda one: one.tokens, default=None)
    rate = Rate(settings.learning_rate, settings.lengths[0].batch)
    return (rate if longest is None else Rate(longest.learning_rate, longest.batch)).at(search.batch)


def _setting(settings: Settings, source: Parent, folder: Path, console: Console, since_s: float) -> Setting:
    model = source.model
    corpus = prepare(
        str(text(folder / TEXT)),
        vocab_size=model.architecture.vocab_size,
        tokenizer=model.tokenizer,
        of_parent=model.windows,
        tokens=ALL_TEXT,
    )
    spoken = str(english(folder / ENGLISH))
    second = second_corpus(spoken, second_source(spoken), corpus, model.windows)
    console.print(
        f"{corpus.num_train_tokens:,} tokens to train on, {corpus.num_validation_tokens:,} held out, "
        f"{second.num_validation_tokens:,} of English; {time.perf_counter() - since_s:.0f} s"
    )
    return Setting(
        settings=settings,
        source=source,
        device=settings.device or usual_device(),
        folder=folder,
        console=console,
        corpus=corpus,
        second=second,
        since_s=since_s,
        results=read_results(folder / RESULTS_FILE),
    )


def tuned(setting: Setting) -> Parent:
    """Return the model after the training on the text that ends with the lowest perplexity, saved in the folder."""
    target, source, settings = setting.folder / "parent", setting.source, setting.settings
    if not (target / CHECKSUMS_FILE).exists():  # written last
        least, weights = math.inf, dict[str, Tensor]()

        def keep(perplexity: float, model: Decoder) -> None:
            nonlocal least, weights
            if perplexity < least:
                least, weights = perplexity, {n: w.cpu().clone() for n, w in deployed_weights(model).items()}

        start = Start(PARENT, source.distillation.placement, source, source.model.weights, None)
        rate = Rate(settings.parent_rate, settings.parent_lengths[0].batch)
        for length in settings.parent_lengths:
            rate = best_rate(setting, start, length, rate, length.factors, keep)
        if not weights:
            raise UserError("every training of the parent diverged; lower `parent_rate`.")
        write_pretrained(source.model._replace(weights=weights), target)
    return load_parent(str(target))


def heal(setting: Setting, parent: Parent) -> None:
    """Train every placement with every length."""
    settings = setting.settings
    last = Rate(settings.learning_rate, settings.lengths[0].batch)
    starts, rates = dict[str, Start](), dict[str, Rate]()
    for length in settings.lengths:
        for name, placement in settings.placements.items():
            if name not in starts:
                teacher = next(iter(starts.values())).teacher if starts else None
                starts[name] = _start(setting, name, placement, parent, teacher)
            is_searched = name in settings.searched
            factors = length.factors if is_searched else (1.0,)
            rates[name] = best_rate(setting, starts[name], length, rates.get(name, last), factors)
            last = rates[name] if is_searched else last
            if name in length.again:
                train(setting, starts[name], length, rates[name].at(length.batch), seed=1)


def _start(setting: Setting, name: str, placement: str, parent: Parent, teacher: Teacher | None) -> Start:
    since_s = time.perf_counter()
    candidate = candidate_of(setting, parent, placement, Length(tokens=1, batch=LIBRARY_BATCH), UNMOVED)
    teacher = teacher or teacher_of(parent, setting.corpus, candidate.recipe, setting.device)
    initial = initial_weights(parent, candidate, setting.corpus, device=setting.device)
    setting.console.print(f"{name}: initial weights in {time.perf_counter() - since_s:.0f} s")
    return Start(name, placement, parent, initial, teacher)


def best_rate(
    setting: Setting,
    start: Start,
    length: Length,
    rate: Rate,
    factors: Sequence[float],
    on_model: Callable[[float, Decoder], None] | None = None,
) -> Rate:
    """Return the best learning rate, of the given factors and a few beyond while the best is at an end.

    One factor leaves the rate as it is.
    """

    def perplexity(factor: float) -> float:
        trained = train(setting, start, length, factor * rate.at(length.batch), on_model=on_model)
        return math.inf if trained is None else trained.perplexity

    tried = {factor: perplexity(factor) for factor in factors}
    if len(tried) == 1:
        return rate
    for _ in range(MOST_MORE):
        best_factor = min(tried, key=lambda factor: tried[factor])
        if best_factor not in (min(tried), max(tried)) or tried[best_factor] == math.inf:
            break
        beyond = 2 * best_factor if best_factor == max(tried) else best_factor / 2
        tried[beyond] = perplexity(beyond)
    return Rate(min(tried, key=lambda factor: tried[factor]) * rate.at(length.batch), length.batch)


def train(
    setting: Setting,
    start: Start,
    length: Length,
    rate: float,
    *,
    seed: int = 0,
    on_model: Callable[[float, Decoder], None] | None = None,
) -> Trained | None:
    """Run one training, and print and save its result, unless it is known; None if it would take too long.

    on_model: gets the perplexity and the trained model. The result is then never taken from the file.
    """
    corpus, since_s = setting.corpus, time.perf_counter()
    length = length if start.teacher else replace(length, trainable="all")
    rate = rate if length.tokens else UNMOVED
    candidate = candidate_of(setting, start.parent, start.placement, length, rate, untaught=start.teacher is None)
    scale, key = candidate.recipe.scale, Key(candidate_id(candidate), corpus.fingerprint, seed)
    known = {Key(one.candidate_id, one.corpus, one.seed): one for one in setting.results}
    if key in known and on_model is None:
        return known[key]
    if not _in_time(setting, length):
        setting.console.print(f"{start.name}, {length.tokens:,} tokens: not trained, since the time is too short")
        return None
    training = TrainingRun(
        candidate, corpus, seed=seed, folder=None, device=setting.device, initial=start.initial, teacher=start.teacher
    )
    stamps_s = _taken(training)
    outcome, model = training.progress.outcome, training.objective.model
    assert outcome is not None
    perplexity, on_english = outcome.perplexity or math.inf, math.inf
    if outcome.perplexity is not None:
        on_english = math.exp(validate(model, setting.second, scale).loss)
        if on_model is not None:
            on_model(perplexity, model)
    del training, model
    gc.collect()  # models refer to themselves, and would fill the GPU's memory
    trained = Trained(
        name=start.name,
        tokens=length.tokens,
        seed=seed,
        batch=length.batch,
        learning_rate=rate if length.tokens else 0.0,
        trainable=length.trainable,
        perplexity=perplexity,
        english=on_english,
        seconds=time.perf_counter() - since_s,
        placement=start.placement,
        candidate_id=key.candidate_id,
        corpus=key.corpus,
    )
    setting.results[:] = (known | {key: trained}).values()
    write_results(setting.folder / RESULTS_FILE, setting.results)
    line, reason = trained.line, f"; diverged, {outcome.reason}" if outcome.reason else ""
    if len(stamps_s) > 2:
        speed = (len(stamps_s) - 2) * scale.batch * scale.seq_len / (stamps_s[-1] - stamps_s[1])
        line += f", {speed:,.0f} tokens/s after a first step of {stamps_s[1] - stamps_s[0]:.1f} s"
        setting.speeds.append(speed)
    total_s = time.perf_counter() - setting.since_s
    setting.console.print(f"{total_s:.0f} s: {line}{reason}", soft_wrap=True, highlight=False)
    return trained


def _in_time(setting: Setting, length: Length) -> bool:
    """Whether a training is expected to end within `most_s`, at the speed of the last one."""
    expected_s = length.tokens / setting.speeds[-1] if setting.speeds else 0.0
    most_s = setting.settings.most_s
    return most_s is None or time.perf_counter() + expected_s <= setting.since_s + most_s


def _taken(training: TrainingRun) -> list[float]:
    """Train to the end; return the start and when each step was taken, s. On a GPU steps end later, but the last one
    is read at once.
    """
    stamps_s = [time.perf_counter()]
    try:
        while training.progress.outcome is None:
            training.step()
            stamps_s.append(time.perf_counter())
            training.validate_if_due()
    finally:
        training.close()
    return stamps_s


def candidate_of(
    setting: Setting, parent: Parent, placement: str, length: Length, rate: float, *, untaught: bool = False
) -> Candidate:
    """Return the candidate of a training; untaught: whether it learns from the text alone."""
    settings, micro_batch = setting.settings, min(length.batch, setting.settings.micro_batch)
    changes = RecipeChanges(
        scale=ScaleChanges(
            batch=length.batch,
            micro_batch=micro_batch,
            learning_rate=rate,
            validation_tokens=settings.validation_tokens,
        ),
        distillation=DistillationChanges(
            trainable=length.trainable,
            blockwise_tokens=0 if untaught else settings.library_tokens,
            prediction_weight=0.0 if untaught else None,
            hidden_state_weight=0.0 if untaught else None,
        ),
        compile="auto" if micro_batch == settings.micro_batch else "off",
    )
    architecture = resolve(placement, parent.model.architecture).architecture
    recipe = recipe_at(
        SCALE,
        setting.corpus.data,
        entropy_regularised=False,
        distillation=parent.distillation,
        seq_len=settings.seq_len,
        tokens=max(1, length.tokens),
    )
    recipe = changed(recipe, on_device(changes, setting.device))
    return Candidate(architecture=architecture, recipe=replace(recipe, scale=replace(recipe.scale, rungs=(1.0,))))
