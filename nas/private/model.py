"""Loads the model to run: from a run, a training, an export or a checkpoint, folded as far as its check allows."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from costmodel.config.files import load_mapping
from costmodel.errors import UserError
from costmodel.execution.interpreter import Array
from costmodel.ops import GeluForm
from nas.conversion.parent import BUILTIN, BUILTIN_FOLDER, load_initial
from nas.conversion.pretrained import CHECKSUMS_FILE, EXPORT_FILE, Pretrained, is_export, read_architecture, read_export
from nas.conversion.verified_fold import check_tokens, fold_as_far_as, why_not_equal
from nas.corpus.corpus import known_corpus
from nas.corpus.documents import OWN_RULE, GivenTokenizer
from nas.corpus.tokenizer import TOKENIZER_FILE, begin_line, given_encoder, kept_tokenizer, with_begin_of_text
from nas.export import Export, prepare_export, training_export
from nas.model.weights import WEIGHTS_FILE
from nas.run.folder import PARENT_FOLDER
from nas.run.run import Run
from nas.training.manifest import is_training
from search_spaces.architecture import Architecture
from search_spaces.notation import name_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivateModel:
    """A folded model to run. `name` says which architecture it has, and where it comes from.

    weights: by `<node>.<suffix>`, in double precision; None if they are not on this machine. corpus: fingerprint of the
        corpus on which it was trained; None if unknown. notes: remarks for the user.
    known: values of `--public-layers`, `--client-layers` and `--public-checkpoint` that its run was searched with; None
        if the model is not from a run that was searched with such layers.
    failed: why the folded form differs from the trained model; None if it does not, or was not checked. recorded: by
        protocol, what an export says of its fixed-point range (`fixed_point_check.recorded`); empty if unknown.
    """

    name: str
    architecture: Architecture
    weights: dict[str, Array] | None
    tokenizer: GivenTokenizer
    corpus: str | None
    notes: tuple[str, ...] = ()
    known: tuple[str | None, int | None, str] | None = None
    failed: str | None = None
    recorded: Mapping[str, Any] = field(default_factory=dict)


def find_model(source: str) -> Path | Run:
    """Return the folder or file of a model, or a run of nas.search.

    Raise UserError if `source` is none of these, its checksums are damaged, or as `Run.find`.
    """
    folder = BUILTIN_FOLDER if source == BUILTIN else Path(source)
    if is_export(folder) or is_training(folder) or folder.is_file() or (folder / "config.json").is_file():
        return folder
    if source != "latest" and not os.path.isdir(folder):
        raise UserError(
            f"RUN must be a run, a training, an export, a checkpoint, `latest` or `{BUILTIN}`, but got {source!r}."
        )
    return Run.find(source)


def load_model(source: str, pick: str, *, weights_here: bool = True, begin_of_text: str = OWN_RULE) -> PrivateModel:
    """Return the folded model of a run, training, export or other checkpoint; `builtin` is this package's parent.

    pick: for a run, `knee`, `best` or an arch_id. weights_here: whether the weights must be on this machine; if not, an
        export without its weights is enough. begin_of_text: `rule` of `with_begin_of_text`.
    Raise UserError if the source is none of these, the run has no completed trial within its budget, the pick is
    unknown, a training has no whole checkpoint, a file is lost, damaged or, by checksums, edited, an export without
    weights is not folded, the model has no tokenizer, or the tokenizer lacks the token, and as `deployable`.
    """
    found = find_model(source)
    if isinstance(found, Run):
        config = found.config
        model = _of_prepared(source, prepare_export(found, found.pick(pick), fold=True))
        if config.kept_layers is not None:
            known = config.public_layers, config.client_layers, str(found.folder / PARENT_FOLDER)
            model = replace(model, known=known)
    elif is_export(found):
        model = _of_export(source, found, weights_here=weights_here)
    elif is_training(found):
        model = _of_prepared(source, training_export(found, fold=True))
    else:
        model = _folded(source, load_initial(source), None, ())
    tokenizer = with_begin_of_text(model.tokenizer, begin_of_text)
    begin = given_encoder(tokenizer, None, None).begin
    is_said = begin is not None or begin_of_text != OWN_RULE
    notes = (*model.notes, *([begin_line(begin, begin_of_text)] if is_said else []))
    return replace(model, tokenizer=tokenizer, notes=notes)


def with_gelu(model: PrivateModel, form: GeluForm | None) -> PrivateModel:
    """Return the model with its GELUs in a form that may differ from training; with None, return it unchanged.

    A layer whose code names a form keeps that form. Raise UserError for a form if no layer has FFN `gelu`.
    """
    trained = model.architecture.gelu
    if form is None:
        return model
    if all(layer.ffn != "gelu" for layer in model.architecture.layers):
        raise UserError(f"--gelu must be of a model with GELU, but {model.name} has none; leave it out.")
    note = () if form == trained else (f"GELU is {form} here, in the clear too; the model was trained with {trained}",)
    architecture = replace(model.architecture, gelu=form)
    return replace(model, architecture=architecture, notes=(*model.notes, *note))


def _of_prepared(source: str, export: Export) -> PrivateModel:
    if not (export.tokenizer / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{source} must have its tokenizer, which is in the cache of its corpus, but {export.tokenizer} is gone; "
            f"train or search on the same data again."
        )
    fold = export.facts.fold
    assert fold is not None
    return PrivateModel(
        name=f"{export.facts.candidate.name} of {source}, folded: {name_of(export.trained)}",
        architecture=export.trained,
        weights=_arrays(export.weights),
        tokenizer=kept_tokenizer(export.tokenizer, "bpe"),
        corpus=export.facts.provenance.corpus,
        notes=_notes(fold.left),
        failed=why_not_equal(**fold.check),
    )


def _of_export(source: str, folder: Path, *, weights_here: bool) -> PrivateModel:
    facts = load_mapping(folder / EXPORT_FILE) if (folder / EXPORT_FILE).is_file() else {}
    provenance = facts.get("provenance")
    corpus = provenance.get("corpus") if isinstance(provenance, dict) else None
    corpus = corpus if isinstance(corpus, str) else None
    is_checked = (folder / CHECKSUMS_FILE).is_file()
    notes = () if is_checked else (f"{folder} has no {CHECKSUMS_FILE}: not checked",)
    recorded, fold = facts.get("fixed_point"), facts.get("fold")
    check = fold.get("check") if isinstance(fold, dict) else None
    failed = why_not_equal(**check) if isinstance(check, dict) else None
    if not weights_here and not os.path.isfile(folder / WEIGHTS_FILE):
        architecture, tokenizer = read_architecture(folder)
        if not architecture.folded:
            raise UserError(f"{folder} must be a folded export where it is without weights; write one with --fold.")
        export = Pretrained(architecture, {}, tokenizer)
    else:
        export = read_export(folder)
    model = _folded(source, export, corpus, notes)
    return replace(model, failed=model.failed or failed, recorded=recorded if isinstance(recorded, dict) else {})


def _folded(source: str, model: Pretrained, corpus: str | None, notes: tuple[str, ...]) -> PrivateModel:
    """Return a model, folded as far as its check allows unless it is; one without weights must be folded."""
    notes, failed = (*model.notes, *notes), None
    if not model.architecture.folded:
        begin = None if model.tokenizer is None else given_encoder(model.tokenizer, None, None).begin
        vocab_size, context = model.architecture.vocab_size, model.architecture.context
        _, tokens = check_tokens(known_corpus(corpus), vocab_size, context, begin)
        folded, check = fold_as_far_as(model.architecture, model.weights, tokens)
        model = model._replace(architecture=folded.architecture, weights=folded.weights)
        notes, failed = notes + _notes(folded.left), why_not_equal(**asdict(check))
    if model.tokenizer is None:
        raise UserError(f"{source} must come with its tokenizer; put its tokenizer.json beside the weights.")
    return PrivateModel(
        name=f"{name_of(model.architecture)} of {source}",
        architecture=model.architecture,
        weights=_arrays(model.weights) or None,
        tokenizer=model.tokenizer,
        corpus=corpus,
        notes=notes,
        failed=failed,
    )


def _notes(left: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"not folded: {reason}" for reason in left)


def _arrays(weights: dict[str, Tensor]) -> dict[str, Array]:
    return {name: value.double().numpy() for name, value in weights.items()}
