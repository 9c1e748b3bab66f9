import json

import pytest

from costmodel.config import cli
from search_spaces.__main__ import count, list_members, show
from search_spaces.space import SHIPPED
from tests.conftest import refusals

Run = tuple[int, str, str]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> Run:
    """Exit code, stdout and stderr of `python -m search_spaces ...`."""
    with pytest.raises(SystemExit) as exit_:
        cli.run({"count": count, "list": list_members, "show": show}, "python -m search_spaces", args)
    return (int(exit_.value.code or 0), *capsys.readouterr())


TWO = "tiny --protocol sigma,semi2k --seq-len 32 --budget-latency semi2k=240ms,sigma=100ms"
PRUNED = [f"SM+ScFuFFN_i{p}" for p in range(1, 12)]


def test_golden_ladder_within_five_minutes(capsys):
    """Printed (arXiv 2410.13060, T=128, L=12): ScFuFFN 4.76 and _i6 4.23 min; ScFFN 5.68, LN+R 6.06, LN+G 8.21."""
    args = ("list", "ladder", "--budget-latency", "5min", "--limit", "99", "--format", "json")
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    placements = [name.replace("SM", attention) for attention in ("SM", "SM(t)") for name in ("SM+ScFuFFN", *PRUNED)]
    expected = {recipe.format(name) for recipe in ("{}", "EReg({})") for name in placements}
    members_by_name = {member["name"]: member for member in json.loads(out)["members"]}
    assert set(members_by_name) == expected
    assert members_by_name["SM+ScFuFFN"]["latency_s"] == pytest.approx(4.76 * 60, rel=0.05)
    assert members_by_name["EReg(SM(t)+ScFuFFN_i6)"]["latency_s"] == pytest.approx(4.23 * 60, rel=0.05)


# The cheapest trained row at T=256 is printed at 10.32 min (SM+ScFuFFN_i6); deeper pruning is cheaper still.
TEXTS = {
    "count": "count gpt2-papers --budget-latency 5min --budget-comm 8GB",
    "count-json": "count gpt2-small --budget-latency 5min --format json",
    "count-ladder-256": "count ladder --budget-latency 5min --seq-len 256",
    "count-none-json": "count tiny --budget-comm 1B --format json",
    "count-forms-json": "count gpt2-forms --format json",
    "count-two-protocols": f"count {TWO}",
    "list": "list ladder --limit 3",
    **{f"show-{name}": f"show {name}" for name in SHIPPED},
    "show-json": "show gpt2-papers --format json",
}


@pytest.mark.parametrize("name", TEXTS)
def test_output_is_that_of_the_snapshot(capsys, snapshot, name):
    code, out, err = run(capsys, *TEXTS[name].split())
    assert code == (3 if "no member of space" in err else 0)
    snapshot(name, out + err)


def test_members_within_the_budgets_of_several_protocols(capsys):
    code, out, _ = run(capsys, "list", *TWO.split(), "--budget-keys", "1GB", "--format", "json")
    document = json.loads(out)
    assert code == 0
    assert document["budget"] == {"latency_s": 0.1, "sent_bytes": None, "key_bytes": 1e9}
    assert document["also"] == {"semi2k on lan": {"latency_s": 0.24, "sent_bytes": None, "key_bytes": None}}
    assert document["members"]
    for member in document["members"]:
        assert member["latency_s"] <= 0.1
        assert member["also"]["semi2k on lan"]["latency_s"] <= 0.24


def test_a_space_of_members_is_counted_as_written_and_one_however_large_is_listed(capsys):
    written = json.loads(run(capsys, "count", "ladder", "--format", "json")[1])
    assert written["cost_of"] == "unfolded"
    deployed = json.loads(run(capsys, "count", "ladder", "--cost-of", "folded", "--format", "json")[1])
    assert deployed["cost_of"] == "folded"
    assert deployed["cheapest"]["latency_s"] < written["cheapest"]["latency_s"]
    assert deployed["most_expensive"] == written["most_expensive"]  # SM+LN+G keeps all that the printed rows price
    code, out, _ = run(capsys, "list", "gpt2-small", "--budget-latency", "250s", "--limit", "5")
    assert (code, len(out.splitlines())) == (0, 6)


@pytest.mark.parametrize(("args", "message"), refusals("refused.txt", __file__))
def test_bad_input_is_one_line_and_exit_2(capsys, args, message):
    code, out, err = run(capsys, *args.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
