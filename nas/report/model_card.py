"""Facts of an exported model, as data for export.yaml and as its README.md: a model card."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from costmodel.config.cli import flags_of
from costmodel.config.units import format_bytes, format_seconds
from costmodel.data_range import describe
from costmodel.estimate import Estimate
from costmodel.trust import described, shown
from costmodel.trust import facts as trust_facts
from nas.corpus.ngrams import NgramBaseline
from nas.recipe.candidate import Candidate, candidate_id, canonical_candidate
from nas.report.summary import KNOWS_LESS, on_second, perplexity_text, sent_text, spread_words
from nas.run.ledger import Record
from nas.run.members import TrainedMember, in_noise
from nas.run.run import Run
from search_spaces.architecture import Architecture, arch_id
from search_spaces.budget.feasible import format_price
from search_spaces.notation import name_of
from search_spaces.workload import Workload

EXPORT_FILE = "export.yaml"

# what is known of the licence of a corpus that weights were trained on
LICENCES = {
    "stdlib": "Python's standard library, under the PSF licence (https://docs.python.org/3/license.html), parts of it "
    "under others that it names",
    "codeparrot": "source code from GitHub under many licences, which its authors did not filter by; look them up "
    "before you pass the weights on",
}
USE = {
    "hf": """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)  # the code is in this folder
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
prompt = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))""",
    "yaml": """import costmodel
from pathlib import Path
from nas.conversion.pretrained import read_export

print(costmodel.price("."))
weights = read_export(Path(".")).weights  # by node of the op graph""",
    "mpc": """import costmodel

print(costmodel.price(".", protocol="semi2k"))  # of the width that was trained""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of training. val_loss: nats per token. tokens: trained on. ngrams: of as many tokens, if counted."""

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
        """None where one of the two is not known."""
        if self.ngrams is None or self.val_loss is None:
            return None
        return self.ngrams.above_trigram(self.val_loss)

    def plain(self) -> dict[str, Any]:
        """Plain data; n-grams in perplexities, nothing of them where they were not counted."""
        data = asdict(self)
        del data["ngrams"]
        if self.ngrams is None:
            return data
        ngrams = {"tokens": self.ngrams.tokens, "perplexities": self.ngrams.perplexities}
        return data | {"ngram_floors": ngrams, "knows_less_than_trigram": self.knows_less_than_trigram}


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Everything a repetition depends on. trial_id, budget_latency: of a run. command: of a training."""

    run: str
    trial_id: str | None = None
    created: str
    command: tuple[str, ...] | None = None
    corpus: str
    data: str | None
    budget_latency: str | None = None
    versions: Mapping[str, str]
    cost_model_id: str

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None or name == "data"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """How the folded model compares with the trained one. check: the fields of `nas.conversion`'s `FoldCheck`.

    tokens: that it was checked on. condition: of the change of basis. left: what was not folded, and why.
    """

    check: Mapping[str, Any]
    passes: bool
    tokens: str
    condition: float
    left: tuple[str, ...]


VERIFIED = (  # fields of a record: the price of what its weights fold to, and whether that form holds
    "deployed", "deployed_id", "latency_s", "sent_bytes", "predicted_latency_s", "predicted_sent_bytes", "fold_holds",
    "left_unfolded",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything export.yaml says.

    candidate: as trained. architecture: as exported, and priced. estimate: of a new token of the workload.
    verified: the trial, if its weights were verified to fold to something. fold: None where that is not asked for.
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
        """Plain data for YAML."""
        candidate, estimate = self.candidate, self.estimate
        plain = {
            "notation": candidate.name,
            "arch_id": arch_id(candidate.architecture),
            "deployed": {"notation": name_of(self.architecture), "arch_id": arch_id(self.architecture)},
            "candidate_id": candidate_id(candidate),
            "result": {"scale": candidate.recipe.scale.name, "width": candidate.trained.d_model, **self.result.plain()},
            "cost": {
                "protocol": estimate.protocol,
                "network": estimate.network,
                "trust": trust_facts(estimate.trust),
                "whose": self.whose,
                "seq_len": self.workload.prompt_len,
                "workload": self.workload.words,
                "total": asdict(estimate.total),
                "latency_s_range": estimate.latency_s_range,
                "prior_share": estimate.prior_share,
                "extrapolated": estimate.extrapolated,
                "by_layer": [{"layer": layer, **asdict(price)} for layer, price in estimate.by_layer],
            },
            "recipe": canonical_candidate(candidate)["recipe"],
            "provenance": self.provenance.plain(),
            "fold": self.fold and asdict(self.fold),
            "verified": self.verified and {name: getattr(self.verified, name) for name in VERIFIED},
        }
        lists: dict[str, Any] = _lists({name: value for name, value in plain.items() if value is not None})
        return lists

    @property
    def whose(self) -> str:
        """Weights that are no secret, in words."""
        return shown(self.workload.deployment.public_layers, self.workload.deployment.client_layers)


def _lists(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def model_card(facts: Facts, format: str, run: Run | None = None) -> str:
    """Markdown. run: what the model is a member of."""
    member = None if run is None else _member(run, facts)
    sections = [
        ("", _head(facts)),
        ("Placement", _placement(facts.architecture)),
        ("Price", [f"- {line}" for line in _price(facts, member)]),
        ("Perplexity", [f"- {line}" for line in _perplexity(facts, member, run)]),
        *([("The front around it", _front(run, member))] if run is not None and run.front else []),
        ("What to distrust", [f"- {line}" for line in _caveats(facts, member, run)]),
        ("Licence", [_licence(facts)]),
        ("Use", ["```python", USE[format], "```"]),
        ("How to make it again", _again(facts, run)),
    ]
    body = "\n\n".join("\n".join([f"## {title}", "", *lines] if title else lines) for title, lines in sections)
    return f"{FRONT_MATTER if format == 'hf' else ''}{body}\n"


FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [private-inference, secure-multiparty-computation]
---

"""


