import json

import pytest

from costmodel.config import cli
from search_spaces.__main__ import count, list_members, show
from search_spaces.definition import SHIPPED
from tests.imports import loaded_by

Run = tuple[int, str, str]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> Run:
    """Exit code, stdout and stderr of `python -m search_spaces ...`."""
    with pytest.raises(SystemExit) as exit_:
        cli.run({"count": count, "list": list_members, "show": show}, "python -m search_spaces", args)
    return (int(exit_.value.code or 0), *capsys.readouterr())


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


def test_golden_ladder_is_infeasible_at_256_tokens(capsys):
    """The cheapest trained row is printed at 10.32 min (SM+ScFuFFN_i6); deeper pruning is cheaper still."""
    code, out, err = run(capsys, "count", "ladder", "--budget-latency", "5min", "--seq-len", "256")
    assert code == 3
    assert "0 members (0 %)" in out
    assert "the cheapest, SM+ScFuFFN_i11, costs " in err
    assert err.count("\n") == 1


def test_count_says_size_share_and_both_ends(capsys):
    code, out, _ = run(capsys, "count", "gpt2-papers", "--budget-latency", "5min", "--budget-comm", "8GB")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(
        "gpt2-papers: 246,820,614,034,552,271,142,912 members, 123,410,307,017,276,135,571,456 arch"
    )
    assert lines[1].startswith("within 5.00 min and 8.00 GB per token at T=128, protocol published: ")
    assert lines[2].startswith("seconds of the cheapest: embedding ")
    assert lines[3].startswith("cheapest: SM_i12  ")
    assert lines[4].startswith("most expensive: SM+LN+G  ")
    assert len(lines) == 5


def test_members_within_the_budgets_of_several_protocols(capsys):
    flags = ("tiny", "--protocol", "sigma,semi2k", "--seq-len", "32", "--budget-latency", "semi2k=240ms,sigma=100ms")
    code, out, _ = run(capsys, "list", *flags, "--budget-keys", "1GB", "--format", "json")
    document = json.loads(out)
    assert code == 0
    assert document["budget"] == {"latency_s": 0.1, "sent_bytes": None, "key_bytes": 1e9}
    assert document["also"] == {"semi2k on lan": {"latency_s": 0.24, "sent_bytes": None, "key_bytes": None}}
    assert document["members"]
    for member in document["members"]:
        assert member["latency_s"] <= 0.1
        assert member["also"]["semi2k on lan"]["latency_s"] <= 0.24
    code, out, _ = run(capsys, "count", *flags)
    assert "within 0.1 s per token at T=32, protocol sigma on lan, and within 0.24 s per token at T=32, protocol" in out


def test_count_as_json(capsys):
    code, out, _ = run(capsys, "count", "gpt2-small", "--budget-latency", "5min", "--format", "json")
    document = json.loads(out)
    assert code == 0
    assert document["num_members"] == 2 * 310**12
    assert document["accounting"] == "deployed"
    assert document["num_feasible"] == pytest.approx(document["feasible_share"] * document["num_members"])
    assert document["budget"] == {"latency_s": 300.0, "sent_bytes": None, "key_bytes": None}
    assert document["cheapest"]["latency_s"] < 300 < document["most_expensive"]["latency_s"]


def test_a_space_of_members_is_counted_as_written_unless_asked(capsys):
    written = json.loads(run(capsys, "count", "ladder", "--format", "json")[1])
    assert written["accounting"] == "written"
    deployed = json.loads(run(capsys, "count", "ladder", "--accounting", "deployed", "--format", "json")[1])
    assert deployed["accounting"] == "deployed"
    assert deployed["cheapest"]["latency_s"] < written["cheapest"]["latency_s"]
    assert deployed["most_expensive"] == written["most_expensive"]  # SM+LN+G keeps all that the printed rows price


def test_what_the_protocol_cannot_price_is_named_and_left_out(capsys):
    code, out, err = run(capsys, "count", "gpt2-forms", "--format", "json")
    assert code == 0
    assert json.loads(out)["num_architectures"] == ((2 * 1 + 1) * (2 * 2 + 1)) ** 12
    assert "left out of the space: ffn square: protocol published has no formula for Square" in err


def test_an_infeasible_count_is_still_one_json_document(capsys):
    code, out, err = run(capsys, "count", "tiny", "--budget-comm", "1B", "--format", "json")
    assert (code, json.loads(out)["num_feasible"]) == (3, 0)
    assert "no member of space 'tiny' is within the budget of 1 B" in err


def test_list_without_budget_follows_the_enumeration_and_says_what_is_left(capsys):
    code, out, _ = run(capsys, "list", "ladder", "--limit", "3")
    lines = out.splitlines()
    assert code == 0
    assert [line.split("  ")[0] for line in lines[:3]] == ["SM+LN+G", "EReg(SM+LN+G)", "SM+LN+R"]
    assert lines[3:] == ["and 53 more; raise --limit 3 to see them"]


def test_list_takes_any_space_however_large(capsys):
    code, out, _ = run(capsys, "list", "gpt2-small", "--budget-latency", "250s", "--limit", "5")
    assert (code, len(out.splitlines())) == (0, 6)


@pytest.mark.parametrize("name", SHIPPED)
def test_show_says_what_a_space_is_made_of(capsys, name):
    code, out, _ = run(capsys, "show", name)
    assert code == 0
    assert out.startswith(f"name: {name}\n")
    narrowing = ("constraints", "withheld.bounded", "withheld.power8", "first_layers")
    assert "".join(f"{name}: none\n" for name in narrowing) + "entropy_regularisation: false, true\n" in out
    document = json.loads(run(capsys, "show", name, "--format", "json")[1])
    assert document["num_members"] == 2 * document["num_architectures"]
    assert document["num_vertices"] > 0 < document["num_edges"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("count gpt3", f"space must be one of {', '.join(SHIPPED)} or the path of a .yaml file, but got 'gpt3'."),
        ("count tiny --budget-latency 5", "--budget-latency must be a positive number with a unit"),
        ("count tiny --protocol semi2k,sigma --budget-latency aby3=3s", "--budget-latency must be one value"),
        ("count tiny --protocol semi2k --budget-keys 8GB", "--budget-keys is of a dealer's keys"),
        ("count tiny --protocol sigma --budget-keys 8", "--budget-keys must be a positive number"),
        ("count tiny --budget-comm=-8GB", "--budget-comm must be a positive number with a unit"),
        ("count tiny --protocol pigeon", "protocol must be one of "),
        ("list tiny --limit 0", "--limit must be at least 1, but got 0."),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, args, message):
    code, out, err = run(capsys, *args.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_counting_imports_nothing_heavy():
    """A dry run has to answer in seconds, so neither training nor fitting libraries may be loaded."""
    code = "from search_spaces.__main__ import count; count('gpt2-small', budget_latency='5min', budget_comm='8GB')"
    assert not loaded_by(code) & {"torch", "scipy", "ray", "matplotlib", "jax"}
