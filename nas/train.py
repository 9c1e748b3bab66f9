"""`python -m nas.train ARCH`: trains one candidate on a number of tokens; `--resume DIR` continues a training."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from costmodel.config import cli
from costmodel.config.bugs import bugs_reported
from costmodel.config.console import Console
from costmodel.config.files import decode, dump, load_file
from costmodel.config.units import format_seconds
from costmodel.errors import StoppedError, UserError
from nas.conversion.parent import Parent, digest_of, require_fit
from nas.conversion.pretrained import Pretrained
from nas.conversion.transfer import transferred
from nas.conversion.verified_fold import LOG_SUMS
from nas.corpus.corpus import Corpus
from nas.corpus.documents import OWN_RULE, Reading
from nas.corpus.ngrams import ngram_baseline
from nas.corpus.tokenizer import begin_line, write_tokenizer
from nas.malloc import keep_freed_memory
from nas.model.decoder import Decoder
from nas.model.weights import chosen_linears
from nas.provenance import versions
from nas.recipe.candidate import Candidate, candidate_at
from nas.recipe.overrides import RecipeChanges, add_recipe_flags, changed
from nas.recipe.recipe import (
    SCALES,
    Normalisation,
    NormalisedLinears,
    ScaleName,
    SlopeSharing,
    check_seed,
    trained_architecture,
    usual_scale,
)
from nas.report.progress import logged_to, share_progress
from nas.report.summary import mark, ngram_lines
from nas.run.config import NO_PARENT
from nas.storage import RUNS, locked, newest, replace_file
from nas.study.parent import deployable, find_parent
from nas.study.resolve import training_corpus
from nas.training import checkpoint
from nas.training.batches import check, validate
from nas.training.device import Device, on_device, usual_device
from nas.training.distillation.library import initial_weights
from nas.training.distillation.teacher import teacher_of
from nas.training.manifest import TOKENIZER_FOLDER, TrainingManifest, is_training, read_training, write_training
from nas.training.memory import TooLargeError, available_bytes, require_memory, training_memory
from nas.training.outcome import Outcome, RungRecord
from nas.training.trainer import train
from search_spaces.bases import base_architecture
from search_spaces.notation import placement
from search_spaces.resolve import resolve

CONFIG_FILE = "train.yaml"
BASE = "gpt2-small"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The configuration of a training: what to train, and for how long.

    Args:
        arch: the architecture, as a name, layer codes or the path of a .yaml file.
        base: the model whose dimensions the notation uses; by default the model of --init-from, or of a --parent whose
            blocks are not those of gpt2-small, else gpt2-small.
        scale: size of the trained model, training tokens and learning rate; parent and paper keep the dimensions of the
            architecture. The default is proxy, or parent with a --parent of another head size or vocabulary.
        seq_len: tokens per sequence; by default the scale's.
        tokens: training tokens; by default the scale's, or with a parent 5/8 of them (all at scale parent).
        data: stdlib, codeparrot (from the hub), codeparrot:FOLDER or languini:FOLDER (a local copy), or the path of
            a text, jsonl, json, csv, tsv or parquet file or of a folder.
        begin_of_text: the token that begins each sequence and is not predicted: tokenizer, for the rule of the given
            weights' tokenizer; none; or a token such as <s>. Costs count it as one of the --seq-len tokens.
        init_from: start from these weights, at their width: a folder of save_pretrained, a .gguf file, an id on the
            Hugging Face hub, a folder of nas.export or nas.train, or `latest` for the last training. Norms, attention
            and FFNs that ARCH lacks are dropped, and a fused FFN (one linear) starts as the product of two linears.
            With --parent too, these are ARCH's first weights, such as those of a training to be continued.
        parent: like --init-from, or builtin, but components that ARCH lacks are removed gradually, and ARCH learns from
            the parent's predictions and hidden states (from the text alone, if ARCH has the parent's own layers). The
            scale's width must be the parent's. The default is none: train from scratch, or as --init-from says.
        normalisation: train the weights of linears in weight- or spectrally normalised form.
        normalised: which linears to normalise; q, k, v and o are queries, keys, values and output of attention.
        slopes: whether each leaky ReLU learns its own slope, or all share one.
        device: where to train; by default on a GPU if there is one. A training may be resumed on the other device.
        seed: the same seed gives the same result on a CPU with the same number of threads.
        recipe: changes to the default recipe of scale and data.
    """

    arch: str
    base: str | None = None
    scale: ScaleName | None = None
    seq_len: int | None = None
    tokens: int | None = None
    data: str = "stdlib"
    begin_of_text: str = OWN_RULE
    init_from: str | None = None
    parent: str | None = None
    normalisation: Literal["weight", "spectral"] | None = None
    normalised: NormalisedLinears = "ffn"
    slopes: SlopeSharing = "layer"
    device: Device | None = None
    seed: int = 0
    recipe: RecipeChanges = field(default_factory=RecipeChanges)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.scale == "parent" and self.parent is self.init_from is None:
            raise UserError("--scale parent is the size of a trained model; name it by --parent or --init-from.")
        if self.begin_of_text != OWN_RULE and self.parent is self.init_from is None:
            raise UserError("--begin-of-text is of the tokenizer of --parent or --init-from; name one, or drop it.")
        if self.parent is not None and self.normalisation is not None:
            raise UserError("--parent does not go with --normalisation; drop one of the two.")


