"""The tokenizer of a GGUF file: a tokenizer.json beside it, or byte-level BPE from its metadata.

Source: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, for how each kind cuts a text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from costmodel.errors import UserError
from nas.corpus.documents import GivenTokenizer
from nas.corpus.tokenizer import END_OF_TEXT, TOKENIZER_FILE

PREFIX = "tokenizer.ggml"
BYTE_LEVEL = "gpt2"  # `tokenizer.ggml.model`
CONTROL, USER_DEFINED = 3, 4  # `tokenizer.ggml.token_type`
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Cut(NamedTuple):
    """How a text is cut before bytes are merged.

    pattern: of parts; None for no such cut. then_gpt2: whether GPT-2's rule cuts these further. whole_first: whether a
    part that is a token is taken whole.
    """

    pattern: str | None
    then_gpt2: bool = False
    whole_first: bool = False


CUTS = {  # by `tokenizer.ggml.pre`
    "gpt-2": _Cut(None, then_gpt2=True),
    "smollm": _Cut(r"\p{N}", then_gpt2=True),
    "llama-bpe": _Cut(rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", whole_first=True),
    "qwen2": _Cut(rf"{WORDS}|\p{{N}}|{REST}"),
}


def tokenizer_of(values: Mapping[str, Any], path: Path) -> GivenTokenizer:
    """values: metadata of the file. Raises UserError if they hold no tokenizer that can be read, nor a file beside."""
    tokens, end = values.get(f"{PREFIX}.tokens", ()), values.get(f"{PREFIX}.eos_token_id", -1)
    end_of_text = tokens[end] if 0 <= end < len(tokens) else END_OF_TEXT
    beside = path.parent / TOKENIZER_FILE
    json = beside.read_text(encoding="utf-8") if beside.is_file() else _from_metadata(values, path)
    return GivenTokenizer(name=path.name, json=json, end_of_text=end_of_text)


def _from_metadata(values: Mapping[str, Any], path: Path) -> str:
    model, kind = values.get(f"{PREFIX}.model"), values.get(f"{PREFIX}.pre")
    if model != BYTE_LEVEL or kind not in CUTS:
        raise UserError(
            f"the tokenizer in {str(path)!r} must be {BYTE_LEVEL!r} of kind {', '.join(CUTS)}, but is {model!r} of "
            f"{kind!r}; put its {TOKENIZER_FILE} beside the file."
        )
    cut, tokens = CUTS[kind], values[f"{PREFIX}.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values.get(f"{PREFIX}.merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.whole_first))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.then_gpt2)
    first = [] if cut.pattern is None else [pre_tokenizers.Split(Regex(cut.pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = list(zip(tokens, values.get(f"{PREFIX}.token_type", ()), strict=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, its in types if its == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, its in types if its == USER_DEFINED])
    return str(tokenizer.to_str())
