"""Flags with values per protocol: `--protocol semi2k,sigma --budget-latency semi2k=60s,sigma=2s`."""

from collections.abc import Mapping, Sequence

from costmodel.errors import UserError
from costmodel.protocols import load_pricer

KEYS = "budget_keys"


def options_by_protocol(protocol: str, flags: Mapping[str, str | None]) -> dict[str, dict[str, str | None]]:
    """Return the values of flags for each protocol in a list.

    A budget of keys without a protocol's name is for the protocols with keys. A UserError is raised for an unknown
    protocol, one testbed for several protocols, or a value that `by_protocol` refuses.
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
    """Return the distinct names in a list separated by commas."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def by_protocol(text: str | None, protocols: Sequence[str], subject: str) -> dict[str, str | None]:
    """Return a flag's value for each protocol, from one value for all or NAME=VALUE pairs; None where none is given.

    A UserError is raised for a name that is not among the protocols, or for several values without names.
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