def parse(args: Sequence[str]) -> tuple[TrainConfig, Path | None, Path | None]:
    """Return the configuration, the folder to resume or None, and the output folder or None.

    Raises UserError or ArgumentError for bad input.
    """
    parser = cli.Parser(prog="python -m nas.train", description=__doc__)
    parser.add_argument("--config", action="config")
    parser.add_argument(
        "ARCH", nargs="?", type=str, help="notation such as 'EReg(SM(t)+ScFuFFN)', or a file, export or checkpoint"
    )
    parser.add_class_arguments(TrainConfig, skip={"arch", "recipe"})
    add_recipe_flags(parser)
    parser.add_argument("--output_dir", type=str, help="folder of the training (default: runs/train-<UTC time>)")
    resume_help = "continue the training in this folder, or `latest`; only --device may go with it"
    parser.add_argument("--resume", type=str, help=resume_help)
    given = cli.given(parser, args).as_dict()
    given.pop("config", None)
    arch, resume, output_dir = (given.pop(name, None) for name in ("ARCH", "resume", "output_dir"))
    if resume is not None:
        device = given.pop("device", None)
        if arch is not None or output_dir is not None or given:
            raise UserError("--resume DIR takes everything but --device from DIR; drop the other arguments.")
        folder = newest(CONFIG_FILE) if resume == "latest" else Path(resume)
        if folder is None:
            raise UserError(f"there is no training under {RUNS}/ yet; start one with python -m nas.train ARCH.")
        config = load_file(TrainConfig, folder / CONFIG_FILE)
        return replace(config, device=device or config.device), folder, None
    if arch is None:
        raise UserError("an architecture is required, such as python -m nas.train SM+ScFuFFN.")
    if "normalised" in given and "normalisation" not in given:
        raise UserError("--normalised needs --normalisation weight or spectral; give both or neither.")
    if given.get("parent") == NO_PARENT:
        del given["parent"]
    config = decode(TrainConfig, {"arch": arch, **given}, "the configuration")
    return config, None, Path(output_dir) if output_dir else None


def run(args: Sequence[str], console: Console) -> None:
    """Start or resume the training that the command line `args` describes, and train until all tokens are used.

    Raises UserError or ArgumentError for bad input, a new folder that cannot be written, a folder that another process
    uses, or memory that is too small by estimate; OSError if the cache or a folder to resume cannot be written;
    StoppedError if training diverges, a step runs out of memory, or a file cannot be written later.
    """
    config, resumed, output_dir = parse(args)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a CUDA device, but there is none; give --device cpu.")
    keep_freed_memory()
    device = config.device or usual_device()
    with logged_to(console):
        _train(config, resumed, output_dir, console, device)


def _train(config: TrainConfig, resumed: Path | None, output_dir: Path | None, console: Console, device: str) -> None:
    candidate, corpus, folder, start = _prepared(config, resumed, output_dir, console, device)
    with (
        bugs_reported(folder, f"continue with --resume {folder}"),
        locked(folder),
        cli.deferred_interrupt() as stop,
        share_progress(console, "training") as on_progress,
    ):
        records = start(seed=config.seed, folder=folder, device=device, stop=stop, on_progress=on_progress)
        del start  # it holds the weights to start from
        try:
            for record in records:
                _report(record, candidate, corpus, folder, console)
            if stop():
                raise KeyboardInterrupt
            for line in _out_of_range(candidate, corpus, folder):
                console.print(f"in fixed point: {line}")
        except KeyboardInterrupt:
            console.print(f"continue with --resume {folder}")
            raise
        except TooLargeError as error:
            raise StoppedError(f"{candidate.name}: {error}") from error
        except OSError as error:
            raise StoppedError(f"{folder}: {error.strerror or error}; then continue with --resume {folder}") from error


