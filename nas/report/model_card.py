"""Facts of an exported model, as data for export.yaml and as its README.md: a model card."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any, Self

from costmodel.config.cli import flags_of
from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price
from costmodel.data_range import describe
from costmodel.ops import LayerId
from costmodel.trust import Trust, described
from costmodel.trust import facts as trust_facts
from nas.corpus.ngrams import NgramBaseline
from nas.report.summary import KNOWS_LESS, on_second, perplexity_text, sent_text, spread_words
from nas.run.ledger import Record
from nas.run.members import TrainedMember, in_noise
from nas.run.run import Run
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import format_price

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
class Form:
    """An architecture by name and id."""

    notation: str
    arch_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of training. val_loss: nats per token. tokens: trained on. ngrams: of as many tokens, if counted."""

    scale: str
    width: int
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
class Cost:
    """Prices of a new token. whose: weights that are no secret, and workload, in words. prior_share: of the seconds, or
    None. by_layer: sums to `total`.
    """

    protocol: str
    network: str | None
    trust: Trust
    whose: str
    seq_len: int
    workload: str
    total: Price
    latency_s_range: tuple[float, float] | None
    prior_share: float | None
    extrapolated: tuple[str, ...]
    by_layer: tuple[tuple[LayerId, Price], ...]

    def plain(self) -> dict[str, Any]:
        layers = [{"layer": layer, **asdict(price)} for layer, price in self.by_layer]
        return asdict(self) | {"trust": trust_facts(self.trust), "by_layer": layers}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedPrice:
    """The price of what a candidate's weights fold to, which the search counted; whether that form holds, or what is
    against it.
    """

    deployed: str | None
    deployed_id: str | None
    latency_s: float
    sent_bytes: float
    predicted_latency_s: float | None
    predicted_sent_bytes: float | None
    fold_holds: bool | None
    left_unfolded: tuple[str, ...]

    @classmethod
    def of(cls, record: Record) -> Self:
        return cls(**{field.name: getattr(record, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything export.yaml says. deployed: the form that is exported. fold, verified: None where there is none."""

    notation: str
    arch_id: str
    deployed: Form
    candidate_id: str
    result: Result
    cost: Cost
    recipe: Mapping[str, Any]
    provenance: Provenance
    fold: Fold | None = None
    verified: VerifiedPrice | None = None

    def plain(self) -> dict[str, Any]:
        """Plain data for YAML."""
        data = {name: value for name, value in asdict(self).items() if value is not None}
        parts = {name: getattr(self, name).plain() for name in ("result", "cost", "provenance")}
        plain: dict[str, Any] = _lists(data | parts)
        return plain


def _lists(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def model_card(facts: Facts, architecture: Architecture, format: str, run: Run | None = None) -> str:
    """Markdown. architecture: what is priced. run: what the model is a member of."""
    member = None if run is None else _member(run, facts)
    sections = [
        ("", _head(facts)),
        ("Placement", _placement(architecture)),
        ("Price", [f"- {line}" for line in _price(facts, member)]),
        ("Perplexity", [f"- {line}" for line in _perplexity(facts, member, run)]),
        *([("The front around it", _front(run, member))] if run is not None and run.front else []),
        ("What to distrust", [f"- {line}" for line in _caveats(facts, architecture, member, run)]),
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
    deployed = facts.deployed.notation
    runs_as = "" if deployed == facts.notation else f", written here as `{deployed}`"
    return [
        f"# {facts.notation}",
        "",
        f"A decoder-only language model with few nonlinear operations, made to be run under private inference "
        f"(secure multi-party computation). Architecture `{facts.arch_id}`{runs_as}; trained at width "
        f"{facts.result.width}, scale {facts.result.scale}.",
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
    cost, verified = facts.cost, facts.verified
    network = f" on {cost.network}" if cost.network else ""
    where = f"protocol {cost.protocol}{network}, {cost.workload}"
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
    yield f"Trust: {described(cost.trust)}{cost.whose}."


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


def _caveats(facts: Facts, architecture: Architecture, member: TrainedMember | None, run: Run | None) -> Iterator[str]:
    result, cost, verified = facts.result, facts.cost, facts.verified
    if verified is not None and verified.fold_holds is False:
        why = "".join(f"; {left}" for left in verified.left_unfolded)
        yield f"DO NOT DEPLOY IT: the search refused this model, whose folded form failed the check{why}."
    if result.width != architecture.d_model:
        yield (
            f"Prices are of width {architecture.d_model}, weights and perplexities of width {result.width}: they "
            "rank architectures, and are not what the full model would reach."
        )
    if result.knows_less_than_trigram:
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
    return next((member for member in run.members if member.candidate_id == facts.candidate_id), None)
