"""`python -m nas.export RUN --pick knee --output-dir DIR`: a candidate of a run, or what `nas.train` trained.

--format yaml   architecture.yaml    the priced architecture; an ARCH of every command
                trained.yaml         the architecture at the width it was trained at, which the weights belong to
                weights.safetensors  the weights, named after the nodes of the op graph
                tokenizer.json       of the corpus, as long as that is in the cache; needed to train on from here
--format hf     a model of transformers, with its tokenizer: GPT-2 or GPT-NeoX, or one with its code beside it,
                `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`; this package is not needed
--format mpc    architecture.yaml    of the weights; an ARCH of `python -m costmodel compare`
                weights.safetensors  for its --weights-file
                graph.json           the op graph, node by node

All have README.md (a model card), export.yaml (recipe, result beside that of n-gram models, cost breakdown by layer,
provenance) and checksums.json. With --fold the model is folded first (see `nas.conversion.fold`) as far as its check
allows (`nas.conversion.verified_fold`): another architecture, cheaper, whose logits are those that were trained but for
rounding.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from safetensors.torch import save
from torch import Tensor

from costmodel.config import cli
from costmodel.config.schema import decode
from costmodel.config.strict_yaml import dump
from costmodel.config.units import format_seconds
from costmodel.cost import shared_price
from costmodel.data_range import describe
from costmodel.errors import UserError
from costmodel.estimate import Pricer, estimate_generation
from costmodel.protocols import load_pricer
from costmodel.trust import facts
from nas.conversion.fold import at_dimensions
from nas.conversion.pretrained import TRAINED_FILE, write_checksums
from nas.conversion.verified_fold import VerifiedFold, check_tokens, fold_as_far_as
from nas.corpus.corpus import known_corpus, tokenizer_file
from nas.corpus.ngrams import NgramBaseline
from nas.corpus.sources import TOKENIZER_FILE
from nas.model.weights import WEIGHTS_FILE
from nas.recipe.candidate import Candidate, candidate_id, canonical_candidate
from nas.report.model_card import model_card
from nas.run.config import study_candidate
from nas.run.ledger import Record, architecture_of
from nas.run.run import Run
from nas.study.verify_fold import trained_weights
from nas.training import checkpoint
from nas.training.checkpoint import Checkpoint
from nas.training.manifest import is_training, read_training
from nas.training.trainer import TrainingProgress
from search_spaces.architecture import Architecture, arch_id, dump_architecture
from search_spaces.lower import lower
from search_spaces.notation import Member, name_of
from search_spaces.resolve import ARCHITECTURE_FILE
from search_spaces.workload import Workload

CARD_FILE = "README.md"
Format = Literal["yaml", "hf", "mpc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is written: the priced architecture, the trained one with its deployed weights, and plain facts.

    tokenizer: path of a tokenizer.json, which is there as long as the corpus is in the cache. run: that it is a trial
    of; None for what `nas.train` trained.
    """

    architecture: Architecture
    trained: Architecture
    weights: dict[str, Tensor]
    facts: dict[str, Any]
    seq_len: int
    tokenizer: Path
    run: Run | None = None


def export(
    run: str, pick: str = "knee", format: Format = "yaml", fold: bool = False, output_dir: str | None = None
) -> None:
    """Exports one completed candidate of a run, or what a training has come to.

    Args:
        run: folder of a run of nas.search, `latest` for its last, or folder of nas.train.
        pick: knee or best of the front, or the arch_id of a completed trial; a training has only one model.
        format: YAML files with safetensors weights, a transformers model, or weights for an MPC engine.
        fold: fold scalars, norms and linears into one another as far as the logits stay; the model becomes cheaper.
        output_dir: folder to write, new or empty; by default a folder named after the arch_id in `exports` of the run.
    """
    if is_training(Path(run)):
        folder = Path(run)
        made = training_export(folder, fold=fold)
    else:
        source = Run.find(run)
        folder, made = source.folder, prepare_export(source, source.pick(pick), fold=fold)
    facts = made.facts
    name = facts["arch_id"] + ("-folded" if fold else "") + ("" if format == "yaml" else f"-{format}")
    target = folder / "exports" / name if output_dir is None else Path(output_dir)
    for path in write_export(made, target, format):
        print(path)
    if fold:
        for line in _fold_lines(made):
            print(line)


def _fold_lines(made: Export) -> list[str]:
    """What became of a folded model, as the check measured it."""
    facts, cost = made.facts, made.facts["cost"]
    check, left = facts["fold"]["check"], facts["fold"]["left"]
    outside = describe(cost["extrapolated"])
    return [
        f"folded: {facts['notation']} is deployed as {name_of(made.architecture)} at "
        f"{format_seconds(cost['total']['latency_s'])} a token ({cost['workload']}, {cost['protocol']})"
        f"{outside and f'; {outside}'}",
        f"on {check['positions']:,} {facts['fold']['tokens']} tokens its logits move by {check['float_error']:.1e} of "
        f"the largest and its most likely token agrees on {check['agreement']:.2%}; in fixed point they are off by "
        f"{check['fixed_error']:.1e}, unfolded by {check['trained_fixed_error']:.1e}",
        *(f"not folded: {reason}" for reason in left),
        *(
            []
            if facts["fold"]["passes"]
            else ["the check failed with nothing left to unfold: do not rely on this model"]
        ),
    ]


