import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from costmodel.cost import total_price
from costmodel.deployment.deploy import Deployment, generation
from costmodel.estimate import estimate, estimate_generation
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.conftest import refused

BASE = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=50, context=16))
MODEL = parse("SM(t)+LN+R", BASE).architecture
LAST, DECODE = Deployment(projection="last"), Deployment(phase="decode")
PROMPT, NEW = 5, 4
RUNS = [lower(MODEL, PROMPT, LAST), *(lower(MODEL, PROMPT + step, DECODE) for step in range(1, NEW))]
SMALL = ("SM+LN+R", "--base=tiny", "--seq-len=6")


def generated(deployment):
    whole = partial(lower, MODEL)
    return generation(whole, prompt_len=PROMPT, new_tokens=NEW, deployment=deployment, context=16)


def test_the_prompt_is_followed_by_decoded_tokens():
    assert generated(LAST) == RUNS
    needed = replace(LAST, rows="needed", embedding="lookup", query_block=2)
    assert generated(needed)[1:] == [
        lower(MODEL, PROMPT + step, replace(DECODE, embedding="lookup")) for step in range(1, NEW)
    ]


@pytest.mark.parametrize("protocol", ["published", "semi2k", "aby3", "cheetah"])
def test_the_sum_is_that_of_separate_estimates(protocol):
    pricer = load_pricer(protocol)
    apart = [estimate(run, pricer).total for run in RUNS]
    generation_estimate = estimate_generation(RUNS, pricer)
    assert generation_estimate.by_token == tuple(apart)
    assert generation_estimate.whole.total == total_price(apart)
    assert total_price(price for _, price in generation_estimate.whole.by_op) == total_price(apart)
    decoded = [node for node, _ in generation_estimate.whole.by_op if node.name.endswith("@decode")]
    assert [node.op for node in decoded] == [node.op for node in RUNS[-1]]
    assert generation_estimate.whole.latency_s_range is not None
    low_s, high_s = generation_estimate.whole.latency_s_range
    assert low_s <= generation_estimate.whole.total.latency_s <= high_s


def test_masks_that_are_kept_are_opened_in_the_first_run():
    fresh, kept = (load_pricer("semi2k", setting=EngineSetting(weight_masks=masks)) for masks in ("fresh", "kept"))
    first, *later = RUNS
    apart = [estimate(first, fresh), *(estimate(run, kept) for run in later)]
    generation_estimate = estimate_generation(RUNS, kept)
    assert generation_estimate.by_token == tuple(part.total for part in apart)
    assert (
        generation_estimate.whole.total
        == total_price(generation_estimate.by_token)
        == total_price(price for _, price in generation_estimate.whole.by_op)
    )
    ranges = np.array([part.latency_s_range for part in apart])
    assert generation_estimate.whole.latency_s_range == pytest.approx(ranges.sum(axis=0))
    num_weights = 12 * 16 * 16 + 2 * 50 * 16
    saved = estimate_generation(RUNS, fresh).whole.total.sent_bytes - generation_estimate.whole.total.sent_bytes
    assert saved == (NEW - 1) * 2 * 8 * num_weights


def estimated(run, *args):
    code, out, err = run("estimate", *args)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_tables_and_csv_have_the_tokens(run, snapshot, form):
    snapshot(
        f"tokens-{form}",
        estimated(run, *SMALL, "--protocol=semi2k", "--new-tokens=12", "--egress-price=1", f"--format={form}"),
    )


def test_a_traced_model_generates_at_the_price_of_its_name(run, tmp_path, monkeypatch):
    """Its position table is its context."""
    (tmp_path / "a_decoder.py").write_text(
        "from nas.model.decoder import Decoder\n"
        "from search_spaces.bases import Dimensions, base_architecture\n"
        "from search_spaces.notation import parse\n"
        "def make():\n"
        "    base = base_architecture('tiny', Dimensions(context=9))\n"
        "    return Decoder(parse('SM+LN+R', base).architecture)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--protocol=semi2k", "--seq-len=6", "--format=json")
    traced = json.loads(estimated(run, "a_decoder:make", *flags, "--new-tokens=4"))
    named = json.loads(estimated(run, "SM+LN+R", "--base=tiny", *flags, "--new-tokens=4"))
    assert traced["total"] == named["total"]
    said = refused(run("estimate", "a_decoder:make", *flags, "--new-tokens=5"))
    assert "longer than the model's context, but got 10 tokens, context=9" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--new-tokens=0"], "--new-tokens must be at least 1, but got 0"),
        (["--new-tokens=1", "--phase=decode"], "--new-tokens counts from the whole prompt, so it does not go"),
        (["--new-tokens=124"], "must fit the context of 128 tokens, but got a prompt of 6 and 124 new tokens; shorten"),
    ],
)
def test_what_cannot_be_generated_is_refused(run, flags, message):
    assert message in refused(run("estimate", *SMALL, "--protocol=semi2k", *flags))
    assert run("estimate", *SMALL, "--protocol=semi2k", "--new-tokens=123")[0] == 0
