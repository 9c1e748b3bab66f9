"""Ways to run a model for less: each is what its flags cost, and none is left out or too many."""

import re

import pytest

import costmodel
from costmodel.report.savings import LEAST

SMALL = {"base": "tiny", "vocab": 50_000, "seq_len": 16}
LAST = "--projection last --rows needed"
EMBEDS = "the client then has the embedding's weights, and the vocabulary projection's if they are tied"


def priced(**options):
    return costmodel.price("SM+LN+G", **(SMALL | options))


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"protocol": "semi2k"}, [LAST, "--client-layers 0"]),
        ({"protocol": "aby3"}, [LAST, "--client-layers 0"]),
        ({"protocol": "cheetah", "projection": "last"}, ["--rows needed", "--weights server", "--client-layers 0"]),
        ({"protocol": "published"}, [LAST, "--client-layers 0"]),
        ({"protocol": "sigma", "projection": "last", "rows": "needed"}, ["--client-layers 0"]),
        ({"protocol": "crypten"}, [LAST, "--client-layers 0"]),
        ({"protocol": "ckks"}, ["--client-layers 0"]),  # whose costs depend on the ops around an op
        ({"protocol": "semi2k", "new_tokens": 3}, ["--client-layers 0", "--weight-masks kept"]),
        ({"protocol": "semi2k", "phase": "decode", "client_layers": 0}, ["--weight-masks kept"]),
    ],
)
def test_a_saving_is_what_its_flags_cost(options, flags):
    found = priced(**options).savings
    assert [saving.flags for saving in found] == flags
    given, before = dict(options), priced(**options).total.latency_s / options.get("new_tokens", 1)
    for saving in found:
        given |= {
            name.replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in re.findall(r"--(\S+) (\S+)", saving.flags)
        }
        total, num_tokens = priced(**given).total, options.get("new_tokens", 1)
        assert saving.latency_s == pytest.approx(total.latency_s / num_tokens)
        assert saving.sent_bytes == pytest.approx(total.sent_bytes / num_tokens)
        assert saving.latency_s <= (1 - LEAST) * before
        assert bool(saving.note) == saving.flags.startswith(("--client", "--weight-masks"))
        before = saving.latency_s
    assert [saving.note for saving in found if saving.flags == "--client-layers 0"] in ([], [EMBEDS])


def test_the_line_and_the_document_name_them():
    model = priced(protocol="semi2k")
    line, document = model.summary()[-1], model.to_dict()["savings"]
    assert line.startswith("the same function for less: ")
    assert [saving["flags"] in line for saving in document] == [True] * len(document)
    assert "--client-layers 0 too (the client then has" in line
    nothing = priced(protocol="semi2k", projection="last", rows="needed", client_layers=0, weight_masks="kept")
    assert (nothing.savings, nothing.to_dict()["savings"]) == ((), [])
    assert "for less" not in str(nothing)


def test_blocks_of_queries_are_named_where_attention_is_most():
    (saving,) = costmodel.price("12xlSooo", seq_len=1024, protocol="semi2k", client_layers=0, vocab=50).savings[:1]
    assert saving.flags == "--query-block 256"
