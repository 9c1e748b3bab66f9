"""`costmodel.price`: what a model costs under private inference, however it is given."""

import os
from typing import Unpack

from costmodel.errors import UserError
from costmodel.network import Network, link
from costmodel.pricing.asked import AskedModel, Model, ModelFlags, asked_model
from costmodel.pricing.priced import PricedModel, generation_of
from costmodel.protocols import load_pricer, setting_of
from costmodel.protocols.primitives import Holder, WeightMasks


def price(
    model: Model | AskedModel,
    *,
    protocol: str = "published",
    network: str | Network | None = None,
    bandwidth: str | None = None,
    rtt: str | None = None,
    testbed: str | os.PathLike[str] | None = None,
    weights: Holder | None = None,
    weight_masks: WeightMasks | None = None,
    threads: int | None = None,
    ring_bits: int | None = None,
    fraction_bits: int | None = None,
    new_tokens: int | None = None,
    **flags: Unpack[ModelFlags],
) -> PricedModel:
    """Prices a model: in total, by layer and by op, embedding and vocabulary projection included.

    Priced as it is written; `.deployed` is what folding leaves of it. Everything is in seconds and bytes.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder,
            module:factory, an Architecture, the op graph of a prompt, a torch module that takes 1 x T token ids, or
            any of these as `asked_model` has read it.
        protocol: published, semi2k, aby3, cheetah, sigma or crypten.
        network: loopback, lan (the default), wan or another preset, a .yaml file or a Network; `published` takes none.
        bandwidth: of the link, with a unit, such as 1Gbps, instead of the network's.
        rtt: of the link, with a unit, such as 4ms, instead of the network's.
        testbed: a .yaml file of compute seconds from `python -m costmodel calibrate`, instead of the committed ones.
        weights: secret-shared (the default), or held by the server alone.
        weight_masks: of semi2k, made anew in every run, or kept from an earlier one; of new tokens, from the first.
        threads: of each party, for a testbed that was measured so.
        ring_bits: of a number; 64, or 50 under sigma. A testbed is of one ring, but for sigma's.
        fraction_bits: of it behind the point; 18, 12 under sigma or 16 under crypten.
        new_tokens: price so many, the first from the prompt, of which the last logits alone are read then, each other
            one by a run of its own against the keys and values of all before it.
        flags: of the model and of how it is run, such as seq_len, phase or base, as `asked_model` describes them.

    Raises UserError for a model that is none of these, a flag that it or the protocol cannot take, or an op that the
    protocol has no formula for.
    """
    if isinstance(model, AskedModel) and flags:
        raise UserError(
            f"a model that is read has its flags already, but got {', '.join(flags)}; give `asked_model` them."
        )
    asked = model if isinstance(model, AskedModel) else asked_model(model, **flags)
    if new_tokens is not None:
        asked = asked.answering
    setting = setting_of(
        protocol,
        weights=weights,
        weight_masks=weight_masks,
        threads=threads,
        ring_bits=ring_bits,
        fraction_bits=fraction_bits,
    )
    pricer = load_pricer(protocol, link(network, bandwidth, rtt), testbed, setting)
    runs = tuple(asked.runs(new_tokens))
    generation = generation_of(runs, pricer, new_tokens)
    return PricedModel(asked=asked, pricer=pricer, new_tokens=new_tokens, runs=runs, generation=generation)
