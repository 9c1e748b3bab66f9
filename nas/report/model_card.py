"""Facts of an exported model, as data for export.yaml and as a model card (`model_card.md.jinja`)."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from costmodel.config.cli import flags_of
from costmodel.estimate import Estimate
from costmodel.trust import facts as trust_facts
from costmodel.trust import shown
from nas.corpus.ngrams import NgramBaseline
from nas.recipe.candidate import Candidate, candidate_id, canonical_candidate
from nas.report.summary import KNOWS_LESS
from nas.report.template import rendered
from nas.run.ledger import Record
from nas.run.members import in_noise
from nas.run.run import Run
from search_spaces.architecture import Architecture, Layer, arch_id
from search_spaces.lower import Workload
from search_spaces.notation import name_of

# licences of corpora that weights were trained on
LICENCES = {
    "stdlib": "Python's standard library, under the PSF licence (https://docs.python.org/3/license.html), parts of it "
    "under others that it names",
    "codeparrot": "source code from GitHub under many licences, which its authors did not filter by; look them up "
    "before you pass the weights on",
}
UNKNOWN_LICENCE = "whose licence is not known here; look it up before you pass the weights on"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a training.

    perplexity, val_loss: None before the first validation. val_loss: nats per token. tokens: number of training tokens.
    flags: warnings on attention entropy. ngrams: n-gram baselines of the same training text; None if not counted, or if
    the training is unfinished.
    """

    perplexity: float | None
    val_loss: float | None
    tokenizer: str
    split: str
    tokens: int
    seed: int
    flags: tuple[str, ...]
    ngrams: NgramBaseline | None

    @property
    def knows_less_than_trigram(self) -> bool | None:
        """Whether the loss is above the trigram baseline; None if either is unknown."""
        return None if self.ngrams is None or self.val_loss is None else self.ngrams.above_trigram(self.val_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a result comes from: the run or command, the data, and the versions of packages and cost model.

    run: name of the folder of the run or training. trial_id, budget_latency: None for a training of `nas.train`.
    command: arguments of `nas.train`; None for a run. corpus: fingerprint. data: value of --data; None if unknown.
    """

    run: str
    trial_id: str | None = None
    created: str
    command: tuple[str, ...] | None = None
    corpus: str
    data: str | None
    budget_latency: str | None = None
    versions: Mapping[str, str]
    cost_model_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """Comparison of the folded model with the trained one.

    check: fields of `nas.conversion.verified_fold.FoldCheck`. passes: whether the folded model may replace the trained
        one. tokens: `validation` or `random` tokens were used for the check. condition: condition number of the change
        of basis. left: parts left unfolded, with reasons.
    """

    check: Mapping[str, Any]
    passes: bool
    tokens: str
    condition: float
    left: tuple[str, ...]


VERIFIED = (  # fields of a record: verified form, its cost, and whether it stays within fixed-point range
    "deployed", "deployed_id", "latency_s", "sent_bytes", "predicted_latency_s", "predicted_sent_bytes", "fold_holds",
    "left_unfolded",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The contents of export.yaml, except `fixed_point`.

    candidate: as trained. architecture: as exported, in the dimensions for which costs are computed. estimate: mean
        cost per new token of the workload. fold: None if the export is not folded. verified: the trial's record, with
        its verified folded form; None if the run's costs are unfolded costs, or for a training of `nas.train`.
    """

    candidate: Candidate
    architecture: Architecture
    result: Result
    estimate: Estimate
    workload: Workload
    provenance: Provenance
    fold: Fold | None = None
    verified: Record | None = None

    def plain(self) -> dict[str, Any]:
        """Return the facts as plain data for YAML, with n-gram baselines as perplexities if they were counted."""
        candidate, estimate = self.candidate, self.estimate
        result = {"scale": candidate.recipe.scale.name, "width": candidate.trained.d_model, **asdict(self.result)}
        del result["ngrams"]
        if (ngrams := self.result.ngrams) is not None:
            result["ngram_floors"] = {"tokens": ngrams.tokens, "perplexities": ngrams.perplexities}
            result["knows_less_than_trigram"] = self.result.knows_less_than_trigram
        provenance = asdict(self.provenance).items()
        plain: dict[str, Any] = {
            "notation": candidate.name,
            "arch_id": arch_id(candidate.architecture),
            "deployed": {"notation": name_of(self.architecture), "arch_id": arch_id(self.architecture)},
            "candidate_id": candidate_id(candidate),
            "result": result,
            "cost": {
                "protocol": estimate.protocol,
                "network": estimate.network,
                "trust": trust_facts(estimate.trust),
                "whose": shown(self.workload.deployment.public_layers, self.workload.deployment.client_layers),
                "seq_len": self.workload.prompt_len,
                "workload": self.workload.words,
                "total": asdict(estimate.total),
                "latency_s_range": estimate.latency_s_range,
                "extrapolated": estimate.extrapolated,
                "by_layer": [{"layer": layer, **asdict(price)} for layer, price in estimate.by_layer],
            },
            "recipe": canonical_candidate(candidate)["recipe"],
            "provenance": {name: value for name, value in provenance if value is not None or name == "data"},
            "fold": self.fold and asdict(self.fold),
            "verified": self.verified and {name: getattr(self.verified, name) for name in VERIFIED},
        }
        lists: dict[str, Any] = json.loads(json.dumps(plain))  # in place of tuples
        return {name: value for name, value in lists.items() if value is not None}


def model_card(facts: Facts, format: str, run: Run | None = None) -> str:
    """Return the model card as Markdown. format: the export's, `hf`, `yaml` or `mpc`. run: the model's run, if any."""
    spans: list[tuple[str, Layer]] = []  # equal consecutive layers: `2 to 5`, and the layer
    for layer, group in groupby(enumerate(facts.architecture.layers), key=lambda item: item[1]):
        first, *others = (index for index, _ in group)
        spans.append((f"{first} to {others[-1]}" if others else str(first), layer))
    known, front = candidate_id(facts.candidate), run.front if run else ()
    member = next((member for member in run.members if member.candidate_id == known), None) if run else None
    arguments = ("nas.search", *flags_of(run.config)) if run else ("nas.train", *(facts.provenance.command or ()))
    return rendered(
        Path(__file__).with_name("model_card.md.jinja"),
        run,
        **{field.name: getattr(facts, field.name) for field in fields(facts)},
        whose=shown(facts.workload.deployment.public_layers, facts.workload.deployment.client_layers),
        format=format,
        member=member,
        front=front,
        noise=in_noise(front),
        arch_id=arch_id(facts.candidate.architecture),
        runs_as=name_of(facts.architecture),
        spans=spans,
        knows_less=KNOWS_LESS,
        licence=LICENCES.get((facts.provenance.data or "").partition(":")[0], UNKNOWN_LICENCE),
        command=shlex.join(["python", "-m", *arguments]) if arguments[1:] else "",
    )
