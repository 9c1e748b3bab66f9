"""A model whose numbers an engine's fixed point does not hold is refused with op and value, and nothing runs."""

import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from costmodel.config.files import dump
from costmodel.engine import spu
from costmodel.errors import OutOfRangeError
from costmodel.execution import interpreter
from costmodel.execution.engine_arithmetic import arithmetic_of
from costmodel.protocols.crypten import CryptenSetting
from costmodel.protocols.primitives import EngineSetting
from nas.conversion.fixed_point_check import MAX_ERROR, Both, both, check_sequences, fitting, recorded, require_accuracy
from nas.conversion.fold import fold
from nas.conversion.pretrained import Pretrained, read_export, write_pretrained
from nas.conversion.verified_fold import check_tokens, fold_as_far_as, why_not_equal
from nas.model.weights import deployed_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.nas.model.test_op_graph import QWEN2, drawn
from tests.small_models import GPT2, LLAMA, PYTHIA

PROMPT = np.array([3, 7, 1, 22, 9, 7, 30, 11])
PLAIN, GATED = "SM+LN+G", "SM+RMS+SwiGLU"
SETTINGS: dict[str, EngineSetting] = {"semi2k": EngineSetting(), "crypten": CryptenSetting()}

Change = Callable[[Any], Any]


def times(factor: float) -> Change:
    return lambda weight: weight * factor


def plus(number: float) -> Change:
    return lambda weight: weight + number


def only(rows: slice, factor: float) -> Change:
    def changed(weight: Any) -> Any:
        weight = weight.copy()
        weight[rows] *= factor
        return weight

    return changed


