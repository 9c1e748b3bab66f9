"""`python -m nas.export RUN --pick knee --output-dir DIR`: exports a candidate of a run, or a model of `nas.train`.

docs/models.md describes the files. The MPC format also has `graph.json`, the op graph node by node. The YAML format has
`trained-on.u32`: hashes of all windows of five lines of the training text, if the text is known and in the cache.
Models that start from the export are not validated on documents with many such windows. With --fold the model is
first folded (`nas.conversion.fold`) as far as the check of `nas.conversion.verified_fold` passes, to a cheaper
architecture with the same logits up to rounding.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import save
from torch import Tensor

from costmodel.config import cli
from costmodel.config.files import decode, dump
from costmodel.config.units import format_seconds
from costmodel.cost import shared_price
from costmodel.data_range import describe
from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Pricer, estimate_tokens
from costmodel.protocols import load_pricer
from nas.conversion.fixed_point_check import recorded
from nas.conversion.fold import at_dimensions
from nas.conversion.pretrained import EXPORT_FILE, TRAINED_FILE, WINDOWS_FILE, read_windows, write_checksums
from nas.conversion.verified_fold import check_tokens, fold_as_far_as
from nas.corpus.corpus import known_corpus, tokenizer_folder
from nas.corpus.held_out import KeptWindows, trained_on
from nas.corpus.tokenizer import TOKENIZER_FILE, kept_tokenizer, write_tokenizer
from nas.model.weights import WEIGHTS_FILE
from nas.recipe.candidate import Candidate, candidate_id
from nas.report.model_card import Facts, Fold, Provenance, Result, model_card
from nas.run.config import study_candidate
from nas.run.folder import PARENT_FOLDER
from nas.run.ledger import Record, architecture_of
from nas.run.run import Run
from nas.study.parent import deployable
from nas.training import checkpoint
from nas.training.checkpoint import Checkpoint, TrainingProgress
from nas.training.manifest import is_training, read_training, training_tokenizer
from search_spaces.architecture import Architecture, arch_id, dump_architecture
from search_spaces.lower import Workload, lower
from search_spaces.notation import Member, name_of
from search_spaces.resolve import ARCHITECTURE_FILE

CARD_FILE = "README.md"
Format = Literal["yaml", "hf", "mpc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A trained model and facts about it, to be written by `write_export`.

    trained: architecture at the width that was trained, folded if asked for. weights: tensors by `<node>.<suffix>` of
        its op graph. tokenizer: folder of the tokenizer; it may be gone if it is that of a corpus in the cache. run:
        None for a model of `nas.train`. windows: sorted hashes of windows of the training text; None if unknown.
        fixed_point: for each protocol with an engine, `ring_bits`, `fraction_bits` and `failure`: why numbers leave
        fixed-point range or results are too inaccurate, or None.
    """

    trained: Architecture
    weights: dict[str, Tensor]
    facts: Facts
    tokenizer: Path
    run: Run | None = None
    windows: KeptWindows | None = None
    fixed_point: Mapping[str, Any] = field(default_factory=dict)


def export(
    run: str, pick: str = "knee", format: Format = "yaml", fold: bool = False, output_dir: str | None = None
) -> None:
    """Export one completed candidate of a run, or the model of a training.

    Args:
        run: folder of a run of nas.search, `latest` for the newest run, or folder of a training of nas.train.
        pick: knee or best of the front, or the arch_id of a completed trial; without effect for a training.
        format: YAML files with safetensors weights, a transformers model, or weights for an MPC engine.
        fold: fold scalars, norms and linears as far as the logits stay the same, which makes the model cheaper.
        output_dir: new or empty folder to write; by default one in `exports` of RUN, named by arch_id, fold and format.
    """
    if is_training(Path(run)):
        folder = Path(run)
        made = training_export(folder, fold=fold)
    else:
        source = Run.find(run)
        folder, made = source.folder, prepare_export(source, source.pick(pick), fold=fold)
    name = arch_id(made.facts.candidate.architecture) + "-folded" * fold + ("" if format == "yaml" else f"-{format}")
    target = folder / "exports" / name if output_dir is None else Path(output_dir)
    for path in write_export(made, target, format):
        print(path)
    for protocol, of in made.fixed_point.items():
        if of["failure"] is not None:
            print(f"out of range under {protocol}, where nas.private refuses it: {of['failure']}")
    facts, folded, cost = made.facts, made.facts.fold, made.facts.estimate
    if folded is None:
        return
    check, outside = folded.check, describe(cost.extrapolated)
    print(
        f"folded: {facts.candidate.name} becomes {name_of(facts.architecture)} at "
        f"{format_seconds(cost.total.latency_s)} a token ({facts.workload.words}, {cost.protocol})"
        f"{outside and f'; {outside}'}\n"
        f"on {check['positions']:,} {folded.tokens} tokens its logits move by {check['float_error']:.1e} of "
        f"the largest and its most likely token agrees on {check['agreement']:.2%}; in fixed point they are off by "
        f"{check['fixed_error']:.1e}, unfolded by {check['trained_fixed_error']:.1e}"
    )
    for reason in folded.left:
        print(f"not folded: {reason}")
    for reason in check["outside"]:
        print(f"out of range: {reason}")
    if not folded.passes:
        print("the check failed with nothing left to unfold: do not rely on this model")


