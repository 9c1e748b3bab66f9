from dataclasses import replace
from typing import get_args

import pytest

from costmodel import ops
from costmodel.network import NETWORKS
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, BATCH_BYTES, KEPT, Use
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import EngineSetting, Primitive
from costmodel.protocols.semi2k import CORRELATIONS, Correlation, correlations_of
from costmodel.randomness import ENCRYPTED, GENERATORS, SILENT_OT_BITS, alternatives

SETTING = EngineSetting()
DEALER, EXTENDED, SILENT, LATTICE = (generator.bytes_of for generator in GENERATORS)
PRODUCT = Correlation(kind="product", elements=1000, bits=64)
MATRIX = Correlation(kind="matrix", elements=128 * 3072, bits=64, shape=(128, 768, 3072))


def test_a_dealer_sends_one_share_of_each_result():
    assert (DEALER(PRODUCT, 64), DEALER(MATRIX, 64)) == (8 * 1000, 8 * 128 * 3072)
    assert DEALER(Correlation(kind="cross", elements=10, bits=32), 64) == 40
    assert DEALER(Correlation(kind="and", elements=10, bits=1), 64) == 10  # a bit is stored in a byte
    assert DEALER(Correlation(kind="bit", elements=10, bits=1), 64) == 80  # and dealt as a number


def test_gilboas_product_written_out_and_of_a_matrix_by_the_cheaper_factor():
    # two cross terms of 64 OTs of 128 bits, and 64 + 63 + ... + 1 bits of messages each
    assert EXTENDED(PRODUCT, 64) == 1000 * 2 * (64 * 128 + 64 * 65 / 2) / 8
    assert EXTENDED(replace(PRODUCT, kind="square"), 64) == EXTENDED(PRODUCT, 64) / 2
    assert EXTENDED(Correlation(kind="and", elements=10, bits=64), 64) == 10 * 64 * 2 * 128 / 8
    assert EXTENDED(Correlation(kind="bit", elements=10, bits=1), 64) == 10 * (128 + 64) / 8
    # left factor 128 x 768 chooses rows of 3072 numbers: fewer OTs, as many message bits
    ots, messages = 128 * 768 * 64 * 128, 128 * 768 * 3072 * 64 * 65 / 2
    assert EXTENDED(MATRIX, 64) == 2 * (ots + messages) / 8
    turned = replace(MATRIX, shape=(3072, 768, 128))
    assert EXTENDED(turned, 64) == EXTENDED(MATRIX, 64)


def test_silent_ots_cost_a_fraction_of_a_bit_and_an_encrypted_matrix_what_cheetahs_does():
    assert SILENT_OT_BITS == 8 * BATCH_BYTES / (BATCH - KEPT) < 0.44  # the paper's own figure, for smaller batches
    assert SILENT(PRODUCT, 64) == pytest.approx(1000 * 2 * (64 * SILENT_OT_BITS + 64 * 65 / 2) / 8)
    op = ops.Linear(rows=128, in_features=768, out_features=3072, bias=False)
    product = next(call for call in calls_of(op, SETTING, share_bytes=8) if call.primitive == "matmul")
    assert LATTICE(MATRIX, 64) == cheetah.PRICES["matmul"](product, Use()).sent_bytes
    assert LATTICE(PRODUCT, 64) < EXTENDED(PRODUCT, 64)


def test_of_a_model(graph_of):
    graph = graph_of("SM+LN+G", base="tiny", seq_len=8)
    some = [node.op for node in graph]
    made = alternatives(some, SETTING, NETWORKS["lan"])
    assert [way.generator.name for way in made] == [generator.name for generator in GENERATORS]
    assert all(way.network_s == way.setup_bytes * 8 / 1e9 for way in made)
    twice = alternatives(some * 2, SETTING, NETWORKS["loopback"])
    assert [way.setup_bytes for way in twice] == pytest.approx([2 * way.setup_bytes for way in made])
    assert {way.network_s for way in twice} == {0.0}
    # ciphertexts are known for one ring alone
    wide = alternatives(some, EngineSetting(ring_bits=128, fraction_bits=26), NETWORKS["lan"])
    assert [way.generator.name for way in wide] == [
        generator.name for generator in GENERATORS if generator.name != ENCRYPTED
    ]


def test_every_primitive_has_its_correlations_and_a_relu_written_out():
    assert set(CORRELATIONS) == set(get_args(Primitive))
    # a sign, an AND and a tree of halves, and a selection; nothing is cut off
    correlations = correlations_of(ops.Relu(rows=2, features=5), SETTING)
    tree = [Correlation(kind="and", elements=20, bits=bits) for bits in (32, 16, 8, 4, 2, 1)]
    assert list(correlations) == [
        Correlation(kind="and", elements=10, bits=64),
        *tree,
        Correlation(kind="product", elements=10, bits=64),
    ]
