"""Defaults that the descriptions of flags state in words are those of the code."""

import inspect

import pytest

from costmodel.network import link
from costmodel.pricing.model_spec import ModelOptions
from costmodel.pricing.price import PricingOptions
from costmodel.protocols import SETTINGS
from nas.private import setup
from nas.run.config import PROXY_EVALS, StudyConfig
from nas.study.schedule import GENERATION_SIZE
from nas.train import BASE, TrainConfig
from search_spaces.budget.options import BudgetOptions

ENGINE, SIGMA, CRYPTEN = (SETTINGS[name]() for name in ("semi2k", "sigma", "crypten"))
LAN = link(None, None, "1ms")
OF_RING = [setup.FRACTION_BITS[bits] for bits in (64, 32, 128)]


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (StudyConfig, f"The default is {GENERATION_SIZE}, or half of what the cores"),
        (StudyConfig, f"by default {PROXY_EVALS} for each final training"),
        (TrainConfig, f"else {BASE}."),
        (BudgetOptions, f"{LAN.name.partition(' ')[0]} (the default)"),
        (PricingOptions, f"{LAN.name.partition(' ')[0]} (the default)"),
        (PricingOptions, f"as many (default {ENGINE.threads})"),
        (PricingOptions, f"bits of a number (default {ENGINE.ring_bits}; sigma {SIGMA.ring_bits})"),
        (
            PricingOptions,
            f"(default {ENGINE.fraction_bits}; sigma {SIGMA.fraction_bits}; crypten {CRYPTEN.fraction_bits})",
        ),
        (ModelOptions, f"tokens of the prompt (default {BudgetOptions.__dataclass_fields__['seq_len'].default}"),
        (setup.resolve_setup, "by default {} in a ring of 64 bits, {} in 32, {} in 128".format(*OF_RING)),
        (setup.resolve_setup, f"or at most {CRYPTEN.fraction_bits} under crypten"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_default_in_words_is_that_of_the_code(described, words):
    assert words in " ".join((inspect.getdoc(described) or "").split())
