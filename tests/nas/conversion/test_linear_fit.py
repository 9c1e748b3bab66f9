from dataclasses import replace

import pytest
import torch

from nas.conversion.linear_fit import fitted_linears
from nas.conversion.transfer import FARTHEST_VERTEX, gate_of, transferred
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights, load_deployed
from nas.recipe.distillation import Part, fitted_parts
from search_spaces.architecture import Architecture
from search_spaces.notation import parse
from tests.small_models import GPT2, LLAMA

TOKENS = torch.randint(40, (32, 16), generator=torch.Generator().manual_seed(1))


def parent_and_student(base: Architecture, theirs: str, ours: str, queries: float = 1.0) -> tuple[Decoder, Decoder]:
    """queries: how much longer than at the start those of the parent are."""
    parent = build(parse(theirs, base).architecture, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in parent.named_parameters():
            parameter.mul_(3.0 if "ffn" in name else 1.0)
            parameter.mul_(queries if name.endswith((".q.weight", ".qkv.weight")) else 1.0)
            parameter.add_(0.1 if name.endswith("bias") else 0.0)
    student = Decoder(parse(ours, base).architecture)
    load_deployed(student, transferred(parent.architecture, deployed_weights(parent), student.architecture))
    return parent, student


def error(parent: Decoder, student: Decoder) -> float:
    with torch.no_grad():
        return float((student(TOKENS).logits - parent(TOKENS).logits).square().mean())


def fit(parent: Decoder, student: Decoder) -> list[Part]:
    parts = fitted_parts(student.architecture, parent.architecture)
    load_deployed(student, fitted_linears(parent, student, parts, TOKENS))
    return parts


@pytest.mark.parametrize(
    ("base", "theirs", "ours", "fitted"),
    [
        (LLAMA, "SM+RMS+SwiGLU", "2xMSMBo", [Part(0, "ffn"), Part(1, "ffn")]),
        (LLAMA, "SM+RMS+ReGLU", "1xMSMVo-1xMSMBo", [Part(1, "ffn")]),
        (LLAMA, "SM+RMS+SwiGLU", "1xMSMBo-1xMSMFo", [Part(0, "ffn"), Part(1, "ffn")]),
        (LLAMA, "SM+RMS+SwiGLU", "1xMSMWo-1xMSMQo", [Part(1, "ffn")]),
        (LLAMA, "SM+RMS+GeGLU", "1xMSMAo-1xMSMQo", [Part(1, "ffn")]),
        (replace(GPT2, block="opt"), "SM+LN+R", "1xLSLRo-1xLSLXo", [Part(1, "ffn")]),
        (GPT2, "SM+LN+G", "2xLSLQo", [Part(0, "ffn"), Part(1, "ffn")]),
        (GPT2, "SM+LN+G", "1xLSLGo-1xLSLXo", [Part(1, "ffn")]),
        (GPT2, "SM+LN+G", "2xLSLBo", [Part(0, "ffn"), Part(1, "ffn")]),
        (LLAMA, "SM+RMS+SwiGLU", "2xMPMWo", [Part(0, "attention"), Part(1, "attention")]),
        (GPT2, "SM+LN+G", "2xLPLGo", [Part(0, "attention"), Part(1, "attention")]),
    ],
)
def test_a_fit_is_nearer_to_the_parent_than_the_start(base, theirs: str, ours: str, fitted: list[Part]) -> None:
    parent, student = parent_and_student(base, theirs, ours, queries=12.0 if "P" in ours else 1.0)
    before = error(parent, student)
    assert fit(parent, student) == fitted
    assert error(parent, student) < 0.75 * before


def test_a_square_without_a_gate_is_not_fitted_to_a_gated_ffn() -> None:
    gated, square = (parse(name, LLAMA).architecture for name in ("SM+RMS+SwiGLU", "1xMSMXo-1xMSMQo"))
    assert fitted_parts(square, gated) == [Part(1, "ffn")]


def test_squared_gates_are_nearer_to_swiglu_than_linear_ones() -> None:
    errors = []
    for ours in ("2xMSMQo", "2xMSMBo"):
        parent, student = parent_and_student(LLAMA, "SM+RMS+SwiGLU", ours)
        fit(parent, student)
        errors.append(error(parent, student))
    assert errors[0] < 0.1 * errors[1]


@pytest.mark.parametrize("square", [0.2, -0.2, 1e-9, 0.0])
@pytest.mark.parametrize("slope", [0.5, -0.5])
def test_a_squared_gate_is_the_polynomial_as_far_as_that_has_roots(square: float, slope: float) -> None:
    wanted = torch.tensor([[0.1, -0.3, 0.0, 5.0], [slope] * 4, [square] * 4], dtype=torch.float64)
    root, shift, scale = gate_of(tuple(wanted))
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    made = scale * ((root * x + shift).square() - 1)
    near = 1e-9 if abs(square) > 0.1 else abs(slope) * 4 / (2 * FARTHEST_VERTEX)
    has_roots = slope**2 > 4 * square * wanted[0]
    errors = (made - (wanted[0] + slope * x + square * x.square())).abs().amax(dim=0)
    assert (errors[has_roots] <= near + 1e-9).all()
    assert made.isfinite().all()
    # of a channel that is always 0
    assert all(value.isfinite().all() for value in gate_of(tuple(torch.zeros(3, 2, dtype=torch.float64))))


def test_a_square_is_a_bilinear_ffn_to_the_last_digit() -> None:
    """u * u is (1 u + 0) u."""
    parent, student = parent_and_student(GPT2, "SM+LN+SQ", "2xLSLBo")
    fit(parent, student)
    assert error(parent, student) < 1e-4 * error(student, Decoder(student.architecture))
