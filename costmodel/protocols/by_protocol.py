"""Flags that say one thing for several protocols: `--protocol semi2k,sigma --budget-latency semi2k=60s,sigma=2s`."""

from collections.abc import Mapping, Sequence

from costmodel.errors import UserError
from costmodel.protocols import load_pricer

KEYS = "budget_keys"


def asked_of_each(protocol: str, flags: Mapping[str, str | None]) -> dict[str, dict[str, str | None]]:
    """What flags, by name, say of each protocol in a list; without a name a budget of keys is of those that have keys.

    Raises UserError for an unknown protocol with keys, a testbed of all of them, or as `by_protocol` does.
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
    """The names in a list with commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def by_protocol(text: str | None, protocols: Sequence[str], subject: str) -> dict[str, str | None]:
    """What a flag says of each protocol: one value of all, or NAME=VALUE with commas between, None where it says none.

    Raises UserError for a value of a protocol that is not among them, or for several without names.
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
