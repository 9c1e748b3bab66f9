"""A prompt as tokens, and tokens as text."""

from dataclasses import dataclass
from pathlib import Path

from costmodel.errors import UserError
from nas.corpus.documents import GivenTokenizer
from nas.corpus.foreign_tokenizer import tokenizing
from nas.corpus.tokenizer import Encoder, given_encoder

MOST_BYTES = 1 << 24  # of a file with a prompt; a token has rarely more than some bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt. ids: its tokens, at least one; they start with the token that begins a text, if the model has one."""

    text: str
    ids: tuple[int, ...]
    encoder: Encoder

    def continued(self, new: list[int]) -> str:
        """Return the text of the prompt and the tokens `new`, without the token that begins a text."""
        return self.decoded([*self.ids[self.encoder.begin is not None :], *new])

    def decoded(self, ids: list[int]) -> str:
        """Return the text of token ids; bytes that do not form a whole character become U+FFFD."""
        with tokenizing(f"the tokenizer {self.encoder.name}"):
            return str(self.encoder.tokenizer.decode(ids, skip_special_tokens=False))


def given_text(text: str | None, file: str | None) -> str:
    """Return the text of a prompt: `text`, or the content of `file` (- is stdin) without a newline at its end.

    Raise UserError if both or neither are given, the text is empty, or the file is unreadable, too large or not UTF-8.
    """
    if not (given := text if file is None else _content(text, file)):
        raise UserError("--prompt must be text, such as 'def f(x):', but is empty.")
    return given


def _content(text: str | None, file: str) -> str:
    if text is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one of them.")
    if file != "-" and Path(file).exists() and not Path(file).is_file():
        raise UserError(f"--prompt-file must be a file of text or -, but {file} is no regular file.")
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"--prompt-file must have at most {MOST_BYTES} bytes, but {file} has more.")
        return content.decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--prompt-file must be a file of text or -, but {file} cannot be read: {reason}.") from None


def read_prompt(
    text: str, tokenizer: GivenTokenizer, *, context: int, new_tokens: int, vocab_size: int | None = None
) -> Prompt:
    """Return a text as a prompt. context, vocab_size: the model's; None for the tokenizer's size.

    new_tokens: most tokens to generate. Raise UserError if the text and the new tokens exceed the context, there is not
    at least 1 new token, the tokenizer lacks a character, or as `given_encoder` and `Encoder.encode_prompt`.
    """
    if new_tokens < 1:
        raise UserError(f"--new-tokens must be at least 1, but got {new_tokens}.")
    encoder = given_encoder(tokenizer, vocab_size, None)
    unknown = getattr(encoder.tokenizer.model, "unk_token", None)
    unknown_id = None if unknown is None else encoder.tokenizer.token_to_id(unknown)
    with tokenizing(f"the tokenizer {encoder.name}"):
        ids_of = {each: encoder.tokenizer.encode(each, add_special_tokens=False).ids for each in dict.fromkeys(text)}
    if lacking := [repr(character) for character, its in ids_of.items() if not its or unknown_id in its]:
        raise UserError(f"--prompt must be in what the model's tokenizer knows, but that lacks {', '.join(lacking)}.")
    ids = tuple(encoder.encode_prompt(text))
    if len(ids) + new_tokens > context:
        raise UserError(
            f"the prompt and the new tokens must fit into the context of {context} tokens, but they are {len(ids)} + "
            f"{new_tokens}; shorten --prompt or lower --new-tokens."
        )
    return Prompt(text=text, ids=ids, encoder=encoder)