def _head(facts: Facts) -> list[str]:
    candidate, deployed = facts.candidate, name_of(facts.architecture)
    runs_as = "" if deployed == candidate.name else f", written here as `{deployed}`"
    return [
        f"# {candidate.name}",
        "",
        f"A decoder-only language model with few nonlinear operations, made to be run under private inference "
        f"(secure multi-party computation). Architecture `{arch_id(candidate.architecture)}`{runs_as}; trained at "
        f"width {candidate.trained.d_model}, scale {candidate.recipe.scale.name}.",
    ]


def _placement(architecture: Architecture) -> list[str]:
    lines = ["| layers | norm | attention | norm | FFN | stabiliser |", "|---|---|---|---|---|---|"]
    for layer, group in groupby(enumerate(architecture.layers), key=lambda item: item[1]):
        indices = [index for index, _ in group]
        span = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        cells = (span, layer.norm1, layer.attention, layer.norm2, layer.ffn, layer.stabiliser)
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"Block {architecture.block}, {architecture.num_heads} heads, width {architecture.d_model}, vocabulary "
        f"{architecture.vocab_size:,}, context {architecture.context:,}, final norm {architecture.final_norm}: this "
        "is what is priced.",
    ]


def _price(facts: Facts, member: TrainedMember | None) -> Iterator[str]:
    cost, verified = facts.estimate, facts.verified
    network = f" on {cost.network}" if cost.network else ""
    where = f"protocol {cost.protocol}{network}, {facts.workload.words}"
    yield f"This form: {_cost(cost.total.latency_s, cost.total.sent_bytes)} a token ({where})."
    if verified is not None and verified.fold_holds is False:
        yield f"What it folds to, {_cost(verified.latency_s, verified.sent_bytes)}, was refused (What to distrust)."
    elif verified is not None and verified.latency_s == cost.total.latency_s:
        yield "As deployed: the same; folding makes it no cheaper."
    elif verified is not None:
        yield (
            f"As deployed: {_cost(verified.latency_s, verified.sent_bytes)}: what its weights were shown to "
            f"fold to, `{verified.deployed}` (`python -m nas.export ... --fold` writes that form)."
        )
    if member is not None:
        yield from (f"Under {name}: {format_price(costs)}." for name, costs in member.also.items())
    yield f"Trust: {described(cost.trust)}{facts.whose}."


def _cost(latency_s: float, sent_bytes: float) -> str:
    return f"{format_seconds(latency_s)}, {format_bytes(sent_bytes)}"


