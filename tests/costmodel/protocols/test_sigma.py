from dataclasses import replace
from typing import Any

import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment, deploy
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols import load_pricer, setting_of
from costmodel.protocols.primitives import NOTHING, total_comm
from costmodel.protocols.sigma import CACHED, class_of
from costmodel.protocols.sigma_primitives import SigmaSetting, comparison_key, inverse_root
from costmodel.protocols.sigma_programs import comm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.protocols.sigma_rows import sigma_rows

N, F = 50, 12
SETTING = SigmaSetting()
ROWS = sigma_rows()
LOGS = [row for row in ROWS if "sent_bytes" in row.numbers]
ROW: Any = {"rows": 64, "features": 64}
ELEMENTS = 64 * 64
SQUARE: dict[str, Any] = {"heads": 2, "queries": 128, "keys": 128}


def row_named(name: str):
    return next(row for row in ROWS if row.name == name)


@pytest.mark.parametrize("row", LOGS, ids=lambda row: row.name)
def test_bytes_and_keys_are_those_of_public_logs(row):
    assert (row.run_bytes, row.run_key_bytes) == (int(row.numbers["sent_bytes"]), int(row.numbers["key_bytes"]))
    for name in ("activation", "softmax", "norm"):
        cost = total_comm(comm(op, row.setting) for op in row.ops if class_of(op) == name)
        assert cost.online_bytes == int(row.numbers[f"{name}_bytes"])


@pytest.mark.parametrize(("seq_len", "rounds"), [(64, 92), (128, 94), (256, 96)])
def test_rounds_are_as_counted_in_public_and_those_of_roots_on_the_cpu(seq_len, rounds):
    small = replace(row_named("GPT-2 T=128 loopback"), seq_len=seq_len, num_layers=1)
    # four linears, scores and their product with values; GELU; softmax; on the GPU, two norms
    gpu = 6 * 5 + 7 + (2 * (seq_len.bit_length() - 1) + 16 + 5) + 2 * 11
    assert gpu == rounds
    assert small.comm.rounds == gpu + 2 * inverse_root(1, N).rounds == rounds + 2 * (5 + 3)


# bits that one party sends for an element, and rounds
PER_ELEMENT: list[tuple[Op, int, int]] = [
    (ops.Linear(rows=64, in_features=7, out_features=64, bias=True), 3 * N - F + 2, 5),
    (ops.Multiply(**ROW), 3 * N - F + 2, 5),
    (ops.Square(**ROW), 3 * N - F + 2, 5),
    (ops.Gelu(**ROW, form="exact"), 3 * N - 2 * F + 19, 7),
    (ops.Silu(**ROW), 3 * N - 2 * F + 21, 7),
    (ops.Relu(**ROW), N + 1, 2),
    (ops.LeakyRelu(**ROW), N + 1 + 2 * N + 1, 5),
    (ops.Scale(**ROW, factor=0.3), 2 * N - F + 2, 4),
    (ops.Scale(**ROW, factor=1 / 32), 2 * N - 5 + 2, 4),
    (ops.Scale(**ROW, factor=4), 0, 0),
    (ops.ScaledAdd(**ROW), 2 * (2 * N + 1), 6),
]


@pytest.mark.parametrize(("op", "bits", "rounds"), PER_ELEMENT, ids=lambda value: getattr(value, "label", None))
def test_an_element_sends_so_many_bits_each_way(op, bits, rounds):
    cost = comm(op, SETTING)
    assert cost.online_bytes == 2 * cost.waited_bytes == 2 * bits * ELEMENTS // 8
    assert (cost.rounds, cost.messages, cost.setup_bytes) == (rounds, 2 * rounds, 0)


def test_keys_of_a_gelu_as_printed_and_of_tables_and_batches():
    """ponyyuhan/SUF_new 36d6e59, evaluation_latest.md, section 4, in a ring of 48 bits."""
    ring = SigmaSetting(ring_bits=48)
    assert comm(ops.Gelu(rows=128, features=3072, form="tanh"), ring).key_bytes == 226_246_736
    assert comm(ops.Gelu(rows=128, features=4096, form="tanh"), ring).key_bytes == 301_662_288
    silu = comm(ops.Silu(rows=128, features=11008), ring)
    assert (silu.key_bytes, silu.online_bytes + 4) == (867_078_224, 49_668_100)
    assert (comparison_key(100, 6), comparison_key(100, 8)) == (8 + 100 * 8, 24 + 100 * 16 * 3 + 16)
    batch = 24 * 2**30 // (16 * 33) // 32 * 32
    assert comparison_key(batch + 32, 38) - comparison_key(batch, 38) == 12 + comparison_key(32, 38) - 24


