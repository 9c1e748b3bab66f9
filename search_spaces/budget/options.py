"""Protocols and budgets of the members of a space: options of a search and of `python -m search_spaces`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.config.units import parse_budget
from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.protocols import load_pricer

BY_PROTOCOL = ("network", "testbed", "budget_latency", "budget_comm", "budget_keys")  # fields with a value per protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """Protocols and budgets; costs are per token.

    Args:
        budget_latency: largest latency per token, such as 5min; in a search with --parent also a share of the parent's,
            such as 60%.
        budget_comm: largest number of bytes per token that all parties together send, such as 8GB, or a share of the
            parent's.
        budget_keys: largest size of the keys per token that the dealer of sigma, or of your own protocol with keys,
            sends each party, such as 8GB, or a share of the parent's.
        seq_len: tokens of the prompt whose cost is predicted; in a search, also of training sequences by default.
        protocol: protocol of the costs: published, semi2k, aby3, cheetah, sigma, crypten, ckks, or module:Class of your
            own; or several separated by commas, whose budgets all apply, such as --budget-latency semi2k=60s,sigma=2s;
            the front uses the first.
        network: network between the parties, for protocols other than published: loopback, lan (the default), wan,
            another preset or a .yaml file; for several protocols one for all, or one each, such as
            semi2k=lan,sigma=wan.
        testbed: a .yaml file of compute seconds from `python -m costmodel calibrate` (under ckks also a card, such as
            a100), instead of the committed one; not for published; for several protocols one each, such as
            semi2k=mine.yaml.
    """

    budget_latency: str | None = None
    budget_comm: str | None = None
    budget_keys: str | None = None
    seq_len: int = 128
    protocol: str = "published"
    network: str | None = None
    testbed: str | None = None

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols that price members; the front uses seconds under the first."""
        return protocols_of(self.protocol)

    @property
    def asked(self) -> dict[str, dict[str, str | None]]:
        """The network, testbed and budgets of each protocol: protocol -> name of the field -> text, None if not given.

        A UserError is raised for values that do not match the protocols, as by `options_by_protocol`.
        """
        return options_by_protocol(self.protocol, {name: getattr(self, name) for name in BY_PROTOCOL})

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each protocol. Raises UserError as `asked`, or if a value is no positive number with a unit."""
        return {
            name: parse_budget(*(said[f"budget_{kind}"] for kind in ("latency", "comm", "keys")))
            for name, said in self.asked.items()
        }


KEYS = "budget_keys"


def options_by_protocol(protocol: str, flags: Mapping[str, str | None]) -> dict[str, dict[str, str | None]]:
    """Return the value of every flag for each protocol: protocol -> flag -> text, None if not given.

    A budget of keys without a protocol's name is for protocols with keys, or for all if none has. A UserError is raised
    for a testbed that does not name one of several protocols, a value that `by_protocol` refuses or, with a budget of
    keys, an unknown protocol.
    """
    protocols, testbed = protocols_of(protocol), flags.get("testbed")
    if len(protocols) > 1 and testbed is not None and "=" not in testbed:
        raise UserError(f"--testbed is of one protocol; say whose, such as {protocols[0]}={testbed}.")
    keyed = protocols
    if flags.get(KEYS) is not None:
        keyed = tuple(name for name in protocols if load_pricer(name).has_keys) or protocols
    said = {
        flag: by_protocol(text, keyed if flag == KEYS else protocols, "--" + flag.replace("_", "-"))
        for flag, text in flags.items()
    }
    return {name: {flag: values.get(name) for flag, values in said.items()} for name in protocols}


def protocols_of(text: str) -> tuple[str, ...]:
    """Return the distinct names in a text separated by commas, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def by_protocol(text: str | None, protocols: Sequence[str], subject: str) -> dict[str, str | None]:
    """Return protocol -> value of a flag, None if not given; `text` is one value for all, or NAME=VALUE,NAME=VALUE.

    subject: the flag's name in errors. A UserError is raised for a name that is not among the protocols, an empty
    value, or several values without names.
    """
    if text is None or ("=" not in text and "," not in text):
        return dict.fromkeys(protocols, text)
    values: dict[str, str | None] = dict.fromkeys(protocols)
    for part in text.split(","):
        name, _, value = (words.strip() for words in part.partition("="))
        if name not in protocols or not value:
            raise UserError(
                f"{subject} must be one value, or NAME=VALUE with a comma between, of what --protocol names "
                f"({', '.join(protocols)}), but got {part.strip()!r}."
            )
        values[name] = value
    return values