def queries_and_keys(factor: float) -> Change:
    return lambda weight: only(slice(0, len(weight) * 2 // 3), factor)(weight)


QKV, ONE = r"attention.*(qkv|packed|projection|queries|keys|q|k)\.weight$", only(slice(7, 8), 1e4)
# base, notation, weights to change, change, whether it is folded then, and what is refused under semi2k (None: nothing)
MODELS: list[tuple[Any, str, str, Change, bool, str | None]] = [
    (GPT2, PLAIN, "", times(1), False, None),
    (PYTHIA, PLAIN, "", times(1), False, None),
    (QWEN2, GATED, "", times(1), False, None),
    (GPT2, "2xLHLVo", "", times(1), False, None),
    (GPT2, "2xLSLEo", "up.weight", times(30), False, None),
    (GPT2, "SM+ScFuFFN", "", times(1), True, None),
    (LLAMA, GATED, "norm.*weight", times(30), False, "exponentials"),
    (LLAMA, GATED, "ffn.down.weight", times(30), False, None),
    (GPT2, PLAIN, "ffn.down.weight", times(1e5), False, r"layers.1.norm1 products|final_norm products"),
    (LLAMA, GATED, "ffn.down.weight", times(1e5), False, "products"),
    (GPT2, PLAIN, "embed.weight", times(1e4), False, "embed|norm1"),
    (LLAMA, GATED, "embed.weight", times(1e4), False, "norm1 products"),
    (GPT2, PLAIN, "embed.weight", ONE, False, "norm1 products"),
    (LLAMA, GATED, "embed.weight", ONE, False, "norm1 products"),
    (GPT2, PLAIN, "embed.weight|position.weight", times(1e-2), False, None),
    (LLAMA, GATED, "embed.weight", times(1e-2), False, None),
    (GPT2, PLAIN, "embed.weight|position.weight", times(1e-4), False, "results of a sequence would be wrong"),
    (LLAMA, GATED, "embed.weight", times(1e-4), False, "results of a sequence would be wrong"),
    (LLAMA, GATED, "norm.*weight", times(1e-5), False, "logits are off"),
    (GPT2, PLAIN, "norm.*weight", times(3e3), True, "exponentials|products"),
    (LLAMA, GATED, "norm.*weight", times(3e3), True, "exponentials|products"),
    (LLAMA, GATED, "norm.*weight", times(1e-6), True, "logits are off"),
    (PYTHIA, PLAIN, "bias", plus(1e4), False, "scores products|norm"),
    (GPT2, PLAIN, "logits.weight", times(1e-5), False, "logits are off"),
    (GPT2, PLAIN, "logits.weight", times(1e7), False, "logits products"),
    (LLAMA, "2xMPMQo", "attention", times(30), False, "softmax"),
    (LLAMA, "2xMBMQo", "attention", times(30), False, "exponentials|products"),
    (GPT2, "1xLBLXo-1xLSLXo", "up.weight", times(3e3), False, "products"),
    (GPT2, "2xLSLRo", "up.weight", times(1e6), False, "products"),
    (GPT2, "HH(SM(t)+G)", "up.weight", times(1e5), False, "products"),
    *((base, name, QKV, queries_and_keys(200), False, r"layers.0.attention.softmax arguments of exponentials")
      for base, name in ((GPT2, PLAIN), (PYTHIA, PLAIN), (QWEN2, GATED))),
]  # fmt: skip


def made(base, name, changed, change, is_folded):
    """Return architecture and weights of a model."""
    architecture = parse(name, base).architecture
    weights = {key: value.detach().double().numpy() for key, value in deployed_weights(drawn(architecture)).items()}
    weights.setdefault("logits.weight", weights["embed.weight"].copy())
    names = [key for key in weights if changed and re.search(changed, key)]
    assert names or not changed
    weights |= {key: change(weights[key]) for key in names}
    if is_folded:
        folded = fold(architecture, {key: torch.from_numpy(value).float() for key, value in weights.items()})
        return folded.architecture, {key: value.double().numpy() for key, value in folded.weights.items()}
    return architecture, weights


def refusal(protocol, architecture, weights, length=None):
    """Return why a model or PROMPT is refused, and the setting otherwise."""
    try:
        sequences = check_sequences(weights["embed.weight"], None, length or architecture.context)
        setting = fitting(protocol, SETTINGS[protocol], partial(lower, architecture), weights, sequences)
        graph = lower(architecture, len(PROMPT))
        require_accuracy(both(graph, weights, {"tokens": PROMPT}, arithmetic_of(protocol, setting)))
    except OutOfRangeError as error:
        return str(error), None
    return None, setting


@pytest.mark.parametrize(("factor", "bits"), [(1, 16), (1e6, 15), (4e6, 14)])
def test_crypten_keeps_as_many_bits_as_loud_logits_allow(factor, bits):
    architecture, weights = made(GPT2, PLAIN, "logits.weight", times(factor), False)
    _, setting = refusal("crypten", architecture, weights)
    assert setting.fraction_bits == bits
    sequences = check_sequences(weights["embed.weight"], None, architecture.context)
    fits = partial(fitting, "crypten", CryptenSetting(), partial(lower, architecture), weights, sequences)
    assert fits(fraction_bits=bits).fraction_bits == bits
    if bits < 16:
        with pytest.raises(OutOfRangeError, match=r"with 16 fraction bits, .* would be wrong, most in logits: numbers"):
            fits(fraction_bits=16)


def test_positions_beyond_the_sequences_of_a_check_are_tried():
    base = base_architecture("tiny", Dimensions(vocab=40, context=160))
    architecture, weights = made(base, PLAIN, "position.weight", only(slice(150, 151), 1e4), False)
    found, _ = refusal("semi2k", architecture, weights, length=128)
    assert re.search("norm1 products", found)


def test_most_positions_must_be_right_in_their_own_measure():
    exact = np.repeat([[100.0, 0.0], [1.0, 0.0]], (36, 4), axis=0)
    fixed = exact + np.array([0.0, 0.5])
    require_accuracy(Both(exact, fixed, "logits"))
    with pytest.raises(OutOfRangeError, match=r"logits are off by 0.005 of the largest .* 88% of the positions"):
        require_accuracy(Both(exact[6:], fixed[6:], "logits"))


def test_a_fold_is_checked_in_the_fixed_point_of_its_protocol():
    """Scores 300 apart hold under SPU, and not under CrypTen, whose exponential is 1 again at -256."""
    architecture, weights = made(GPT2, PLAIN, QKV, queries_and_keys(6.5), False)
    tensors = {key: torch.from_numpy(value).float() for key, value in weights.items()}
    _, tokens = check_tokens(None, architecture.vocab_size, architecture.context)
    fits = {
        name: not fold_as_far_as(architecture, tensors, tokens[:4], name).check.outside for name in (*SETTINGS, "sigma")
    }
    assert fits == {"semi2k": True, "crypten": False, "sigma": True}


@pytest.mark.parametrize(("base", "name", "changed", "change", "is_folded", "why"), MODELS)
def test_large_and_small_numbers_are_refused_with_op_and_value(base, name, changed, change, is_folded, why):
    found, _ = refusal("semi2k", *made(base, name, changed, change, is_folded))
    assert (found is None) == (why is None), found
    assert why is None or re.search(why, found), found


@pytest.mark.slow
@pytest.mark.needs_engine
@pytest.mark.needs_crypten
@pytest.mark.parametrize(
    ("protocol", "base", "name", "changed", "change", "is_folded"),
    [(protocol, *model) for protocol in SETTINGS for *model, why in MODELS if protocol != "semi2k" or why is None],
)
def test_what_is_accepted_is_right_under_the_engine(protocol, base, name, changed, change, is_folded):
    architecture, weights = made(base, name, changed, change, is_folded)
    found, setting = refusal(protocol, architecture, weights)
    if found is not None:
        return
    graph = lower(architecture, len(PROMPT))
    clear = interpreter.execute(graph, weights, PROMPT)
    logits = spu.run(graph, weights, PROMPT, protocol=protocol, setting=setting).logits
    assert np.abs(logits - clear).max() < MAX_ERROR * np.abs(clear).max()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, tokenizer):
    """`hostile(name, changed, change)`: an export, folded or not, of which some weights are changed."""

    def written(name: str, changed: str, change: Change, with_record: bool = False, is_folded: bool = True):
        base = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=280, context=24))
        architecture, weights = made(base, name, changed, change, is_folded)
        folder = tmp_path_factory.mktemp("hostile")
        tensors = {key: torch.from_numpy(value).float() for key, value in weights.items()}
        write_pretrained(Pretrained(architecture, tensors, tokenizer), folder)
        if with_record:
            (folder / "export.yaml").write_text(dump({"fixed_point": recorded(architecture, weights, None)}))
        return folder

    return written