def test_an_op_without_a_formula_says_what_it_lacks():
    assert comm(ops.Add(**ROW), SETTING) == NOTHING
    for op in (
        ops.Tanh(**ROW),
        ops.Gelu(**ROW, form="piecewise"),
        ops.Softmax(**SQUARE, form="2quad"),
        ops.Softmax(**SQUARE, form="power8"),
        ops.TokenEmbedding(tokens=4, vocab=9, features=8, encoding="lookup"),
    ):
        with pytest.raises(UnpricedOpError, match=f"sigma has no formula for {type(op).__name__}: .*; choose protocol"):
            comm(op, SETTING)
    with pytest.raises(UserError, match="`fraction_bits` must be 12 for softmax"):
        comm(ops.Softmax(**SQUARE), SigmaSetting(fraction_bits=10))


@pytest.mark.parametrize("keys", [2, 100, 2048])
def test_a_length_that_it_cannot_run_is_told(keys):
    with pytest.raises(UserError, match=f"4 to 1024 keys, a power of two, but got {keys}; pad the prompt to"):
        comm(ops.Softmax(heads=2, queries=keys, keys=keys), SETTING)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ring_bits": 26}, "`ring_bits` must be from 27 to 64 under protocol sigma with 12 fraction bits"),
        ({"ring_bits": 65}, "but got 65"),
        ({"fraction_bits": 6}, "`fraction_bits` must be from 7 to 16"),
        ({"weights": "server"}, "`weights` must be secret under protocol sigma"),
        ({"threads": 2}, "protocol sigma takes no --threads, but got --threads 2"),
    ],
)
def test_settings_that_it_does_not_have(given, text):
    with pytest.raises(UserError, match=text):
        setting_of("sigma", **given)


def test_a_price_has_keys_in_a_column_of_their_own_and_no_set_up():
    pricer = load_pricer("sigma", "sigma-lan")
    op = ops.Linear(rows=128, in_features=768, out_features=768, bias=True)
    price, cost = pricer.price(op), comm(op, SETTING)
    assert (price.sent_bytes, price.online_bytes, price.setup_bytes) == (cost.online_bytes, cost.online_bytes, 0)
    assert price.key_bytes == cost.key_bytes > 10 * price.sent_bytes
    # each way at 9.4 Gbit/s, and five waits of half of 0.05 ms
    assert price.network_s == pytest.approx(cost.waited_bytes * 8 / 9.4e9 + 5 * 0.025e-3, abs=1e-7)
    assert load_pricer("semi2k").price(op).key_bytes is None
    ring = load_pricer("sigma", "sigma-lan", setting=SigmaSetting(ring_bits=51))
    assert ring.cost_model_id != pricer.cost_model_id != load_pricer("sigma", "sigma-wan").cost_model_id


def test_seconds_never_fall_as_work_grows_and_their_range_widens_beyond_the_fit():
    pricer = load_pricer("sigma", "loopback")
    widths = [16, 64, 768, 4096, 50_000]
    some = [ops.Linear(rows=128, in_features=768, out_features=width, bias=True) for width in widths]
    seconds = [pricer.price(op).latency_s for op in some]
    assert seconds == sorted(seconds)
    nodes = [ops.Node(name="a", layer=0, op=op, inputs=("tokens",)) for op in some]
    ranges = [pricer.latency_s_range([node]) or (0.0, 0.0) for node in nodes]
    spans = [(high - low) / (high + low) for low, high in ranges]
    assert spans[0] > spans[2] == pytest.approx(spans[3])
    assert spans[4] > spans[3]
    assert (pricer.extrapolated(nodes[2:4]), pricer.extrapolated(nodes[4:])) == ((), ("Linear 5.4x",))


@pytest.mark.parametrize(("phase", "said"), [("prefill", ()), ("decode", (CACHED,))])
def test_cached_keys_are_said_to_be_beyond_the_code(phase, said):
    graph = deploy(lower(parse("SM+R", base_architecture("tiny")).architecture, 32), Deployment(phase=phase))
    assert load_pricer("sigma").extrapolated(graph)[-1:] == said


def test_lowered_graphs_are_those_of_the_code():
    """Op graphs of GPT-2 and of Llama 2's dimensions, without embedding and head, send what is logged of each."""
    small = parse("SM+LN+G", base_architecture("gpt2-small")).architecture
    blocks = [node.op for node in lower(small, 128) if isinstance(node.layer, int)]
    assert total_comm(comm(op, SETTING) for op in blocks).online_bytes + 2 == 885_146_258
    row = row_named("Llama-2-7B T=128 sigma-lan")
    heads = Dimensions(layers=row.num_layers, heads=row.num_heads, kv_heads=row.num_heads, d_model=row.d_model)
    large = replace(base_architecture("smollm2-135m", heads), d_ff=row.d_ff)
    blocks = [node.op for node in lower(large, row.seq_len) if isinstance(node.layer, int)]
    ring = SigmaSetting(ring_bits=row.ring_bits)
    assert total_comm(comm(op, ring) for op in blocks).online_bytes + 2 == row.run_bytes