def prepare_export(run: Run, record: Record, *, fold: bool = False) -> Export:
    """Return the model of a completed trial as an export, with its cost under the run's first protocol.

    record: the trial's `finished` record. fold: whether to fold the model. Raises UserError if the checkpoint of the
    trial's last step is missing or damaged, the kept parent is damaged, or the run's protocol cannot be loaded.
    """
    member = Member(architecture=architecture_of(record, run.base), entropy_regularised=record.entropy_regularised)
    candidate = study_candidate(run.meta.recipe, member)
    trial = run.folder / "trials" / record.trial_id
    last = checkpoint.load_latest(trial, {"candidate": candidate_id(candidate)})
    if last is None or last.step != record.steps:
        raise UserError(f"{trial} must have a whole checkpoint of step {record.steps}, but has none to export.")
    names = ("perplexity", "val_loss", "tokenizer", "split", "tokens", "seed", "flags")
    result = Result(ngrams=run.ngrams, **{name: getattr(record, name) for name in names})
    provenance = Provenance(
        run=run.folder.name,
        trial_id=record.trial_id,
        created=run.meta.created,
        corpus=record.corpus,
        data=run.config.data,
        budget_latency=run.config.budget_latency,
        versions=record.versions,
        cost_model_id=run.pricer.cost_model_id,
    )
    tokenizer = tokenizer_folder(record.corpus) if run.parent is None else run.folder / PARENT_FOLDER
    export = _prepared(candidate, last, run.pricer, run.workload, result, provenance, tokenizer, fold=fold)
    verified = None if record.deployed is None else record
    parents = [] if run.parent is None else [read_windows(run.folder / PARENT_FOLDER)]
    windows = _windows(record.corpus, parents)
    return replace(export, facts=replace(export.facts, verified=verified), run=run, windows=windows)


def training_export(folder: Path, *, fold: bool = False) -> Export:
    """Return the model of a training's last checkpoint as an export, with its cost.

    The cost is that under `published` or, if `published` lacks the cost of an op, under `semi2k`. Raises UserError if
    the manifest is missing or damaged, there is no whole checkpoint of its candidate, or as `deployable`.
    """
    training = read_training(folder)
    candidate, scale = training.candidate, training.candidate.recipe.scale
    last = checkpoint.load_latest_of(folder, candidate)
    rungs = decode(TrainingProgress, last.progress, "the progress of a checkpoint").rungs
    rung = rungs[-1] if rungs else None
    result = Result(
        perplexity=None if rung is None else rung.perplexity,
        val_loss=None if rung is None else rung.val_loss,
        tokenizer=training.tokenizer,
        split=training.split,
        tokens=last.step * scale.batch * scale.seq_len,
        seed=training.seed,
        flags=() if rung is None else rung.entropy.flags,
        ngrams=training.ngrams if last.step == scale.num_steps else None,  # which count the tokens of all steps
    )
    corpus, workload = known_corpus(training.corpus), Workload(prompt_len=scale.seq_len)
    pricer = load_pricer("published")
    try:
        estimate_tokens(workload.graphs(candidate.architecture), pricer)
    except UnpricedOpError:
        pricer = load_pricer("semi2k")
    provenance = Provenance(
        run=folder.absolute().name,
        created=training.created,
        command=training.command,
        corpus=training.corpus,
        data=None if corpus is None else corpus.data,
        versions=training.versions,
        cost_model_id=pricer.cost_model_id,
    )
    tokenizer = training_tokenizer(folder, training.corpus)
    export = _prepared(candidate, last, pricer, workload, result, provenance, tokenizer, fold=fold)
    from_scratch = not {"--init-from", "--parent"}.intersection(training.command)
    return replace(export, windows=_windows(training.corpus, [] if from_scratch else [None]))


def _windows(corpus: str, parents: list[KeptWindows | None]) -> KeptWindows | None:
    """Return the sorted hashes of the training text of a cached corpus and of the parents; None if any is unknown."""
    known = known_corpus(corpus)
    parts = [None if known is None else trained_on(Path(known.folder)), *parents]
    of_text = [part for part in parts if part is not None]
    return np.unique(np.concatenate(of_text)) if len(of_text) == len(parts) else None


