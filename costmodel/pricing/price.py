"""`costmodel.price`: what a model costs under private inference, however it is given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.estimate import Pricer
from costmodel.network import Network, link
from costmodel.pricing.asked import Model, ModelOptions, asked_model
from costmodel.pricing.priced import PricedModel
from costmodel.protocols import Setting, load_pricer, setting_of
from costmodel.protocols.primitives import Holder, WeightMasks


@dataclass(frozen=True, kw_only=True)
class PricingOptions:
    """What a model is priced under.

    Args:
        protocol: published, semi2k, aby3, cheetah, sigma or crypten.
        network: loopback, lan (the default), wan, another preset (cheetah-lan, bumblebee-wan, aero-stated, sigma-lan,
            sigma-wan) or a .yaml file, or a Network in Python; `published` has its own fitted in and takes none.
        bandwidth: of the link, with a unit, such as 1Gbps, instead of the network's.
        rtt: of the link, with a unit, such as 4ms, instead of the network's.
        testbed: a .yaml file of compute seconds from `calibrate`, instead of the committed ones.
        weights: secret-shared (the default), or held by the server alone.
        weight_masks: of semi2k, made anew in every run, or kept from an earlier one (a token after the first); of new
            tokens, from the first.
        threads: of each party, for a testbed that was measured so (default 1).
        ring_bits: of a number; 64, or 50 under sigma. A testbed is of one ring, but for sigma's.
        fraction_bits: of it behind the point; 18, 12 under sigma or 16 under crypten.
        new_tokens: price so many, the first from the prompt, of which the last logits alone are read then, each other
            one by a run of its own against the keys and values of all before it.
    """

    protocol: str = "published"
    network: str | None = None
    bandwidth: str | None = None
    rtt: str | None = None
    testbed: Path | None = None
    weights: Holder | None = None
    weight_masks: WeightMasks | None = None
    threads: int | None = None
    ring_bits: int | None = None
    fraction_bits: int | None = None
    new_tokens: int | None = None

    @property
    def link(self) -> Network | None:
        """The network with its own bandwidth or delay; None where nothing is said of it."""
        return link(self.network, self.bandwidth, self.rtt)

    @property
    def setting(self) -> Setting | None:
        """What is said of numbers and weights; None if nothing is. Raises UserError for what the protocol has not."""
        names = ("weights", "weight_masks", "threads", "ring_bits", "fraction_bits")
        return setting_of(self.protocol, **{name: getattr(self, name) for name in names})

    @property
    def pricer(self) -> Pricer:
        """Raises UserError for what the protocol cannot take."""
        return load_pricer(self.protocol, self.link, self.testbed, self.setting)


@dataclass(frozen=True, kw_only=True)
class PriceOptions(ModelOptions, PricingOptions):
    """The options of `price` and of the commands: those of `PricingOptions` and of `ModelOptions`."""


def price(model: Model, **options: Any) -> PricedModel:
    """Prices a model: in total, by layer and by op, embedding and vocabulary projection included.

    Priced as it is written; `.deployed` is what folding leaves of it. Everything is in seconds and bytes.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder, a
            checkpoint (a folder of save_pretrained, its config.json, a .gguf file, or OWNER/NAME of the Hugging Face
            hub), module:factory, an Architecture, the op graph of a prompt, or a torch module of 1 x T token ids.
        options: protocol, network and every other field of `PricingOptions` and `ModelOptions`.

    Raises UserError for a model that is none of these, an option that it or the protocol cannot take, or an op that the
    protocol has no formula for.
    """
    given = PriceOptions(context=None, **options)
    asked = asked_model(model, given)
    if given.new_tokens is not None:
        asked = asked.answering
    priced = PricedModel(asked=asked, pricer=given.pricer, new_tokens=given.new_tokens)
    assert priced.generation  # what cannot be priced is refused here
    return priced
