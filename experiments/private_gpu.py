"""Measures private answers of a model and a cheaper one under CrypTen, on a GPU: seconds, traffic, and equal tokens.

    python -m experiments run gpu --parts private --parent SmolLM2-135M-Instruct.Q4_1.gguf

The cheaper model has the weights of the given one as far as they fit, and is not trained: it costs what a trained one
does, but its text is of no worth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Literal, TypeAlias

from torch import Tensor

from costmodel.config.strict_yaml import load_mapping
from costmodel.engine.crypten_cuda import check_device
from costmodel.engine.session import on_this_machine
from costmodel.network import load_network
from costmodel.protocols.crypten import CryptenSetting
from nas.conversion.fold import fold
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import Pretrained
from nas.conversion.transfer import transferred
from nas.conversion.verified_fold import check_tokens, fold_as_far_as
from nas.corpus.tokenizer import given_encoder
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights, load_deployed
from nas.private.answer import answer
from nas.private.in_range import in_range
from nas.private.model import PrivateModel
from nas.private.prompt import Prompt
from nas.private.setup import Setup
from search_spaces.architecture import Architecture
from search_spaces.notation import parse

PROMPT = Path(__file__).parent / "configs" / "smollm2.yaml"
PROMPT_TOKENS, NEW_TOKENS = 128, 8
CHEAPER = (  # at 3.1 % more perplexity than SmolLM2-135M, docs/llama.md
    "1xMBMQo-1xMSMQo-1xMSMWo-2xMBMQo-3xMPMQo-1xMBMQo-2xMPMQo-1xMPMWo-6xMPMQo-1xMBMQo-1xMPMQo-1xMSMQo-1xMPMQo-1xMBMQo-"
    "1xMSMQo-2xMBMQo-1xMSMQo-1xMBMQo-2xMPMWo"
)
CHEAPER_LAYERS = 30

Device: TypeAlias = Literal["cpu", "cuda"]
Row: TypeAlias = tuple[str, float, str]  # name, value and unit


def figures(
    parent: str,
    placement: str | None,
    device: Device,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
) -> Iterator[Row]:
    """Yield what answers of the parent and of a model of that placement cost. Raises UserError as `nas.private`."""
    check_device(device)
    source = load_parent(parent).model
    made = source.architecture, source.weights
    if not source.architecture.folded:  # nas.private checks longer, which takes half a minute of a small machine
        _, tokens = check_tokens(None, source.architecture.vocab_size, PROMPT_TOKENS)
        made = fold_as_far_as(*made, tokens[:1]).folded[:2]
    setting, network = CryptenSetting(device=device), load_network("loopback")
    setup = Setup(protocol="crypten", setting=setting, network=network, model=_model(source, *made))
    setup = in_range(setup, None, is_allowed=False)
    yield "fraction", setup.setting.fraction_bits, "bits"
    yield from _answered("parent", setup, prompt_tokens, new_tokens, is_trained=True)
    if placement is not None:
        architecture = parse(placement, source.architecture).architecture
        member = Decoder(architecture)
        load_deployed(member, transferred(source.architecture, source.weights, architecture))
        setup = replace(setup, model=_model(source, *fold(architecture, deployed_weights(member))[:2]))
        yield from _answered("member", setup, prompt_tokens, new_tokens, is_trained=False)


def _model(source: Pretrained, architecture: Architecture, weights: Mapping[str, Tensor]) -> PrivateModel:
    assert source.tokenizer is not None
    arrays = {name: value.double().numpy() for name, value in weights.items()}
    return PrivateModel(name="", architecture=architecture, weights=arrays, tokenizer=source.tokenizer, corpus=None)


def _answered(name: str, setup: Setup, prompt_tokens: int, new_tokens: int, *, is_trained: bool) -> Iterator[Row]:
    """Yield what an answer costs; and of a trained model, how it agrees with the one in the clear."""
    encoder = given_encoder(setup.model.tokenizer, None, None)
    text = str(load_mapping(PROMPT)["prompt"])
    most = min(prompt_tokens, setup.model.architecture.context - new_tokens)
    ids = tuple(encoder.tokenizer.encode(text, add_special_tokens=False).ids[:most])
    prompt = Prompt(text=text, ids=ids, encoder=encoder)
    done = answer(setup, prompt, new_tokens, on_this_machine, lambda ready: None, lambda token, expected: None)
    costs = [token.cost for token, _ in done.tokens]
    first, *later = costs
    yield f"{name}, prompt of {len(ids)}", first.seconds, "s"
    yield f"{name}, prompt of {len(ids)}", first.sent_bytes, "B"
    if later:
        yield f"{name}, a token after it", mean(cost.seconds for cost in later), "s"
        yield f"{name}, a token after it", mean(cost.sent_bytes for cost in later), "B"
    yield f"{name}, meeting and sharing weights", done.ready.seconds, "s"
    sent, expected = sum(cost.sent_bytes for cost in costs), sum(wanted.sent_bytes for _, wanted in done.tokens)
    yield f"{name}, sent over predicted", sent / expected, ""
    yield f"{name}, messages", sum(cost.messages for cost in costs), ""
    peaks = [peak for cost in costs for peak in cost.peak_bytes if peak is not None]
    yield f"{name}, memory of a party", max(peaks, default=0), "B"
    if is_trained and (agreement := done.agreement) is not None:
        yield f"{name}, tokens of {agreement.num_positions} equal to the clear", agreement.num_equal, ""
        yield f"{name}, largest error of a logit", agreement.largest_error, ""
