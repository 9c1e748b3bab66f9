import json

import pytest

from nas.corpus.documents import GivenTokenizer
from nas.private.prompt import read_prompt


def prompt_of(text, tokenizer, new_tokens=2):
    return read_prompt(text, tokenizer, context=8, new_tokens=new_tokens)


def test_a_prompt_is_its_tokens_and_they_are_its_text(tokenizer):
    prompt = prompt_of("value", tokenizer)
    assert len(prompt.ids) == 1  # merged
    assert prompt.decoded(list(prompt.ids)) == "value"
    assert prompt.decoded([prompt.end]) == "<|endoftext|>"


@pytest.mark.parametrize("text", ["", None])
def test_an_empty_prompt_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="--prompt must be text, such as 'def f.x.:', but is empty"):
        prompt_of(text, tokenizer)


def test_prompt_and_new_tokens_must_fit_into_the_context(tokenizer):
    assert len(prompt_of("abcdef", tokenizer).ids) == 6
    with pytest.raises(ValueError, match="must fit into the context of 8 tokens, but they are 6 . 3; shorten"):
        prompt_of("abcdef", tokenizer, 3)
    with pytest.raises(ValueError, match="--new-tokens must be at least 1, but got 0"):
        prompt_of("a", tokenizer, 0)


def test_characters_that_the_tokenizer_lacks_are_named(tokenizer):
    assert prompt_of("é", tokenizer).ids  # of two bytes, and this one knows all
    data = json.loads(tokenizer.json)
    data["model"]["vocab"] = {
        piece: index for piece, index in data["model"]["vocab"].items() if piece not in ("q", "z")
    }
    data["model"]["merges"] = []
    poor = GivenTokenizer(name="bpe", json=json.dumps(data), end_of_text=tokenizer.end_of_text)
    with pytest.raises(
        ValueError, match="--prompt must be in what the model's tokenizer knows, but that lacks 'z', 'q'"
    ):
        prompt_of("zzq", poor)
