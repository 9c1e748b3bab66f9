"""What counts as text, in a file or on a command line: what can be printed, written and used as a path."""


def is_text(value: str) -> bool:
    """Whether a text holds neither null characters nor halves of surrogate pairs, which UTF-8 has no place for.

    The system hands over bytes that are no UTF-8, say in a path, as such halves; JSON and YAML may escape them.
    """
    return "\0" not in value and (value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value))
