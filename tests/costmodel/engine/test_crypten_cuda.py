"""What a card computes for CrypTen, on the CPU: products, masks, places, and the memory that is asked for."""

import pytest
import torch

from costmodel import ops
from costmodel.engine import crypten_cuda
from costmodel.engine.crypten_cuda import (
    CardDraws,
    ExactProducts,
    Place,
    UnwrappedLong,
    card_bytes,
    exact_matmul,
    place_of,
    require_room,
)
from costmodel.errors import UserError
from costmodel.ops import Input, Node, OpGraph
from costmodel.protocols.crypten import CryptenSetting

CPU = torch.device("cpu")
LEAST, MOST = -(2**63), 2**63 - 1


def words(*shape):
    return torch.randint(LEAST, MOST, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (words(3, 5), words(5, 4)),
        (words(2, 1, 3, 4), words(5, 4, 6)),
        (words(2, 5000), words(5000, 3)),  # more than one stretch
        (torch.full((2, 4097), LEAST), torch.full((4097, 2), MOST)),
        (torch.full((2, 4097), MOST), torch.full((4097, 2), MOST)),
        (torch.full((1, 2048), 2**21 + (2**21 << 22)), torch.full((2048, 1), -(2**21))),  # digits as large as can be
    ],
)
def test_products_are_those_of_integers_modulo_2_64(left, right):
    assert torch.equal(exact_matmul(left, right), torch.matmul(left, right))
    with ExactProducts():
        assert torch.equal(left @ right, torch.matmul(left, right))
        assert torch.equal(left.matmul(right), torch.matmul(left, right))


def test_sums_of_products_are_exact_up_to_the_longest_stretch(monkeypatch):
    left, right = torch.full((1, 5000), 2**21 - 1), torch.full((5000, 1), 2**21 - 1)
    right[0] = 2  # makes an odd sum of many even products
    monkeypatch.setattr(crypten_cuda, "LONGEST", 5000)
    assert exact_matmul(left, right).item() != (left @ right).item()


def test_other_products_are_left_alone():
    matrix = torch.eye(2, dtype=torch.float64)
    with ExactProducts():
        assert torch.equal(matrix @ matrix, matrix)


# RFC 8439, appendix A.1, test vectors 1 to 3
@pytest.mark.parametrize(
    ("key", "block", "expected"),
    [
        (bytes(32), 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
        (bytes(32), 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
        (bytes(31) + b"\1", 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"),
    ],
)
def test_masks_of_a_card_are_the_key_stream_of_chacha20(key, block, expected):
    draws = CardDraws(key, CPU)
    draws((8 * block,))
    assert draws((2, 2)).numpy().tobytes().hex() == expected


def test_masks_of_a_card_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    seed, shapes = bytes(range(32)), [(3,), (2, 40), (), (100,)]
    many = CardDraws(seed, CPU)
    expected = [many(shape) for shape in shapes]
    monkeypatch.setattr(crypten_cuda, "BLOCKS", {"cpu": 2})
    few = CardDraws(seed, CPU)
    for shape, wanted in zip(shapes, expected, strict=True):
        assert torch.equal(few(shape), wanted)
    assert few.counter == 24  # blocks of 8 words for 184 words, 2 at once


def test_the_counter_of_blocks_has_64_bits(monkeypatch):
    monkeypatch.setattr(crypten_cuda, "BLOCKS", {"cpu": 2})
    first, later = CardDraws(bytes(32), CPU), CardDraws(bytes(32), CPU)
    later.counter = 1 << 32
    assert not torch.equal(first((16,)), later((16,)))


def test_places_are_by_rank_and_a_card_must_be_there(monkeypatch):
    assert place_of("cpu", 2) == Place(device=CPU, as_on_card=False)
    assert place_of("emulated", 1) == Place(device=CPU, as_on_card=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place_of("cuda", rank).device.index for rank in range(3)] == [0, 1, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"^--device cuda needs a GPU with CUDA, but torch .* finds none; leave it out\.$"
    ):
        place_of("cuda", 0)


def test_memory_of_a_card_is_predicted_and_refused_beforehand(monkeypatch):
    op = ops.Linear(rows=8, in_features=1000, out_features=1000, bias=False)
    graph = OpGraph(nodes=(Node(name="a", layer=0, op=op, inputs=("x",)),), inputs=(Input(name="x", shape=(8, 1000)),))
    weights, outputs = 1000 * 1000, 8 * 1000
    needed = (1 << 30) + 8 * (weights + outputs + 16 * (weights + 2 * outputs))
    assert card_bytes([graph], CryptenSetting()) == needed
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sizes = {"total_memory": 3 * needed}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Card", (), sizes))
    place = Place(device=torch.device("cuda", 0), as_on_card=True)
    require_room([graph], place, 3, CryptenSetting())
    sizes["total_memory"] -= 1
    with pytest.raises(
        UserError, match=r"^a card must have 3\.6\d GB for 3 of the parties, but cuda:0 has 3\.6\d GB; "
    ):
        require_room([graph], place, 3, CryptenSetting())
    require_room([graph], place, 2, CryptenSetting())
    require_room([graph], Place(device=CPU, as_on_card=True), 3, CryptenSetting())


def test_integers_on_a_card_stay_tensors():
    tensor = words(2, 2)
    assert UnwrappedLong(tensor) is tensor
    assert torch.equal(UnwrappedLong.stack([tensor, tensor], dim=0), torch.stack([tensor, tensor]))
