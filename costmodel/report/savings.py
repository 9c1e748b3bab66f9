"""Finds how a model can be run at a lower cost without changing its function, and says so in one line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel import ops
from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price, shared_price, total_price
from costmodel.deployment.deploy import Deployment, generation
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.ops import Node, OpGraph
from costmodel.protocols.derived import Derived, check_setting

LEAST = 0.03  # share of the latency that a saving saves at least; less is not worth a flag
NUM_BLOCKS = 4  # blocks of queries, which leave 3/8 of the scores out

EMBEDS = "the client then has the embedding's weights, and the vocabulary projection's if they are tied"
KEPT = "masks are then made with the first token"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Flags that lower a cost, and the cost per new token with these flags and those of all savings listed before it.

    note: what the flags reveal or assume, in words; empty if nothing.
    """

    flags: str
    note: str
    latency_s: float
    sent_bytes: float


def savings(
    whole: Callable[[int], OpGraph],
    pricer: Pricer,
    deployment: Deployment,
    *,
    prompt_len: int,
    new_tokens: int = 1,
    makes_masks: bool = False,
) -> tuple[Saving, ...]:
    """Return savings in the order of their use; each lowers the latency left by then by a share of at least `LEAST`.

    Each one saves most of those left, but savings that reveal or assume something come last, in a fixed order. There
    are none for a graph that has no `TokenEmbedding` or cannot be priced. Costs are per new token of a sequence. Raises
    UserError if `whole` does.

    Args:
        whole: Function that returns the op graph for a number of prompt tokens, before deployment.
        makes_masks: Whether the first run makes the masks that later runs reuse.
    """
    known: dict[Any, Price] = {}  # layers and choices repeat ops

    def price(changes: Mapping[str, Any]) -> Price | None:
        how = {name: value for name, value in changes.items() if hasattr(deployment, name)}
        setting = {name: value for name, value in changes.items() if name not in how}
        try:
            ours, run_as = _with_setting(pricer, setting), replace(deployment, **how)
            runs = generation(whole, prompt_len=prompt_len, new_tokens=new_tokens, deployment=run_as)
            prices = []
            for starts, run in zip((makes_masks, *[False] * len(runs)), runs, strict=False):
                by, key = ours.of_first_run if starts else ours, (str(setting), starts)

                def price_node(node: Node, by: Pricer = by, key: tuple[str, bool] = key) -> Price:
                    if (*key, node.op) not in known:
                        known[*key, node.op] = by.price(node.op)
                    return known[*key, node.op]

                prices += by.prices(run.nodes, price_node)
        except UserError:
            return None
        return shared_price(total_price(prices), new_tokens * deployment.batch)

    if not any(isinstance(node.op, ops.TokenEmbedding) for node in whole(prompt_len)) or (now := price({})) is None:
        return ()
    found: list[Saving] = []
    made: dict[str, Any] = {}
    for note, left in _choices(prompt_len, is_later=makes_masks or deployment.phase == "decode"):
        while True:
            priced = [(choice, cost) for choice in left if (cost := price(made | choice)) is not None]
            worth = [(choice, cost) for choice, cost in priced if cost.latency_s <= (1 - LEAST) * now.latency_s]
            if not worth:
                break
            chosen, now = min(worth, key=lambda pair: pair[1].latency_s)
            new = {name: value for name, value in chosen.items() if made.get(name) != value}
            new = {name: value for name, value in new.items() if getattr(deployment, name, None) != value}
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in new.items())
            found.append(Saving(flags=flags, note=note, latency_s=now.latency_s, sent_bytes=now.sent_bytes))
            made, left = made | chosen, [choice for choice, _ in worth if choice != chosen]
    return tuple(found)


def _choices(prompt_len: int, *, is_later: bool) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return groups of choices of deployment and setting, each with the `note` of its savings.

    is_later: whether a token after the first is priced, for which masks can be reused.
    """
    keeping: list[dict[str, Any]] = [
        {"projection": "last"},
        {"projection": "last", "rows": "needed"},
        {"embedding": "lookup"},
        {"weights": "server"},
        {"query_block": -(-prompt_len // NUM_BLOCKS)},
    ]
    masks: list[dict[str, Any]] = [{"weight_masks": "kept"}] if is_later else []
    return [("", keeping), (EMBEDS, [{"client_layers": 0}]), (KEPT, masks)]


def _with_setting(pricer: Pricer, changes: Mapping[str, Any]) -> Pricer:
    """Return the pricer in another setting; a UserError is raised if the protocol lacks it."""
    if not changes:
        return pricer
    if not isinstance(pricer, Derived):
        raise UserError(f"protocol {pricer.protocol} has no such setting.")
    setting = replace(pricer.setting, **changes)
    check_setting(pricer.protocol, setting)
    return replace(pricer, setting=setting)


def savings_line(found: Sequence[Saving], subject: str = "") -> str:
    """Return savings in one line that begins with `subject`; empty if there are none."""
    parts = [
        f"{format_seconds(each.latency_s)}, {format_bytes(each.sent_bytes)} with {each.flags}"
        f"{' too' if index else ''}{f' ({each.note})' if each.note else ''}"
        for index, each in enumerate(found)
    ]
    return f"{subject}the same function for less: {'; '.join(parts)}" if parts else ""
