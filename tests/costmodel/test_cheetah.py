"""Prices of cheetah: arithmetic written out, and the account of what is made ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import ops
from costmodel.protocols import cheetah
from costmodel.protocols.calls import PRIMITIVES, Call, Comm, Setting

DEFAULT = Setting()


def used(**changes: object) -> cheetah.Ledger:
    """Everything started, and more OTs at hand than a test needs."""
    started = {"product_keys": True, "matrix_keys": True, "ots_started": True, "spare_ots": [10**9, 10**9]}
    return cheetah.Ledger(**{**started, **changes})


def one(primitive: str, elements: int, ledger: cheetah.Ledger, bits: int = 0) -> Comm:
    return cheetah.PRICES[primitive](Call(primitive=primitive, elements=elements, bits=bits), ledger)


def test_a_comparison_takes_82_and_a_quarter_bytes_an_element() -> None:
    # 16 digits of 4 bits: an OT of 16 messages of 2 bits with 4 choices each, 16 x (4 + 0.5) bytes. The tree joins them
    # in levels of 8, 4, 2, 1 nodes, one of which opens 2 bits and the others 3, by both parties.
    opened_bits = 2 * ((2 + 7 * 3) + (2 + 3 * 3) + (2 + 1 * 3) + 2)
    comm = one("sign", 16384, used())
    assert comm.online_bytes == (16 * 4.5 + opened_bits / 8) * 16384 == 82.25 * 16384
    assert comm.setup_bytes == 0
    assert comm.messages == 2 + 2 * (3 * 5 + 2)


def test_a_truncation_takes_3_and_an_eighth_bytes_an_element() -> None:
    # 8 numbers of 18 bits fill 3 words, and a choice is one bit
    assert one("truncate", 16384, used(), bits=18).online_bytes == (3 + 1 / 8) * 16384


def test_large_products_are_encrypted_and_small_ones_open_masks() -> None:
    vectors = 2 * cheetah.NUM_MODULI  # two halves of 8192 elements
    large = one("multiply", 16384, used())
    assert large.online_bytes == vectors * (2 * cheetah.PRODUCT_SENT_BYTES + cheetah.PRODUCT_ANSWER_BYTES)
    small = one("multiply", 100, used(triples=100))
    assert (small.online_bytes, small.setup_bytes) == (2 * 2 * 8 * 100, 0)


def test_triples_are_cached() -> None:
    ledger = used()
    first, second = (one("multiply", 100, ledger) for _ in range(2))
    assert first.setup_bytes == 4 * (cheetah.PRODUCT_SENT_BYTES + cheetah.PRODUCT_ANSWER_BYTES)
    assert second.setup_bytes == 0
    assert ledger.triples == 4096 - 200


def test_oblivious_transfers_are_extended_when_they_run_out() -> None:
    ledger = used(spare_ots=[100, 0])
    assert one("truncate", 100, ledger, bits=18).setup_bytes == 0
    assert one("truncate", 1, ledger, bits=18).setup_bytes == cheetah.BATCH_BYTES
    assert ledger.spare_ots == [cheetah.BATCH - cheetah.KEPT - 1, 0]


def test_keys_and_transfers_are_set_up_once() -> None:
    some = [ops.Relu(rows=16, features=16), ops.Linear(rows=4, in_features=4, out_features=4, bias=True)] * 2
    first_relu, first_linear, relu, linear = cheetah.walk(some, DEFAULT)
    assert first_relu.setup_bytes == cheetah.START_BYTES + 2 * cheetah.BATCH_BYTES
    assert first_linear.setup_bytes == cheetah.MATRIX_KEYS_BYTES
    assert relu.setup_bytes == linear.setup_bytes == 0
    assert (first_relu.online_bytes, first_linear.online_bytes) == (relu.online_bytes, linear.online_bytes)


def alone(op: ops.Op) -> int:
    return cheetah.walk([op], DEFAULT)[0].rounds


def test_rounds_are_those_of_the_later_party() -> None:
    # Slope of wall time against an injected one-way delay of 10, 20 and 40 ms, in parentheses.
    # Choices and messages 2, then 17 openings, the first of which leaves with the messages; selection 3, since the
    # choices of its second transfer travel with the messages of its first (21.4).
    assert alone(ops.Relu(rows=4, features=4)) == 2 + 17 - 1 + 3
    # Choices and messages (2.0).
    assert alone(ops.Temperature(heads=1, queries=4, keys=4)) == 2
    # Masks, choices and messages, twice; the second masks of one party leave with its messages (5.1).
    assert alone(ops.ScaledAdd(rows=4, features=4)) == 2 * 3 - 1
    # Ciphertexts, answers, choices, messages (4.2).
    assert alone(ops.Linear(rows=4, in_features=4, out_features=4, bias=True)) == 4


def test_blocks_of_a_matrix_product() -> None:
    # 8192 coefficients: 64 x 256 x 256 is cut to blocks of 64 x 128 x 1, two of which hold the left factor
    assert cheetah.best_block(64, 256, 256, packed=True) == (64, 128, 1)
    assert cheetah.best_block(16, 16, 16, packed=False) == (16, 16, 16)


def test_every_primitive_has_a_price() -> None:
    assert set(cheetah.PRICES) == set(PRIMITIVES)


def test_another_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="in a ring of 64 bits, but got 128"):
        cheetah.walk([ops.Relu(rows=1, features=1)], Setting(ring_bits=128))


@given(st.integers(1, 300), st.integers(1, 300))
def test_comparisons_never_get_cheaper_with_more_elements(rows: int, features: int) -> None:
    less, more = (
        cheetah.walk([ops.Relu(rows=count, features=features)], DEFAULT)[0].online_bytes for count in (rows, rows + 1)
    )
    assert less <= more
