"""Norms that are frozen: live, seen, constant, deployed."""

from typing import Literal, TypeVar

import pytest
import torch
from torch import Tensor, nn

from nas.model.decoder import Decoder, build
from nas.model.norms import MEMORY, FrozenNorm, followed_deviations, frozen_norms, norm_of
from nas.model.weights import deployed_weights, load_deployed, load_stored, stored_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.forms import Norm
from search_spaces.notation import parse
from tests.small_models import GPT2

Drawn = TypeVar("Drawn", bound=nn.Module)
FROZEN: dict[Norm, Norm] = {"layernorm": "frozen-layernorm", "rmsnorm": "frozen-rmsnorm"}
EIGHT_WIDE, EPSILON = base_architecture("tiny", Dimensions(d_model=8)), 1e-5
STREAM = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))


def drawn(module: Drawn) -> Drawn:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def decoder(name: str = "SM+fLN+R") -> Decoder:
    return drawn(build(parse(name, GPT2).architecture, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_until_it_is_frozen_it_is_the_norm_it_stands_for(kind: Literal["layernorm", "rmsnorm"]) -> None:
    frozen, live = (drawn(norm_of(norm, EIGHT_WIDE)) for norm in (FROZEN[kind], kind))
    torch.testing.assert_close(frozen(STREAM), live(STREAM))


@pytest.mark.parametrize("centred", [True, False])
def test_once_frozen_it_divides_every_position_by_the_running_mean(centred: bool) -> None:
    norm = drawn(FrozenNorm(8, EPSILON, centred=centred))
    norm(STREAM)
    norm.follow()
    norm.set_frozen()
    from_centre = STREAM - STREAM.mean(dim=-1, keepdim=True) if centred else STREAM
    sigma = from_centre[:, 1:].square().mean(dim=-1).sqrt().mean()  # position 0 does not count
    bias = norm.bias if centred else 0.0
    torch.testing.assert_close(norm(STREAM), norm.weight * from_centre / sigma + bias)
    norm(7 * STREAM)
    norm.follow()
    torch.testing.assert_close(norm.deviation, sigma)  # constant from now on


def test_the_running_mean_forgets_and_a_validation_moves_nothing() -> None:
    norm = FrozenNorm(8, EPSILON, centred=True)
    norm(STREAM)
    norm.follow()
    first = norm.deviation
    with torch.no_grad():
        norm(5 * STREAM)
    norm.follow()
    assert torch.equal(norm.deviation, first)
    for part in (4 * STREAM, 6 * STREAM):  # two passes of one step
        norm(part)
    norm.follow()
    torch.testing.assert_close(norm.deviation, MEMORY * first + (1 - MEMORY) * 5 * first)


def test_a_single_position_is_seen_too() -> None:
    norm = FrozenNorm(8, EPSILON, centred=True)
    norm(STREAM[:, :1])
    norm.follow()
    assert norm.deviation != 1


def frozen_decoder() -> Decoder:
    model = decoder()
    model(TOKENS)
    followed_deviations(model)
    for norm in frozen_norms(model).values():
        norm.set_frozen()
    return model


def test_norms_are_listed_in_order_of_execution() -> None:
    assert list(frozen_norms(decoder("1xlSLRo-1xlSmRo-l"))) == [
        "layers.0.norm1",
        "layers.1.norm1",
        "layers.1.norm2",
        "final_norm",
    ]


def test_deployed_gains_have_taken_up_the_constant_and_load_back() -> None:
    model = frozen_decoder()
    weights = deployed_weights(model)
    norm = model.layers[0].norm1
    assert isinstance(norm, FrozenNorm)
    torch.testing.assert_close(weights["layers.0.norm1.weight"], norm.weight / norm.sigma)
    assert not [name for name in weights if name.endswith(("sigma", "frozen"))]
    again = decoder()
    load_deployed(again, weights)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    for name, value in deployed_weights(again).items():
        assert torch.equal(value, weights[name]), name


def test_a_gain_can_be_loaded_without_freezing() -> None:
    source, model = decoder("SM+LN+R"), decoder()
    live = {f"{name}.frozen": torch.zeros(()) for name in frozen_norms(model)}
    load_deployed(model, deployed_weights(source) | live)
    torch.testing.assert_close(model(TOKENS).logits, source(TOKENS).logits)


def test_files_keep_the_state() -> None:
    model = frozen_decoder()
    model.layers[1].norm2.set_frozen(False)
    again = decoder()
    load_stored(again, {name: value.clone() for name, value in stored_weights(model).items()})
    states: list[list[bool]] = [[norm.is_frozen for norm in frozen_norms(net).values()] for net in (model, again)]
    assert states[0] == states[1] == [True, True, True, False, True]
    logits: list[Tensor] = [net(TOKENS).logits for net in (model, again)]
    assert torch.equal(*logits)