def _prepared(
    config: TrainConfig, resumed: Path | None, output_dir: Path | None, console: Console, device: str
) -> tuple[Candidate, Corpus, Path, Callable[..., Iterator[RungRecord | Outcome]]]:
    """Return the candidate, its corpus, the folder of its training, and `train` with its weights and teacher."""
    rule = config.begin_of_text
    parent = None if config.parent is None else find_parent(config.parent, rule)
    start = find_parent(config.init_from, rule).model if config.init_from else None
    source = start if parent is None else parent.model
    if resumed is None:
        config = replace(config, recipe=on_device(config.recipe, device, _scale(config, parent)))
    elif is_training(resumed):
        _require_same(start, parent, config, resumed)
    candidate = _candidate(config, parent, source)
    initial = None if start is None else _given_weights(start, parent, candidate, config)
    memory, scale = training_memory(candidate, device), candidate.recipe.scale
    require_memory(memory, available_bytes(device))
    corpus, read = training_corpus(
        config.data, source, vocab_size=candidate.trained.vocab_size, seq_len=scale.seq_len, tokens=scale.tokens
    )
    check(candidate, corpus)
    folder = resumed or _new_folder(config, output_dir, candidate, corpus, source, start or source, read)
    console.print(
        f"training {candidate.name} at width {candidate.trained.d_model} in {folder}; perplexities are of "
        f"{corpus.tokenizer}, {corpus.split}"
    )
    console.print(f"{memory.line}, on {torch.device(device).type}")
    if source is not None:
        console.print(begin_line(corpus.begin_of_text, rule))
    teacher = None
    if parent is not None:
        loss = validate(parent.decoder().to(device), corpus, scale).loss
        console.print(f"the parent, {parent.name}: validation perplexity {math.exp(loss):.3f}")
        if initial is None:
            with share_progress(console, "training the sub-layers of the candidate") as on_progress:
                initial = initial_weights(parent, candidate, corpus, device=device, on_progress=on_progress)
        teacher = teacher_of(parent, corpus, candidate.recipe, device)
    return candidate, corpus, folder, partial(train, candidate, corpus, initial=initial, teacher=teacher)


def _out_of_range(candidate: Candidate, corpus: Corpus, folder: Path) -> tuple[str, ...]:
    """Return a sentence for each layer of a finished training whose attention leaves the range of fixed point."""
    if LOG_SUMS.keys().isdisjoint(layer.attention for layer in candidate.trained.layers):
        return ()
    return deployable(candidate, checkpoint.load_latest_of(folder, candidate), corpus)[2]


def _given_weights(
    start: Pretrained, parent: Parent | None, candidate: Candidate, config: TrainConfig
) -> dict[str, torch.Tensor]:
    """Return the first weights of a candidate by --init-from. Raises UserError if it or --parent does not fit them."""
    if parent is not None and candidate.initial_architecture != candidate.trained:
        raise UserError(
            f"--init-from beside --parent must start an architecture that keeps all sub-layers of the parent, but "
            f"{config.arch} removes some, which would begin anew; drop one of the two flags."
        )
    ours, theirs = (model and model.tokenizer and model.tokenizer.json for model in (start, parent and parent.model))
    if parent is not None and ours != theirs:
        raise UserError(
            f"--init-from {config.init_from} must have the tokenizer of --parent {config.parent}, but has not; start "
            f"from a training with this parent."
        )
    return transferred(start.architecture, start.weights, candidate.initial_architecture)


def _require_same(start: Pretrained | None, parent: Parent | None, config: TrainConfig, folder: Path) -> None:
    """Raise UserError if a training is resumed with other weights than it started from, or another parent."""
    training = read_training(folder)
    distillation = training.candidate.recipe.distillation
    for flag, name, model, began in (
        ("--init-from", config.init_from, start, training.source),
        ("--parent", config.parent, parent and parent.model, distillation and distillation.parent),
    ):
        if model is not None and began is not None and (now := digest_of(model)) != began:
            raise UserError(
                f"{flag} {name} of {folder} must be the model {began} that it started from, but is {now} now; restore "
                f"it, or start a new training."
            )