def _prepared(
    candidate: Candidate,
    last: Checkpoint,
    pricer: Pricer,
    workload: Workload,
    result: Result,
    provenance: Provenance,
    tokenizer: Path,
    *,
    fold: bool,
) -> Export:
    corpus = known_corpus(provenance.corpus)
    kind, tokens = check_tokens(corpus, candidate.trained.vocab_size, candidate.recipe.scale.seq_len)
    trained, weights, left = deployable(candidate, last, corpus)
    architecture, folding = at_dimensions(trained, candidate.architecture) if left else candidate.architecture, None
    if fold:
        form = fold_as_far_as(trained, weights, tokens, pricer.protocol)
        trained, weights = form.folded.architecture, form.folded.weights
        architecture = at_dimensions(trained, architecture)
        folding = Fold(
            check=asdict(form.check),
            passes=form.check.passes,
            tokens=kind,
            condition=form.folded.condition,
            left=left + form.folded.left,
        )
    whole, num_tokens = estimate_tokens(workload.graphs(architecture), pricer), workload.new_tokens
    bounds = whole.latency_s_range
    facts = Facts(
        candidate=candidate,
        architecture=architecture,
        result=result,
        estimate=replace(  # the average over the new tokens, with the ops of all of them
            whole,
            total=shared_price(whole.total, num_tokens),
            latency_s_range=None if bounds is None else (bounds[0] / num_tokens, bounds[1] / num_tokens),
            by_layer=tuple((layer, shared_price(price, num_tokens)) for layer, price in whole.by_layer),
        ),
        workload=workload,
        provenance=provenance,
        fold=folding,
    )
    return Export(
        trained=trained,
        weights=weights,
        facts=facts,
        tokenizer=tokenizer,
        fixed_point=recorded(trained, {name: value.double().numpy() for name, value in weights.items()}, corpus),
    )


def write_export(made: Export, target: Path, format: Format = "yaml") -> list[Path]:
    """Write an export into the folder `target` and return the paths of its files, sorted.

    If writing fails, no file of the export is left. Raises UserError if `target` is not empty or cannot be written, if
    the tokenizer is damaged or, for `hf`, if the tokenizer or the package transformers is missing.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UserError(f"--output-dir {target} must be new or empty, but holds files; choose another folder.")
        try:
            held = {"fixed_point": made.fixed_point}
            (target / EXPORT_FILE).write_text(dump(made.facts.plain() | held), encoding="utf-8")
            FORMATS[format](made, target)
            (target / CARD_FILE).write_text(model_card(made.facts, format, made.run), encoding="utf-8")
            write_checksums(target)
        except BaseException:  # also Ctrl-C: an export is whole, or the folder is empty again
            with suppress(OSError):
                for path in target.iterdir():
                    path.unlink()
            raise
    except OSError as error:
        raise UserError(f"--output-dir {target} must be a folder we can write to: {error.strerror}.") from None
    return sorted(target.iterdir())


def _write_weights(made: Export, target: Path) -> None:
    metadata = {"candidate_id": candidate_id(made.facts.candidate)}
    (target / WEIGHTS_FILE).write_bytes(save(made.weights, metadata=metadata))


def _write_yaml(made: Export, target: Path) -> None:
    _write_weights(made, target)
    (target / ARCHITECTURE_FILE).write_text(dump_architecture(made.facts.architecture), encoding="utf-8")
    (target / TRAINED_FILE).write_text(dump_architecture(made.trained), encoding="utf-8")
    if (made.tokenizer / TOKENIZER_FILE).is_file():
        kept = kept_tokenizer(made.tokenizer, "")
        write_tokenizer(target, kept.json, kept.end_of_text, kept.files)
    if made.windows is not None:
        (target / WINDOWS_FILE).write_bytes(made.windows.tobytes())


def _write_mpc(made: Export, target: Path) -> None:
    _write_weights(made, target)
    (target / ARCHITECTURE_FILE).write_text(dump_architecture(made.trained), encoding="utf-8")
    seq_len = made.facts.workload.prompt_len
    nodes = [
        {"name": node.name, "layer": node.layer, "op": type(node.op).__name__, **asdict(node.op), "inputs": node.inputs}
        for node in lower(made.trained, seq_len)
    ]
    (target / "graph.json").write_text(json.dumps({"seq_len": seq_len, "nodes": nodes}, indent=1) + "\n")


def _write_hf(made: Export, target: Path) -> None:
    from nas.conversion.huggingface import save_model  # needs the extra `hf`

    save_model(made.trained, made.weights, made.tokenizer, target)


FORMATS: dict[Format, Callable[[Export, Path], None]] = {"yaml": _write_yaml, "hf": _write_hf, "mpc": _write_mpc}


main = partial(cli.run, export, "python -m nas.export")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