def _perplexity(facts: Facts, member: TrainedMember | None, run: Run | None) -> Iterator[str]:
    result = facts.result
    perplexity = "not validated yet" if result.perplexity is None else f"{result.perplexity:.2f}"
    yield (
        f"These weights: {perplexity} (seed {result.seed}, {result.tokens:,} training tokens, {result.tokenizer}, "
        f"{result.split})."
    )
    if member is not None:
        yield f"The architecture: {perplexity_text(member)}; {spread_words([member]) or 'no spread is known'}."
    else:
        yield "One seed: no spread is known."
    if run is not None and run.parent is not None:
        yield f"Its parent `{run.parent.name}`, {run.parent.notation}: {run.parent.perplexity:.2f}."
    if result.ngrams is not None:
        reached = ", ".join(f"{name} {value:.4g}" for name, value in result.ngrams.perplexities.items())
        yield f"N-gram models of {result.ngrams.tokens:,} training tokens: {reached}."


def _front(run: Run, member: TrainedMember | None) -> list[str]:
    lines = ["| architecture | runs as | time a token | sent | perplexity |", "|---|---|---|---|---|"]
    for neighbour, noise in zip(run.front, in_noise(run.front), strict=True):
        this = " (this one)" if neighbour == member else ""
        cells = (
            f"`{neighbour.notation}`{this}",
            f"`{neighbour.deployed}`" if neighbour.deployed else "as written",
            format_seconds(neighbour.latency_s),
            sent_text(neighbour),
            perplexity_text(neighbour) + (" ~" if noise else "") + on_second(run, neighbour),
        )
        lines.append(f"| {' | '.join(cells)} |")
    spread = spread_words(run.front)
    return [*lines, "", f"{spread and f'{spread}; '}~ within noise of its cheaper neighbour."]


def _caveats(facts: Facts, member: TrainedMember | None, run: Run | None) -> Iterator[str]:
    cost, verified, width, priced = facts.estimate, facts.verified, facts.candidate.trained.d_model, facts.architecture
    if verified is not None and verified.fold_holds is False:
        why = "".join(f"; {left}" for left in verified.left_unfolded)
        yield f"DO NOT DEPLOY IT: the search refused this model, whose folded form failed the check{why}."
    if width != priced.d_model:
        yield (
            f"Prices are of width {priced.d_model}, weights and perplexities of width {width}: they rank "
            "architectures, and are not what the full model would reach."
        )
    if facts.result.knows_less_than_trigram:
        yield f"It {KNOWS_LESS} of the same tokens."
    if member is None or member.num_seeds == 1:
        yield "One seed decides nothing."
    if member is not None and run is not None and member in run.front and in_noise(run.front)[run.front.index(member)]:
        yield "It is not shown to be better than its cheaper neighbour on the front."
    if cost.latency_s_range is not None:
        low, high = map(format_seconds, cost.latency_s_range)
        yield f"Seconds are predicted, not measured on your machines: {low} to {high} agree with the data."
    if outside := describe(cost.extrapolated):
        yield f"The price is {outside}."
    if cost.trust.dealer:
        yield "A dealer is trusted, whose work is not in the price."
    if facts.fold is not None:
        outcome = "holds" if facts.fold.passes else "FAILED: do not rely on this form"
        yield f"The check of the folded form on {facts.fold.tokens} tokens {outcome}."


def _licence(facts: Facts) -> str:
    data = facts.provenance.data
    known = LICENCES.get((data or "").partition(":")[0])
    corpus = f"`{data}`" if data else f"the corpus with fingerprint `{facts.provenance.corpus}`"
    licence = known or "whose licence is not known here; look it up before you pass the weights on"
    return f"The weights were trained on {corpus}: {licence}. The code is under Apache-2.0."


def _again(facts: Facts, run: Run | None) -> list[str]:
    provenance = facts.provenance
    versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
    module, arguments = ("nas.search", flags_of(run.config)) if run else ("nas.train", provenance.command)
    made = [shlex.join(["python", "-m", module, *arguments])] if arguments else []
    return [
        *(line for command in made for line in ("```", command, "```", "")),
        f"Corpus `{provenance.corpus}`, cost model `{provenance.cost_model_id}`, {versions}. The whole recipe is "
        "in `export.yaml`.",
    ]


def _member(run: Run, facts: Facts) -> TrainedMember | None:
    known = candidate_id(facts.candidate)
    return next((member for member in run.members if member.candidate_id == known), None)
