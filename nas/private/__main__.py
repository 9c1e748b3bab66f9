"""`python -m nas.private RUN --prompt TEXT`: the chosen model answers under the MPC engine, next to predicted costs.

The parties run as processes of this machine, or each on its own machine, with `--party` and `--peers`.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from costmodel.config import cli
from costmodel.config.units import format_bytes, parse_seconds
from costmodel.engine.children import kept_children
from costmodel.engine.keys import Keys
from costmodel.engine.meeting import is_loopback, parse_peers, shown
from costmodel.engine.plan import CLIENT, Plan, part_of, ranks, role
from costmodel.engine.registry import check_installed
from costmodel.engine.session import alone, on_this_machine
from costmodel.errors import StoppedError, UserError
from costmodel.report.tables import console as table_console
from nas.private.answer import answer, answer_document, summary_lines, why_wrong
from nas.private.fixed_point import (
    clear_perplexity,
    corpus_for,
    fixed_point_document,
    fixed_point_table,
    lines_below,
    score_setting,
    validation_sequences,
)
from nas.private.model import find_model
from nas.private.prompt import given_text, read_prompt
from nas.private.setup import FRACTION_BITS, Setup, header_lines, in_range, resolve_setup

LEAST_IDLE_S = 2.0  # in which a party sends a few messages that say that it is alive
USUAL, NARROW = 64, 32  # bits of rings: --perplexity compares both unless another is asked for


def private(
    run: str,
    pick: str = "knee",
    protocol: str = "semi2k",
    prompt: str | None = None,
    prompt_file: str | None = None,
    new_tokens: int = 20,
    perplexity: int | None = None,
    data: str | None = None,
    party: int | None = None,
    peers: str | None = None,
    wait: str = "10s",
    idle_limit: str = "60s",
    certificates: str | None = None,
    protected_links: bool = False,
    allow_out_of_range: bool = False,
    format: Literal["table", "json"] = "table",
    **setup: Any,
) -> None:
    """Generate tokens greedily with a folded model under the MPC engine, and print measured and predicted costs.

    Args:
        run: folder of a run of nas.search (`latest` for the last one), of nas.train or of nas.export; another
            checkpoint, as a folder or a .gguf file; or `builtin`.
        pick: for a run, knee or best of the front, or the arch_id of a completed trial.
        protocol: semi2k or cheetah (two parties), aby3 (three), or crypten (two and a dealer; on any Python).
        prompt: text to continue; it stands in the list of processes.
        prompt_file: instead, a file with this text, or - for standard input; a newline at its end is dropped.
        new_tokens: most tokens to generate; the answer also ends at the end of a document.
        perplexity: instead of a prompt, run about this many validation tokens by teacher forcing, in rings of 64 and 32
            bits (crypten: 64) unless another is asked for.
        data: validation text, as in nas.train, instead of the model's own.
        party: run only one party here: 0 the client, 1 the server, 2 the helper of aby3 or the dealer of crypten.
        peers: host:port of every party, by rank; the engine uses the port after each.
        wait: how long a party that runs alone waits for the others.
        idle_limit: how long a party may be silent once all have met, at least 2s; then the others end.
        certificates: folder with this party's key.pem and every party's RANK.pem; all links are then encrypted by TLS
            and authenticated. Peers on other machines need this, or the next flag.
        protected_links: confirm that links to other machines are protected by other means, such as a tunnel.
        allow_out_of_range: run a model or prompt whose numbers the engine's fixed point does not hold, for study; all
            parties must say so.
        format: lines for people, or one JSON document in SI units.
    """
    find_model(run)  # before the engine is asked for
    check_installed(protocol)
    _check_flags(perplexity, party, peers, protocol, has_prompt=(prompt, prompt_file) != (None, None))
    text = given_text(prompt, prompt_file) if perplexity is None and party in (None, CLIENT) else ""  # before folding
    as_json, wait_s = format == "json", parse_seconds(wait, "--wait")
    asked = resolve_setup(run, pick, party=party, protocol=protocol, **setup)
    # --perplexity shows what is lost, next to the model in plaintext
    is_allowed = allow_out_of_range or (perplexity is not None and protocol != "crypten")
    asked = in_range(asked, setup.get("fraction_bits"), is_allowed=is_allowed)
    if perplexity is not None:
        _print_perplexities(asked, perplexity, data, as_json=as_json)
        return
    links = _links(party, peers, protocol, wait_s, idle_limit, certificates, is_protected=protected_links)
    if party in (None, CLIENT):
        _print_answer(asked, text, new_tokens, links, party, as_json=as_json)
    else:
        _serve(asked, party, links)


def _links(
    party: int | None,
    peers: str | None,
    protocol: str,
    wait_s: float,
    idle_limit: str,
    certificates: str | None,
    *,
    is_protected: bool,
) -> dict[str, Any]:
    """Return what flags say of links, as fields of an assignment. Raise UserError too if this party lacks keys."""
    taking_part = ranks(protocol)
    if party is not None and party not in taking_part:
        raise UserError(f"--party must be from 0 to {taking_part[-1]} under {protocol}, but got {party}.")
    addresses = () if peers is None else parse_peers(peers, len(taking_part))
    away = [host for host, _ in addresses if not is_loopback(host)]
    if away and certificates is None and not is_protected:
        raise UserError(
            f"links must be protected by other means to peers on other machines, such as {away[0]}, since they are not "
            f"encrypted; set up a tunnel, and say so with --protected-links true, or give --certificates."
        )
    if (idle_s := parse_seconds(idle_limit, "--idle-limit")) < LEAST_IDLE_S:
        raise UserError(f"--idle-limit must be at least {LEAST_IDLE_S:g}s, but got {idle_limit}.")
    if not addresses and certificates is not None:
        raise UserError("--certificates is for links between --party and --peers; drop it.")
    folder = None if certificates is None else Path(certificates).resolve()
    if party is not None and folder is not None:
        Keys(folder, party, len(taking_part))
    alone = {"addresses": addresses, "wait_s": wait_s, "certificates": folder} if addresses else {}
    return {"idle_s": idle_s, **alone}


def _check_flags(
    perplexity: int | None, party: int | None, peers: str | None, protocol: str, *, has_prompt: bool
) -> None:
    if (party is None) != (peers is None):
        raise UserError("--party and --peers go together; give both, or none to run all parties here.")
    if perplexity is not None and perplexity < 1:
        raise UserError(f"--perplexity must be at least 1 token, but got {perplexity}.")
    if perplexity is not None and (party is not None or has_prompt):
        raise UserError("--perplexity goes without --prompt, --party and --peers; drop them.")
    if party not in (None, CLIENT) and has_prompt:
        raise UserError(
            f"--prompt is the client's alone, but this is party {party} ({role(party, protocol)}); drop it."
        )


def _print_answer(
    setup: Setup, text: str, new_tokens: int, links: dict[str, Any], party: int | None, *, as_json: bool
) -> None:
    """Answer a prompt and print the answer; without `party` all parties run here, else only the client."""
    model = setup.model
    sizes = {"context": model.architecture.context, "vocab_size": model.architecture.vocab_size}
    prompt = read_prompt(text, model.tokenizer, new_tokens=new_tokens, **sizes)

    def report(*lines: str) -> None:
        for line in () if as_json else lines:
            print(line, flush=True)

    report(*header_lines(setup))
    start = on_this_machine if party is None else lambda client: alone(part_of(client, CLIENT))
    done = answer(setup, prompt, new_tokens, lambda client: start(replace(client, **links)), report)
    report(*summary_lines(setup, done))
    if as_json:
        print(json.dumps(answer_document(setup, done), allow_nan=False))
    if (why := why_wrong(done)) is not None:
        raise StoppedError(f"{why}; do not rely on this answer.")


def _serve(setup: Setup, rank: int, links: dict[str, Any]) -> None:
    """Run a party other than the client; print what it holds and, in the end, what it sent."""
    plan = Plan(kind="tokens", num_tokens=1, num_new=1)  # the client's comes with its first message
    assignment = part_of(replace(setup.client(plan), **links), rank)
    for line in header_lines(setup):
        print(line)
    at = shown(assignment.addresses[rank])
    print(f"this is party {rank} ({role(rank, setup.protocol)}) at {at}: {setup.holds(rank)}", flush=True)
    with alone(assignment) as session:
        print(f"ready; {session.num_steps} steps at most, op graph {session.op_graph} at every party", flush=True)
        left = session.answer(rank).header
    sent = f"{format_bytes(left['sent_bytes'])} in {left['messages']:,} messages"
    print(f"the client has left after {left['num_steps']} steps, in which this party sent {sent}")


def _print_perplexities(setup: Setup, num_tokens: int, data: str | None, *, as_json: bool) -> None:
    """Print perplexities in the ring that is asked for; if that is the usual one, in a narrow one too."""
    model, setting = setup.model, setup.setting
    context, vocab_size = model.architecture.context, model.architecture.vocab_size
    corpus = corpus_for(model.tokenizer, model.corpus, data, vocab_size=vocab_size, context=context)
    tokens = validation_sequences(corpus, num_tokens, context)
    has_usual_bits = (setting.ring_bits, setting.fraction_bits) == (USUAL, FRACTION_BITS[USUAL])
    is_usual = setup.protocol != "crypten" and has_usual_bits
    narrow = [replace(setting, ring_bits=NARROW, fraction_bits=FRACTION_BITS[NARROW])] if is_usual else []
    clear = clear_perplexity(setup, tokens)

    def log(index: int) -> None:
        print(f"sequence {index + 1} of {len(tokens)}", file=sys.stderr)

    with kept_children():
        scores = {ring: score_setting(replace(setup, setting=ring), tokens, log) for ring in (setting, *narrow)}
    if as_json:
        print(json.dumps(fixed_point_document(setup, clear, scores, tokens), allow_nan=False))
        return
    for line in header_lines(setup):
        print(line)
    table_console().print(fixed_point_table(setup, clear, scores, tokens))
    for line in lines_below(setup, scores):
        print(line)


# (args=None): runs the command line and exits with its code
main = partial(cli.run, private, "python -m nas.private")


if __name__ == "__main__":
    main()
