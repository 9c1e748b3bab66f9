from collections.abc import Callable

import numpy as np
import pytest

from costmodel import ops
from costmodel.engine import compare, spu
from costmodel.engine.party import OpCost
from costmodel.engine.session import StepRun
from costmodel.engine.spu import MeasuredRounds, graph_job, ops_job, parse_delays
from costmodel.errors import StoppedError
from costmodel.protocols.cheetah_preprocessing import BATCH_MESSAGES
from costmodel.protocols.primitives import EngineSetting

RELU_TOLERANCE = 0.25  # of 8 rounds, over a fraction of a second on a busy machine; half or twice as many would show
# of a decoder. Cheetah's waits depend on which pass makes its triples, which the prediction leaves out.
TOLERANCES = {"semi2k": 0.05, "aby3": 0.05, "cheetah": 0.08}


def job(protocol: str = "semi2k"):
    return ops_job([ops.Relu(rows=4, features=4)], protocol=protocol, setting=EngineSetting())


@pytest.fixture
def rounds_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MeasuredRounds]:
    """Rounds of passes of two ops that take so long, by delay and pass; the first has so many messages, by pass."""

    def measure(delays_s, seconds, messages=lambda index: 16) -> MeasuredRounds:
        def passes(job, link, delays_s):
            done = []
            for index, delay_s in enumerate(delays_s):
                first_s, second_s = seconds(delay_s, index)
                costs = (
                    OpCost(1, messages(index), 0.0, first_s, None),
                    OpCost(1, 0, first_s, first_s + second_s, None),
                )
                done.append(StepRun(by_party=(costs,), seconds=first_s + second_s, logits=np.zeros((1, 1))))
            return done

        monkeypatch.setattr(spu, "passes", passes)
        return spu.measured_rounds(job(), delays_s=delays_s)

    return measure


def test_the_slope_of_the_least_times_and_what_it_does_not_explain(rounds_of):
    """Passes 2, 3, 4 and 5, 6, 7 go through three delays; the first three are disturbed by 1, 2 and 3 s."""
    measured = rounds_of((0.04, 0.01, 0.02), lambda delay_s, n: (0.5 + 8 * delay_s + max(0, 5 - n), 0.25 + 2 * delay_s))
    assert measured.by_op == pytest.approx((8.0, 2.0))
    assert measured.rounds == pytest.approx(10.0)
    assert measured.residual_s == pytest.approx(0.0, abs=1e-9)
    assert [delay_s for delay_s, _ in measured.seconds] == [0.01, 0.02, 0.04]
    assert [seconds for _, seconds in measured.seconds] == pytest.approx([0.85, 0.95, 1.15])
    # seconds 0, 0, 3 at 0, 1, 2 s: the line of least squares is 1.5 x - 0.5, off by 0.5, 1 and 0.5
    measured = rounds_of((0.0, 1.0, 2.0), lambda delay_s, _: (3.0 if delay_s == 2 else 0.0, 0.0))
    assert measured.residual_s == pytest.approx(1.0)


def test_passes_that_make_oblivious_transfers_ahead_are_left_out(rounds_of):
    """Pass 2 made a batch and was fast; pass 5, at the same delay, did not."""
    delays_s, batch = (1.0, 2.0, 3.0), BATCH_MESSAGES
    measured = rounds_of(delays_s, lambda d, n: (0.0 if n == 2 else d, 0.0), lambda n: 20 + batch * (n == 2))
    assert measured.rounds == pytest.approx(1.0)
    with pytest.raises(StoppedError, match="made oblivious transfers ahead; use more repeats"):
        rounds_of(delays_s, lambda d, n: (d, 0.0), lambda n: 20 + batch * (n in (2, 5)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10ms,20ms", "at least 3 different one-way delays, but got .*0.02.* s; 10ms, 20ms and 40ms will do"),
        ("10ms,10ms,20ms", "at least 3 different one-way delays"),
        ("10,20,40", "--delays must be a positive number with a unit"),
        ("10ms,,40ms", "--delays must be a positive number with a unit"),
    ],
)
def test_bad_delays_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_delays(text)


def test_delays_are_read_in_seconds():
    assert parse_delays("10ms,20ms,0.04s") == pytest.approx((0.01, 0.02, 0.04))


@pytest.mark.needs_engine
def test_a_comparison_waits_as_often_as_predicted():
    measured = spu.measured_rounds(job(), delays_s=(0.02, 0.04, 0.08))
    assert measured.rounds == pytest.approx(8, rel=RELU_TOLERANCE)


@pytest.mark.slow
@pytest.mark.needs_engine
@pytest.mark.parametrize("protocol", list(TOLERANCES))
def test_a_decoder_waits_as_often_as_predicted(protocol, graph_of):
    graph = graph_of("SM+LN+G", seq_len=8, base="tiny", layers=1, vocab=50)
    generator = np.random.default_rng(0)
    weights, tokens = compare.drawn_weights(graph, generator), compare.drawn_tokens(graph, generator)
    predicted = compare.predict(graph, protocol, EngineSetting())
    measured = spu.measured_rounds(
        graph_job(graph, weights, tokens, protocol=protocol, setting=EngineSetting()), delays_s=(0.02, 0.04, 0.08)
    )
    assert measured.rounds == pytest.approx(sum(comm.rounds for comm in predicted), rel=TOLERANCES[protocol])