def write_export(made: Export, target: Path, format: Format = "yaml") -> list[Path]:
    """Writes an export and returns its files.

    Raises UserError if `target` is not empty or cannot be written or, for `hf`, the tokenizer is gone or transformers
    is not installed.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UserError(f"--output-dir {target} must be new or empty, but holds files; choose another folder.")
        _write_or_clear(made, target, format)
    except OSError as error:
        raise UserError(f"--output-dir {target} must be a folder we can write to: {error.strerror}.") from None
    return sorted(target.iterdir())


def _write_or_clear(made: Export, target: Path, format: Format) -> None:
    """All files of an export, or none."""
    try:
        (target / "export.yaml").write_text(dump(made.facts), encoding="utf-8")
        FORMATS[format](made, target)
        (target / CARD_FILE).write_text(model_card(made.facts, made.architecture, format, made.run), encoding="utf-8")
        write_checksums(target)
    except BaseException:  # Ctrl-C too
        _clear(target)
        raise


def prepare_export(run: Run, record: Record, *, fold: bool = False) -> Export:
    """What a completed trial's export holds. Raises UserError if the trial's last checkpoint is gone."""
    meta = run.meta
    architecture = architecture_of(record, meta.base)
    candidate = study_candidate(
        meta.recipe, Member(architecture=architecture, entropy_regularised=record.entropy_regularised)
    )
    trial = run.folder / "trials" / record.trial_id
    found = checkpoint.load_latest(trial, {"candidate": candidate_id(candidate)})
    if found is None or found.step != record.steps:
        raise UserError(f"{trial} must have a whole checkpoint of step {record.steps}, but has none to export.")
    result = {
        "perplexity": record.perplexity,
        "val_loss": record.val_loss,
        "tokenizer": record.tokenizer,
        "split": record.split,
        "tokens": record.tokens,
        "seed": record.seed,
        "flags": list(record.flags),
        **_ngram_facts(meta.ngrams, record.val_loss),
    }
    provenance = {
        "run": run.folder.name,
        "trial_id": record.trial_id,
        "created": meta.created,
        "corpus": record.corpus,
        "data": run.config.data,
        "budget_latency": run.config.budget_latency,
        "versions": dict(record.versions),
    }
    made = _prepared(candidate, found, run.pricer, result, provenance, workload=run.workload, fold=fold)
    return replace(made, facts=made.facts | _verified_facts(record), run=run)


def _ngram_facts(ngrams: NgramBaseline | None, val_loss: float | None) -> dict[str, Any]:
    """What n-gram models of the same training tokens reach; nothing where that is not known."""
    if ngrams is None:
        return {}
    return {
        "ngram_floors": {"tokens": ngrams.tokens, "perplexities": ngrams.perplexities},
        "knows_less_than_trigram": None if val_loss is None else ngrams.above_trigram(val_loss),
    }


def _verified_facts(record: Record) -> dict[str, Any]:
    """What the search counted for this candidate: the price of what its weights fold to."""
    if record.deployed is None:
        return {}
    names = ("deployed", "deployed_id", "latency_s", "sent_bytes", "predicted_latency_s", "predicted_sent_bytes")
    return {"verified": {name: getattr(record, name) for name in names}}


def training_export(folder: Path, *, fold: bool = False) -> Export:
    """What the last checkpoint of a training holds, priced under `published`. Raises UserError if there is none."""
    training = read_training(folder)
    found = checkpoint.load_latest(folder, {"candidate": candidate_id(training.candidate)})
    if found is None:
        raise UserError(f"{folder} must have a whole checkpoint, but has none to export; train on with --resume.")
    progress = decode(TrainingProgress, found.progress, "the progress of a checkpoint")
    last = progress.rungs[-1] if progress.rungs else None
    at_end = found.step == training.candidate.recipe.scale.num_steps  # the n-grams are of all of its tokens
    result = {
        "perplexity": last and last.perplexity,
        "val_loss": last and last.val_loss,
        "tokenizer": training.tokenizer,
        "split": training.split,
        "tokens": found.step * training.candidate.recipe.scale.batch * training.candidate.recipe.scale.seq_len,
        "seed": training.seed,
        "flags": list(last.entropy.flags) if last else [],
        **_ngram_facts(training.ngrams if at_end else None, last.val_loss if last else None),
    }
    corpus = known_corpus(training.corpus)
    provenance = {
        "run": folder.absolute().name,
        "created": training.created,
        "command": list(training.command),
        "corpus": training.corpus,
        "data": corpus and corpus.data,
        "versions": training.versions,
    }
    workload = Workload(prompt_len=training.candidate.recipe.scale.seq_len)
    pricer = load_pricer("published")
    return _prepared(training.candidate, found, pricer, result, provenance, workload=workload, fold=fold)


def _prepared(
    candidate: Candidate,
    found: Checkpoint,
    pricer: Pricer,
    result: dict[str, Any],
    provenance: dict[str, Any],
    *,
    workload: Workload,
    fold: bool,
) -> Export:
    architecture, trained = candidate.architecture, candidate.trained
    weights = trained_weights(candidate, found)
    seq_len, fold_facts = candidate.recipe.scale.seq_len, {}
    if fold:
        kind, tokens = check_tokens(known_corpus(provenance["corpus"]), trained.vocab_size, seq_len)
        verified = fold_as_far_as(trained, weights, tokens)
        trained, weights = verified.folded.architecture, verified.folded.weights
        architecture = at_dimensions(trained, architecture)
        fold_facts = {"fold": _fold_facts(verified, kind)}
    facts = {
        "notation": candidate.name,
        "arch_id": arch_id(candidate.architecture),
        "deployed": {"notation": name_of(architecture), "arch_id": arch_id(architecture)},
        "candidate_id": candidate_id(candidate),
        "result": {"scale": candidate.recipe.scale.name, "width": candidate.trained.d_model, **result},
        "cost": _cost(architecture, pricer, workload),
        "recipe": _plain(canonical_candidate(candidate)["recipe"]),
        "provenance": {**provenance, "cost_model_id": pricer.cost_model_id},
        **fold_facts,
    }
    return Export(
        architecture=architecture,
        trained=trained,
        weights=weights,
        facts=facts,
        seq_len=seq_len,
        tokenizer=tokenizer_file(provenance["corpus"]),
    )


def _fold_facts(verified: VerifiedFold, tokens: str) -> dict[str, Any]:
    folded, check = verified
    return {
        "check": asdict(check),
        "passes": check.passes,
        "tokens": tokens,
        "condition": folded.condition,
        "left": list(folded.left),
    }


def _write_yaml(made: Export, target: Path) -> None:
    _write_weights(made, target)
    (target / ARCHITECTURE_FILE).write_text(dump_architecture(made.architecture), encoding="utf-8")
    (target / TRAINED_FILE).write_text(dump_architecture(made.trained), encoding="utf-8")
    if made.tokenizer.is_file():
        (target / TOKENIZER_FILE).write_bytes(made.tokenizer.read_bytes())


def _write_mpc(made: Export, target: Path) -> None:
    _write_weights(made, target)
    (target / ARCHITECTURE_FILE).write_text(dump_architecture(made.trained), encoding="utf-8")
    nodes = [
        {"name": node.name, "layer": node.layer, "op": type(node.op).__name__, **asdict(node.op), "inputs": node.inputs}
        for node in lower(made.trained, made.seq_len)
    ]
    (target / "graph.json").write_text(json.dumps({"seq_len": made.seq_len, "nodes": nodes}, indent=1) + "\n")


def _write_hf(made: Export, target: Path) -> None:
    from nas.conversion.huggingface import save_model  # needs the extra `hf`

    save_model(made.trained, made.weights, made.tokenizer, target)


FORMATS: dict[Format, Callable[[Export, Path], None]] = {"yaml": _write_yaml, "hf": _write_hf, "mpc": _write_mpc}


def _write_weights(made: Export, target: Path) -> None:
    (target / WEIGHTS_FILE).write_bytes(save(made.weights, metadata={"candidate_id": made.facts["candidate_id"]}))


def _clear(target: Path) -> None:
    """Removes what was written into a folder that was empty."""
    with suppress(OSError):
        for path in target.iterdir():
            path.unlink()


def _cost(architecture: Architecture, pricer: Pricer, workload: Workload) -> dict[str, Any]:
    """Of each new token."""
    whole, shares = estimate_generation(workload.graphs(architecture), pricer).whole, workload.new_tokens
    bounds = whole.latency_s_range
    return {
        "protocol": whole.protocol,
        "network": whole.network,
        "trust": facts(whole.trust),
        "seq_len": workload.prompt_len,
        "workload": workload.words,
        "total": asdict(shared_price(whole.total, shares)),
        "latency_s_range": None if bounds is None else [bound / shares for bound in bounds],
        "prior_share": whole.prior_share,
        "extrapolated": list(whole.extrapolated),
        "by_layer": [{"layer": layer, **asdict(shared_price(part, shares))} for layer, part in whole.by_layer],
    }


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run(export, prog="python -m nas.export", args=args)


if __name__ == "__main__":
    main()
