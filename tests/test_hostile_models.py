"""What a stranger's model does to a command: weights, SentencePiece models, pickles and GGUF files, a row each."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import costmodel.__main__
from costmodel.errors import UserError
from nas.conversion.parent import load_initial
from nas.corpus import foreign_tokenizer
from tests.test_hostile_files import in_little_memory, refused  # noqa: F401  # a fixture of every test


def field(number: int, content: bytes | int) -> bytes:
    """A field of a protocol buffer: an integer or bytes."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


SETTINGS = field(2, field(3, 2)) + field(3, field(1, b"identity") + field(3, 0))
SENTENCEPIECES = {  # content of a tokenizer.model, and what is said of it
    "another file": (b"\x7fELF" * 1000, "must be a whole SentencePiece model"),
    "a long piece": (field(1, field(1, b"a" * 200_000)) + SETTINGS, "at most 128 characters, but one has 200,000"),
    "pieces of each other": (
        b"".join(field(1, field(1, b"a" * length)) for length in range(1, 1500)) + SETTINGS, "at most 128 characters",
    ),
    "megabytes": (field(9, bytes(10_000_000)) + SETTINGS, "at most 8,388,608 bytes"),
    "groups in groups": (b"\x0b" * 1000 + b"\x0c" * 1000 + SETTINGS, "must be a whole SentencePiece model"),
    "a number for a piece": (field(1, 5) + SETTINGS, "must be a whole SentencePiece model"),
    "a number for settings": (field(2, 5) + field(3, 5), "must be a whole SentencePiece model"),
    "half a pair": (field(1, field(1, b"\xed\xa0\x80")) + SETTINGS, "must be a whole SentencePiece model"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SENTENCEPIECES)
def test_a_hostile_sentencepiece_model_is_refused_in_one_line(capfd, kind):
    content, why = SENTENCEPIECES[kind]
    with pytest.raises(UserError, match=why) as error:
        foreign_tokenizer.to_json(content)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


class Code:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("made-by-a-pickle",)


PICKLES: dict[str, Callable[[Path], object]] = {
    "code": lambda path: torch.save({"embed": Code()}, path),
    "code in an old file": lambda path: torch.save(Code(), path, _use_new_zipfile_serialization=False),
    "no pickle": lambda path: path.write_bytes(b"PK\3\4" + bytes(1000)),
    "nothing": lambda path: path.touch(),
}


@pytest.fixture
def llama() -> Any:
    """A small model of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


@pytest.mark.needs_hf
@pytest.mark.parametrize("kind", PICKLES)
def test_a_hostile_pickle_is_refused_in_one_line_without_advice_to_run_it(llama, tmp_path, monkeypatch, kind):
    llama.config.save_pretrained(tmp_path)
    PICKLES[kind](tmp_path / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="must be a folder of save_pretrained") as error:
        load_initial(str(tmp_path))
    assert "\n" not in str(error.value)
    assert "weights_only" not in str(error.value)
    assert not (tmp_path / "made-by-a-pickle").exists()


STATES: dict[str, tuple[Callable[[str, Any], tuple[str, Any]], str]] = {  # of each weight, by name
    "zero embedding": (lambda name, value: (name, value * ("embed" not in name)), "must have an embedding"),
    "weights of 1e30": (lambda name, value: (name, value * 1e30), "must be at most 2^45"),
    "no numbers": (lambda name, value: (name, value / 0), "must be finite"),
    "eight bits": (lambda name, value: (name, value.to(torch.float8_e4m3fn)), "must be finite floating-point"),
    "integers": (lambda name, value: (name, value.long()), "must be finite floating-point"),
    "another shape": (lambda name, value: (name, value[..., :3].contiguous()), "lacks or misshapes"),
    "compiled": (lambda name, value: (f"_orig_mod.{name}", value), "begin with '_orig_mod.', so"),
    "parallel": (lambda name, value: (f"module.{name}", value), "begin with 'module.', so"),
    "adapted": (lambda name, value: (f"base_model.{name}", value), "begin with 'base_model.', so"),
}


@pytest.mark.needs_hf
@pytest.mark.parametrize("kind", STATES)
def test_hostile_weights_are_refused_in_one_line(llama, tmp_path, kind):
    llama.save_pretrained(tmp_path)
    change, why = STATES[kind]
    state = dict(change(name, value.clone()) for name, value in llama.state_dict().items())
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=why.replace("^", r"\^")) as error:
        load_initial(str(tmp_path))
    assert "\n" not in str(error.value)


def named(name: str, kind: int, value: bytes) -> bytes:
    """A setting of a GGUF file."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


MANY = struct.pack("<Q", 1 << 60)
GGUFS = {  # numbers of tensors and of settings, settings, and what is said of them
    "many tensors": (MANY, 0, b"", "must be a whole GGUF file"),
    "many settings": (0, MANY, b"", "must be a whole GGUF file"),
    "a long text": (0, 1, named("general.architecture", 8, MANY), "must be a model of type"),
    "a long name": (0, 1, MANY, "must be a whole GGUF file"),
    "a long array": (0, 1, named("a", 9, struct.pack("<I", 4) + MANY), "more than the file has bytes"),
    "an array of no kind": (0, 1, named("a", 9, struct.pack("<I", 77) + struct.pack("<Q", 1)), "whole GGUF file"),
    "a setting of no kind": (0, 1, named("a", 77, b""), "must be a whole GGUF file"),
    "no settings": (0, 0, b"", "must be a model of type"),
    "parts": (0, 1, named("split.count", 2, struct.pack("<H", 5)), "is one of 5 parts; join them"),
}


@pytest.mark.parametrize("kind", GGUFS)
def test_a_hostile_gguf_file_is_refused_in_one_line(tmp_path, capfd, kind):
    pytest.importorskip("gguf")
    tensors, settings, content, why = GGUFS[kind]
    counts = [count if isinstance(count, bytes) else struct.pack("<Q", count) for count in (tensors, settings)]
    (path := tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + b"".join(counts) + content + bytes(64))
    assert why in refused(costmodel.__main__.main, ["estimate", str(path)], capfd)
