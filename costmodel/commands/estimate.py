"""`python -m costmodel estimate`."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from costmodel.commands.architectures import AskedModel, asked_model
from costmodel.commands.output import print_blocks, print_csv
from costmodel.deployment.generation import NOT_DECODED
from costmodel.errors import UserError
from costmodel.estimate import Estimate, Pricer, estimate_generation
from costmodel.execution.memory import PeakMemory, alive_bytes, committed, held_bytes, load_memory, peak_memory
from costmodel.network import link
from costmodel.ops import OpGraph
from costmodel.protocols import load_pricer
from costmodel.protocols.derived import Derived
from costmodel.protocols.primitives import EngineSetting, Holder, WeightMasks
from costmodel.randomness.makers import Made, alternatives
from costmodel.report import estimates
from costmodel.report.tokens import Tokens, token_records, tokens_table
from search_spaces.architecture import arch_id
from search_spaces.notation import name_of, placement

DEFAULT_SETTING = EngineSetting()


def estimate(
    arch: str,
    protocol: str = "published",
    network: str | None = None,
    bandwidth: str | None = None,
    rtt: str | None = None,
    testbed: Path | None = None,
    weights: Holder | None = None,
    weight_masks: WeightMasks | None = None,
    threads: int | None = None,
    egress_price: float | None = None,
    new_tokens: int | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **model: Any,
) -> None:
    """Price an architecture: total, per layer and per op, embedding and vocabulary projection included.

    Priced as it is written; beside that, what folding leaves of it to deploy, and the price of that.

    Args:
        arch: an existing .yaml file, module:factory (an Architecture, or a torch module of token ids, which is traced),
            or a name such as SM+ScFuFFN_i6 or 6xLSLGo-6xoSoFs.
        protocol: published, semi2k, aby3 or cheetah.
        network: loopback, lan (the default), wan, cheetah-lan, bumblebee-wan, aero-stated or a .yaml file; `published`
            has its own fitted in and takes none.
        bandwidth: of the link, with a unit, such as 1Gbps, instead of the network's.
        rtt: of the link, with a unit, such as 4ms, instead of the network's.
        testbed: compute seconds from `calibrate`, instead of the committed ones.
        weights: secret-shared (the default), or held by the server alone.
        weight_masks: of semi2k, made anew in every run, or kept from an earlier one (a token after the first).
        threads: of each party, for a testbed that was measured so (default 1).
        egress_price: money for each GB (1e9 bytes) that leaves a party, such as 0.09; by default none is counted.
        new_tokens: price so many, the first from the prompt, of which the last logits alone are read then, each other
            one by a run of its own against the keys and values of all before it.
        format: tables for people, one JSON document, or CSV, a line an op, or a new token where they are asked for; in
            SI units.
    """
    if new_tokens is not None:
        if model["phase"] == "decode":
            raise UserError(NOT_DECODED)
        model["projection"] = "last"
    asked = asked_model(arch, **model)
    setting = _setting(protocol, weights=weights, weight_masks=weight_masks, threads=threads)
    check_egress_price(egress_price)
    pricer = load_pricer(protocol, link(network, bandwidth, rtt), testbed, setting)
    runs = [asked.graph] if new_tokens is None else asked.runs(new_tokens)
    generation = estimate_generation(runs, pricer)
    priced, form = generation.whole, _deployed_form(asked, new_tokens, pricer)
    used = None if protocol == "published" else setting or DEFAULT_SETTING
    made = without_dealer(runs, pricer)
    tokens = None
    if new_tokens is not None:
        batch, prompt_len = asked.deployment.batch, asked.title["seq_len"]
        tokens = Tokens(prompt_len=prompt_len, by_token=generation.by_token, batch=batch)
    about: Any = {**asked.title, "deployed": form, "tokens": tokens, "egress_price": egress_price}
    about["memory"] = most_memory(runs, pricer)
    if format == "json":
        print(json.dumps(estimates.document(priced, used, **about, made=made), allow_nan=False))
    elif format == "csv":
        print_csv(_ops_with_memory(asked.graph, priced, pricer) if tokens is None else token_records(tokens))
    else:
        tables = [] if tokens is None else [tokens_table(tokens)]
        print_blocks(estimates.summary(priced, used, **about), [*tables, *estimates.estimate_tables(priced, made)])


def most_memory(runs: Sequence[OpGraph], pricer: Pricer) -> PeakMemory | None:
    """Of the run that needs the most, the first or the last; nothing for a protocol that no engine runs."""
    if not isinstance(pricer, Derived):
        return None
    testbed = load_memory(committed(pricer.protocol))
    found = [peak_memory(run, pricer.setting, testbed) for run in (runs[0], runs[-1])]
    return max((each for each in found if each is not None), key=lambda each: each.party_bytes, default=None)


def _ops_with_memory(graph: OpGraph, priced: Estimate, pricer: Pricer) -> list[dict[str, Any]]:
    """Every op with its price and the bytes of shares that a party holds meanwhile, where an engine runs it."""
    records = estimates.op_records(priced)
    if not isinstance(pricer, Derived):
        return [{**record, "held_bytes": None} for record in records]
    stored = held_bytes(graph, pricer.protocol, pricer.setting)
    alive = alive_bytes(graph, pricer.protocol, pricer.setting)
    return [{**record, "held_bytes": stored + each} for record, each in zip(records, alive, strict=True)]


def check_egress_price(price: float | None) -> None:
    """Raises UserError for a price that is below 0 or not finite."""
    if price is not None and not 0 <= price < math.inf:
        raise UserError(f"--egress-price must be at least 0 and finite, money for each GB, but got {price}.")


def without_dealer(runs: Iterable[OpGraph], pricer: Pricer) -> tuple[Made, ...]:
    """What it costs to make otherwise what a dealer makes; nothing where there is none."""
    if not (pricer.trust.dealer and isinstance(pricer, Derived)):
        return ()
    return alternatives([node.op for run in runs for node in run], pricer.setting, pricer.link)


def _setting(protocol: str, **flags: Any) -> EngineSetting | None:
    """The flags that are given; None if none is."""
    given = {name: value for name, value in flags.items() if value is not None}
    if protocol == "published" and (fitted := [name for name in given if name != "weights"]):
        flag = fitted[0].replace("_", "-")
        raise UserError(
            f"protocol published has its {flag} fitted in, but got --{flag} {given[fitted[0]]}; leave it out."
        )
    return EngineSetting(**given) if given else None


def _deployed_form(asked: AskedModel, new_tokens: int | None, pricer: Pricer) -> estimates.DeployedForm | None:
    left = asked.folded
    if left is None or left.architecture is None:
        return None
    return estimates.DeployedForm(
        notation=name_of(left.architecture),
        placement=placement(left.architecture),
        deployed_id=arch_id(left.architecture),
        estimate=estimate_generation([left.graph] if new_tokens is None else left.runs(new_tokens), pricer).whole,
    )