def _new_folder(
    config: TrainConfig,
    output_dir: Path | None,
    candidate: Candidate,
    corpus: Corpus,
    source: Pretrained | None,
    start: Pretrained | None,
    read: tuple[Reading, ...],
) -> Path:
    now, scale = datetime.now(UTC), candidate.recipe.scale
    training = TrainingManifest(
        candidate=candidate,
        seed=config.seed,
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer,
        split=corpus.split,
        read=read,
        created=now.isoformat(timespec="seconds"),
        versions=versions(),
        command=(config.arch, *cli.flags_of(config)[2:]),  # its first field, the architecture, has no flag
        ngrams=ngram_baseline(
            corpus,
            seq_len=scale.seq_len,
            validation_tokens=scale.validation_tokens,
            # given weights may have been trained on any of the text, so all training tokens are counted
            tokens=scale.seen_tokens if config.init_from is config.parent is None else None,
            seed=config.seed,
        ),
        begin_of_text=None if corpus.begin_of_text is None else corpus.begin_of_text.token,
        source=start and digest_of(start),
    )
    folder = output_dir or RUNS / now.strftime("train-%Y-%m-%dT%H%M%SZ")
    if os.path.isdir(folder) and os.access(folder, os.R_OK) and any(folder.iterdir()):
        held = (
            f"already holds a training; continue it with --resume {folder}"
            if (folder / CONFIG_FILE).exists()
            else "must be new or empty, but holds files; choose another"
        )
        raise UserError(f"--output-dir {folder} {held}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None and (given := source.tokenizer) is not None:
            (folder / TOKENIZER_FOLDER).mkdir()
            write_tokenizer(folder / TOKENIZER_FOLDER, given.json, given.end_of_text, given.files)
        write_training(folder, training)
        replace_file(folder / CONFIG_FILE, dump(asdict(config)))
    except OSError as error:
        raise UserError(f"--output-dir {folder} must be a folder we can write to: {error.strerror}.") from None
    return folder


def _scale(config: TrainConfig, parent: Parent | None) -> ScaleName:
    return config.scale or usual_scale(None if parent is None else parent.model.architecture)


def _candidate(config: TrainConfig, parent: Parent | None, source: Pretrained | None) -> Candidate:
    base, scale = base_architecture(config.base or BASE), _scale(config, parent)
    if parent is not None and config.base is None and parent.model.architecture.block != base.block:
        base = parent.model.architecture
    elif parent is not None:
        base = parent.tables_on(base, SCALES[scale])
    elif source is not None and config.base is None:
        base = source.architecture
    member, distillation = resolve(config.arch, base), parent and parent.distillation
    if distillation is not None and placement(member.architecture) == distillation.placement:
        distillation = replace(distillation, prediction_weight=0.0)
    candidate = candidate_at(
        member, scale, data=config.data, distillation=distillation, seq_len=config.seq_len, tokens=config.tokens
    )
    normalisation = config.normalisation and Normalisation(kind=config.normalisation, linears=config.normalised)
    recipe = replace(changed(candidate.recipe, config.recipe), normalisation=normalisation, slopes=config.slopes)
    if parent is not None:
        require_fit(parent, trained_architecture(candidate.architecture, recipe.scale))
    elif source is not None:
        for name in ("head_dim", "vocab_size"):
            if getattr(config.recipe.scale, name) is not None:
                raise UserError(f"--recipe.scale.{name} is that of the weights of --init-from; leave it out.")
        recipe = replace(recipe, scale=replace(recipe.scale, head_dim=None, vocab_size=None))
    candidate = replace(candidate, recipe=recipe)
    with torch.device("meta"):  # what cannot be trained is refused before anything is written
        model = Decoder(candidate.trained)
    if recipe.normalisation is not None:
        chosen_linears(model, recipe.normalisation)
    return candidate


def _report(record: RungRecord | Outcome, candidate: Candidate, corpus: Corpus, folder: Path, console: Console) -> None:
    if isinstance(record, Outcome):
        if record.status == "diverged":
            raise StoppedError(f"{candidate.name} diverged: {record.reason}")
        ngrams = read_training(folder).ngrams if is_training(folder) else None
        for line in ngram_lines(ngrams):
            console.print(line)
        if record.val_loss is not None and (marked := mark(record.val_loss, ngrams)):
            console.print(f"{candidate.name} {marked}")
        console.print(f"done; metrics, TensorBoard log and checkpoints are in {folder}")
        return
    scale, part, left = candidate.recipe.scale, "", ""
    if record.share < 1:
        both = (scale.rung_validation_tokens, scale.validation_tokens)
        part = " on {:,} of {:,} tokens".format(*(min(each, corpus.lengths["validation"]) for each in both))
        left = f", about {format_seconds(record.seconds * (1 / record.share - 1))} left"
    console.print(
        f"{record.tokens:,} tokens: validation perplexity {record.perplexity:.3f}{part}, "
        f"{format_seconds(record.seconds)} so far{left}"
    )


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if args is None else args
    console = Console(markup=False, emoji=False, soft_wrap=True, highlight=False)
    return cli.guarded(lambda: run(arguments, console), debug=cli.DEBUG in arguments)


if __name__ == "__main__":
    sys.exit(main())
