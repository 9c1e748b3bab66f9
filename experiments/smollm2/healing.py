"""Perplexity against training tokens of a few placements of SmolLM2-135M, in one process and within a time limit.

First the model is trained on the text with several numbers of tokens; the best result is the parent. Then each
placement starts from the parent and its block library, and learns from the parent with each number of tokens in a
training of its own. Learning rates are searched with the first number of tokens; a training with another batch takes
the best rate times the square root of the ratio of the batches (Malladi et al. 2022, arXiv 2205.10287).

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
from experiments.smollm2.results import PARENT, Key, Trained, read_results, score_table, tokens_table, write_results
from experiments.trainings import DATA
from nas.conversion.parent import Parent, load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.second import second_corpus, second_source
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.distillation import Trainable
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """One column of the table: training tokens and sequences per step; 0 tokens validate the initial weights.

    Attributes:
        trainable: The part of a placement that is trained; the parent is always trained as a whole.
        again: Placements that are also trained with a second seed.
    """

    tokens: int
    batch: int
    trainable: Trainable = "changed"
    again: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        parent: File or folder of the model in the current folder.
        placements: Placements to train, by a name for the table.
        lengths, parent_lengths: Numbers of tokens in the order of their trainings; rates are searched with the first.
        rates, parent_rates: Learning rates to try, and further ones while the best is the smallest or largest.
        searched: Names of placements with a search of their own; the others take the last one's best rate.
        micro_batch: Sequences per forward pass. Smaller batches are not compiled, since each size compiles anew.
        library_tokens: Tokens on which each replaced sub-layer is first trained alone.
        scores: File of block scores in `experiments/data`, to compare with trained perplexities.
        most_s: Seconds after which no training starts that is expected to end later; None for no limit.
        device: None for a GPU if there is one.
    """

    parent: str
    placements: Mapping[str, str]
    lengths: tuple[Length, ...]
    parent_lengths: tuple[Length, ...]
    rates: tuple[float, ...]
    parent_rates: tuple[float, ...]
    searched: tuple[str, ...]
    micro_batch: int
    seq_len: int = 128
    validation_tokens: int = 32_768
    library_tokens: int = 32_768
    scores: str | None = None
    most_s: float | None = None
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in ("placements", "lengths", "parent_lengths", "rates", "parent_rates", "searched"):
            if not getattr(self, name):
                raise UserError(f"`{name}` must not be empty.")
        names = {*self.searched, *(name for length in self.lengths for name in length.again)}
        if unknown := names - self.placements.keys():
            raise UserError(f"`searched` and `again` must name placements, but got {', '.join(sorted(unknown))}.")
        if self.searched[0] != next(iter(self.placements)):
            raise UserError(f"the first placement must be the first of `searched`, but got {self.searched[0]!r}.")


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
    device: Device
    folder: Path
    console: Console
    corpus: Corpus
    second: Corpus
    since_s: float
    results: list[Trained]
    speeds: list[float] = field(default_factory=list)


def run(name: str, settings: Settings, console: Console) -> None:
    """Run the trainings that are not done yet, and print the table; a UserError is raised without the model."""
    since_s = time.perf_counter()
    if not Path(settings.parent).exists():
        raise UserError(f"experiment {name} needs {settings.parent} in this folder; docs/llama.md says where it is.")
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        source = load_parent(settings.parent)
        setting = _setting(settings, source, folder, console, since_s)
        heal(setting, tuned(setting, source))
        console.print(tokens_table(setting.results))
        if settings.scores is not None:
            scores = from_csv((DATA / settings.scores).read_text(encoding="utf-8"), settings.scores)
            console.print(score_table(setting.results, scores, source.model.architecture))


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
        device=settings.device or usual_device(),
        folder=folder,
        console=console,
        corpus=corpus,
        second=second,
        since_s=since_s,
        results=read_results(folder / RESULTS_FILE),
    )