REFUSED = (
    r"error: the model must hold in the fixed point of protocol semi2k, but with 18 fraction bits, in \S+ .*; choose"
)


@pytest.mark.needs_engine
@pytest.mark.parametrize("flags", [("--prompt", "v"), ("--party", "1", "--peers", "127.0.0.1:9,127.0.0.1:11")])
def test_a_party_with_weights_refuses_before_it_starts(run, hostile, flags):
    code, out, err = run(str(hostile("SM+LN+R", "qkv.weight", queries_and_keys(200))), *flags)
    assert (code, out) == (2, "")
    assert re.match(REFUSED, err)
    assert len(err.splitlines()) == 1


@pytest.mark.needs_engine
def test_a_model_that_folding_changes_too_is_refused_with_op_and_value(run, hostile):
    """Rounding decides where scores are far apart, so that the folded model differs; the scores are the reason."""
    folder = hostile("SM+LN+G", "qkv.weight", queries_and_keys(200), is_folded=False)
    _, tokens = check_tokens(None, 280, 24)
    export = read_export(folder)
    assert why_not_equal(**asdict(fold_as_far_as(export.architecture, export.weights, tokens).check))
    code, out, err = run(str(folder), "--prompt", "v")
    assert (code, out) == (2, "")
    assert re.match(REFUSED, err)
    assert len(err.splitlines()) == 1


@pytest.mark.needs_engine
def test_a_client_without_weights_reads_what_the_export_records(run, hostile, tmp_path):
    folder = hostile("SM+LN+R", "qkv.weight", queries_and_keys(200), with_record=True)
    (folder / "weights.safetensors").unlink()
    code, _, err = run(str(folder), "--prompt", "v", "--party", "0", "--peers", "127.0.0.1:9,127.0.0.1:11")
    assert code == 2
    assert re.match(REFUSED, err)


@pytest.mark.needs_engine
def test_a_prompt_is_checked_by_a_client_with_weights(run, hostile, monkeypatch):
    monkeypatch.setattr("nas.private.setup.fitting", lambda protocol, setting, *of, **settings: setting)
    code, _, err = run(str(hostile("SM+LN+R", "embed.weight", times(1e5))), "--prompt", "v")
    assert code == 2
    assert re.match(r"error: the prompt must hold in the fixed point of protocol semi2k, but in layers.0.norm1 .*", err)


@pytest.mark.needs_engine
def test_what_is_out_of_range_runs_for_study_and_says_so(run, hostile):
    folder = hostile("SM+LN+R", "qkv.weight", queries_and_keys(200))
    code, out, err = run(str(folder), "--prompt", "value_1 =", "--new-tokens", "2", "--allow-out-of-range", "true")
    rows = [line for line in out.splitlines() if line.endswith("  out of range")]
    assert len(rows) == 2
    assert "out of range, do not rely on it: with 18 fraction bits, in layers.0.attention.softmax arguments of" in out
    assert code == 1
    assert re.match(r"error: private (tokens|logits) must be .*; do not rely on this answer.", err)
