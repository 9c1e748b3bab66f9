"""The README.md of an export: what the model is, what it costs, what it knows, and what of that to distrust."""

import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from costmodel.config.cli import flags_of
from costmodel.config.units import format_bytes, format_seconds
from costmodel.data_range import describe
from costmodel.trust import Trust, described
from nas.report.summary import KNOWS_LESS, SPREAD, perplexity_text
from nas.run.members import TrainedMember, in_noise
from nas.run.run import Run
from search_spaces.architecture import Architecture

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


def model_card(facts: Mapping[str, Any], architecture: Architecture, format: str, run: Run | None = None) -> str:
    """Markdown. facts: those of `export.yaml`. architecture: what is priced. run: what the model is a member of."""
    member = None if run is None else _member(run, facts)
    sections = [
        ("", _head(facts)),
        ("Placement", _placement(architecture)),
        ("Price", [f"- {line}" for line in _price(facts)]),
        ("Perplexity", [f"- {line}" for line in _perplexity(facts, member, run)]),
        *([("The front around it", _front(run, member))] if run is not None and run.front else []),
        ("What to distrust", [f"- {line}" for line in _doubts(facts, architecture, member, run)]),
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


def _head(facts: Mapping[str, Any]) -> list[str]:
    deployed = facts["deployed"]["notation"]
    runs_as = "" if deployed == facts["notation"] else f", written here as `{deployed}`"
    return [
        f"# {facts['notation']}",
        "",
        f"A decoder-only language model with few nonlinear operations, made to be run under private inference "
        f"(secure multi-party computation). Architecture `{facts['arch_id']}`{runs_as}; trained at width "
        f"{facts['result']['width']}, scale {facts['result']['scale']}.",
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


def _price(facts: Mapping[str, Any]) -> Iterator[str]:
    cost = facts["cost"]
    total, network = cost["total"], f" on {cost['network']}" if cost["network"] else ""
    where = f"protocol {cost['protocol']}{network}, {cost['workload']}"
    yield f"This form: {_cost(total['latency_s'], total['sent_bytes'])} a token ({where})."
    if (verified := facts.get("verified")) and verified["latency_s"] == total["latency_s"]:
        yield "As deployed: the same; folding makes it no cheaper."
    elif verified:
        yield (
            f"As deployed: {_cost(verified['latency_s'], verified['sent_bytes'])}: what its weights were shown to "
            f"fold to, `{verified['deployed']}` (`python -m nas.export ... --fold` writes that form)."
        )
    trust = dict(cost["trust"])
    del trust["threshold"]
    yield f"Trust: {described(Trust(**trust))}."


def _cost(latency_s: float, sent_bytes: float) -> str:
    return f"{format_seconds(latency_s)}, {format_bytes(sent_bytes)}"


def _perplexity(facts: Mapping[str, Any], member: TrainedMember | None, run: Run | None) -> Iterator[str]:
    result = facts["result"]
    own = "not validated yet" if result["perplexity"] is None else f"{result['perplexity']:.2f}"
    yield (
        f"These weights: {own} (seed {result['seed']}, {result['tokens']:,} training tokens, {result['tokenizer']}, "
        f"{result['split']})."
    )
    if member is not None:
        spread = f"; {SPREAD}" if member.num_seeds > 1 else ", which shows no spread"
        yield f"The architecture over seeds: {perplexity_text(member)}{spread}."
    else:
        yield "One seed: no spread is known."
    if run is not None and run.parent is not None:
        yield f"Its parent `{run.parent.name}`, {run.parent.notation}: {run.parent.perplexity:.2f}."
    if ngrams := result.get("ngram_floors"):
        reached = ", ".join(f"{name} {value:.4g}" for name, value in ngrams["perplexities"].items())
        yield f"N-gram models of {ngrams['tokens']:,} training tokens: {reached}."


def _front(run: Run, member: TrainedMember | None) -> list[str]:
    lines = ["| architecture | runs as | time a token | sent | perplexity |", "|---|---|---|---|---|"]
    for one, noise in zip(run.front, in_noise(run.front), strict=True):
        this = " (this one)" if member is not None and one.candidate_id == member.candidate_id else ""
        cells = (
            f"`{one.notation}`{this}",
            f"`{one.deployed}`" if one.deployed else "as written",
            format_seconds(one.latency_s),
            format_bytes(one.sent_bytes),
            perplexity_text(one) + (" ~" if noise else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"{SPREAD}; ~ within noise of its cheaper neighbour."]


def _doubts(
    facts: Mapping[str, Any], architecture: Architecture, member: TrainedMember | None, run: Run | None
) -> Iterator[str]:
    result, cost = facts["result"], facts["cost"]
    if result["width"] != architecture.d_model:
        yield (
            f"Prices are of width {architecture.d_model}, weights and perplexities of width {result['width']}: they "
            "rank architectures, and are not what the full model would reach."
        )
    if result.get("knows_less_than_trigram"):
        yield f"It {KNOWS_LESS} of the same tokens."
    if member is None or member.num_seeds == 1:
        yield "One seed decides nothing."
    if member is not None and run is not None and member in run.front and in_noise(run.front)[run.front.index(member)]:
        yield "It is not shown to be better than its cheaper neighbour on the front."
    if span := cost["latency_s_range"]:
        low, high = map(format_seconds, span)
        yield f"Seconds are predicted, not measured on your machines: {low} to {high} agree with the data."
    if outside := describe(cost["extrapolated"]):
        yield f"The price is {outside}."
    if cost["trust"]["dealer"]:
        yield "A dealer is trusted, whose work is not in the price."
    if fold := facts.get("fold"):
        held = "holds" if fold["passes"] else "FAILED: do not rely on this form"
        yield f"The check of the folded form on {fold['tokens']} tokens {held}."


def _licence(facts: Mapping[str, Any]) -> str:
    data = facts["provenance"].get("data")
    known = LICENCES.get((data or "").partition(":")[0])
    corpus = f"`{data}`" if data else f"the corpus with fingerprint `{facts['provenance']['corpus']}`"
    told = known or "whose licence is not known here; look it up before you pass the weights on"
    return f"The weights were trained on {corpus}: {told}. The code is under Apache-2.0."


def _again(facts: Mapping[str, Any], run: Run | None) -> list[str]:
    provenance = facts["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    module, arguments = ("nas.search", flags_of(run.config)) if run else ("nas.train", provenance.get("command"))
    made = [shlex.join(["python", "-m", module, *arguments])] if arguments else []
    return [
        *(line for command in made for line in ("```", command, "```", "")),
        f"Corpus `{provenance['corpus']}`, cost model `{provenance['cost_model_id']}`, {versions}. The whole recipe is "
        "in `export.yaml`.",
    ]


def _member(run: Run, facts: Mapping[str, Any]) -> TrainedMember | None:
    return next((one for one in run.members if one.candidate_id == facts["candidate_id"]), None)
