"""`python -m costmodel estimate`: prints the cost of a model."""

import json
import math
from typing import Any, Literal

from costmodel.config.units import format_bytes, parse_bytes
from costmodel.cost import Budget
from costmodel.errors import InfeasibleError, UserError
from costmodel.pricing.price import price
from costmodel.report.tables import print_blocks, print_csv


def estimate(
    arch: str,
    budget_keys: str | None = None,
    egress_price: float | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **options: Any,
) -> None:
    """Price an architecture: total, per layer and per op, embedding and vocabulary projection included.

    The costs are those of the unfolded model. The folded model and its cost are shown beside them, if they are known.

    Args:
        arch: a checkpoint (a folder of save_pretrained, its config.json, a .gguf file, or OWNER/NAME of the Hugging
            Face hub), whose weights are not read; an existing .yaml file; the folder of an export; module:factory (an
            Architecture, or a torch module of token ids, which is traced); or a name such as SM+ScFuFFN_i6 or
            6xLSLGo-6xoSoFs.
        budget_keys: size of keys that a party can store, such as 8GB, under a protocol whose dealer makes keys, such as
            sigma; a model that needs more is refused.
        egress_price: price of each GB (1e9 bytes) that leaves a party, such as 0.09; not counted by default.
        format: tables, one JSON document, or CSV with a line per op or new token; in SI units.
    """
    if egress_price is not None and not 0 <= egress_price < math.inf:
        raise UserError(f"--egress-price must be at least 0 and finite, money for each GB, but got {egress_price}.")
    priced = price(arch, **options)
    if budget_keys is not None:
        most, key_bytes = parse_bytes(budget_keys, "--budget-keys"), priced.total.key_bytes
        protocol = priced.estimate.protocol
        Budget(key_bytes=most).check_keys(protocol, has_keys=key_bytes is not None)
        if key_bytes is not None and key_bytes > most:
            raise InfeasibleError(
                f"{priced.name} takes {format_bytes(key_bytes)} of keys a party under {protocol}, but --budget-keys is "
                f"{format_bytes(most)}; shorten the prompt or take a cheaper placement."
            )
    if format == "json":
        print(json.dumps(priced.to_dict(egress_price=egress_price), allow_nan=False))
    elif format == "csv":
        print_csv(priced.to_records())
    else:
        print_blocks(priced.summary(egress_price=egress_price), priced.tables())