def tuned(setting: Setting, source: Parent) -> Parent:
    """Return the model after the training on the text that ends with the lowest perplexity, saved in the folder."""
    target = setting.folder / "parent"
    if not (target / CHECKSUMS_FILE).exists():  # written last
        least, weights = math.inf, dict[str, Tensor]()

        def keep(perplexity: float, model: Decoder) -> None:
            nonlocal least, weights
            if perplexity < least:
                least, weights = perplexity, {n: w.cpu().clone() for n, w in deployed_weights(model).items()}

        start = Start(PARENT, source.distillation.placement, source, source.model.weights, None)
        first, *rest = setting.settings.parent_lengths
        rate = best_rate(setting, start, first, setting.settings.parent_rates, keep)
        for length in rest:
            train(setting, start, length, rate * math.sqrt(length.batch / first.batch), on_model=keep)
        if not weights:
            raise UserError("every training of the parent diverged; lower `parent_rates`.")
        write_pretrained(source.model._replace(weights=weights), target)
    return load_parent(str(target))


def heal(setting: Setting, parent: Parent) -> None:
    """Train every placement with every length."""
    settings, teacher = setting.settings, None
    first, *rest = settings.lengths
    starts, rates = list[Start](), dict[str, float]()
    for name, placement in settings.placements.items():
        since_s = time.perf_counter()
        library = Length(tokens=1, batch=LIBRARY_BATCH)
        candidate = candidate_of(setting, parent, placement, library, UNMOVED)
        teacher = teacher or teacher_of(parent, setting.corpus, candidate.recipe, setting.device)
        initial = initial_weights(parent, candidate, setting.corpus, device=setting.device)
        setting.console.print(f"{name}: initial weights in {time.perf_counter() - since_s:.0f} s")
        starts.append(start := Start(name, placement, parent, initial, teacher))
        if name in settings.searched:
            rates[name] = best_rate(setting, start, first, settings.rates)
        else:
            rates[name] = list(rates.values())[-1]
            train(setting, start, first, rates[name])
    for length in rest:
        for start in starts:
            rate = rates[start.name] * math.sqrt(length.batch / first.batch)
            for seed in range(1 + (start.name in length.again)):
                train(setting, start, length, rate, seed=seed)


def best_rate(
    setting: Setting,
    start: Start,
    length: Length,
    rates: Sequence[float],
    on_model: Callable[[float, Decoder], None] | None = None,
) -> float:
    """Return the best learning rate, of the given ones and a few beyond while the best is at an end."""

    def perplexity(rate: float) -> float:
        trained = train(setting, start, length, rate, on_model=on_model)
        return math.inf if trained is None else trained.perplexity

    tried = {rate: perplexity(rate) for rate in rates}
    for _ in range(MOST_MORE):
        best = min(tried, key=lambda rate: tried[rate])
        beyond = 2 * best if best == max(tried) else best / 2
        if best not in (min(tried), max(tried)) or len(tried) == 1:
            break
        tried[beyond] = perplexity(beyond)
    return min(tried, key=lambda rate: tried[rate])


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
    known = {one.key: one for one in setting.results}
    if key in known and on_model is None:
        return known[key]
    expected_s = length.tokens / setting.speeds[-1] if setting.speeds else 0.0
    most_s = setting.settings.most_s
    if most_s is not None and since_s + expected_s > setting.since_s + most_s:
        setting.console.print(f"{start.name}, {length.tokens:,} tokens: not trained, since the time is too short")
        return None
    training = TrainingRun(
        candidate,
        corpus,
        seed=seed,
        folder=None,
        device=setting.device,
        initial=start.initial,
        teacher=start.teacher,
    )
    stamps_s = [time.perf_counter()]  # steps on a GPU end later, but the last one is read at once
    try:
        while training.progress.outcome is None:
            training.step()
            stamps_s.append(time.perf_counter())
            training.validate_if_due()
    finally:
        training.close()
    outcome, model = training.progress.outcome, training.objective.model
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


def candidate_of(
    setting: Setting, parent: Parent, placement: str, length: Length, rate: float, *, untaught: bool = False
) -> Candidate:
    """Return the candidate of a training; untaught: whether it learns from the text alone."""
    settings, batch = setting.settings, length.batch
    micro_batch = min(batch, settings.micro_batch)
    changes = RecipeChanges(
        scale=ScaleChanges(
            batch=batch,
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
