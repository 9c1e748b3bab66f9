"""A GGUF file is the model that transformers would run on its weights, as `gguf` itself dequantises them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from nas.conversion import checkpoint_memory  # noqa: E402
from nas.conversion.gguf_file import load_gguf  # noqa: E402
from nas.conversion.huggingface import to_transformers  # noqa: E402
from nas.conversion.parent import load_parent, read_parent_architecture  # noqa: E402
from nas.model.decoder import Decoder, build  # noqa: E402
from nas.model.weights import deployed_weights, load_deployed  # noqa: E402
from search_spaces.architecture import Architecture, arch_id  # noqa: E402
from search_spaces.bases import Dimensions, base_architecture  # noqa: E402

LLAMA = base_architecture(
    "smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=64, vocab=300, context=16)
)
UNTIED = replace(LLAMA, tied_embeddings=False, num_kv_heads=None, head_size=16)
QWEN2 = replace(LLAMA, block="qwen2")
THEIRS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "<|end|>", "\u0120x", *(f"<{index}>" for index in range(42))]
TEXT = "def f(x):\n\treturn 1234 + x # \u00e7a va?<|end|> don't"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Orders rows of queries and keys as llama.cpp does: halves of a head become neighbours."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def their_name(name: str) -> str:
    layer = name.split(".")[2] if name.startswith("model.layers.") else None
    (theirs,) = (new for old, new in THEIRS.items() if old in name)
    return (theirs if layer is None else f"blk.{layer}.{theirs}") + "." + name.rpartition(".")[2]


def settings_of(architecture: Architecture) -> dict[str, Any]:
    return {
        "block_count": architecture.num_layers,
        "context_length": architecture.context,
        "embedding_length": architecture.d_model,
        "feed_forward_length": architecture.d_ff,
        "attention.head_count": architecture.num_heads,
        "attention.head_count_kv": architecture.num_kv_heads or architecture.num_heads,
        "attention.key_length": architecture.head_dim,
        "rope.freq_base": architecture.rotary_base,
        "attention.layer_norm_rms_epsilon": architecture.norm_epsilon,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * 43,
        "tokenizer.ggml.merges": ["\u0120 x"],
        "tokenizer.ggml.eos_token_id": 256,
    }


def write(
    path: Path,
    architecture: Architecture = LLAMA,
    form: str = "F32",
    *,
    family: str | None = None,
    lacking: str | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Returns the weights that are in the file, by transformers' names.

    form: of matrices. lacking: a tensor to leave out. changes: of settings, with `__` for a dot.
    """
    theirs = to_transformers(architecture, deployed_weights(build(architecture, torch.Generator().manual_seed(0))))
    heads, key_heads = architecture.num_heads, architecture.num_kv_heads or architecture.num_heads
    writer = gguf.GGUFWriter(path, family or architecture.block)
    for name, value in (settings_of(architecture) | {k.replace("__", "."): v for k, v in changes.items()}).items():
        full = name if name.startswith("tokenizer.") else f"{family or architecture.block}.{name}"
        writer.add_key_value(full, value, gguf.GGUFValueType.get_type(value)) if value is not None else None
    stored = {}
    for name, value in theirs.state_dict().items():
        if (name == "lm_head.weight" and architecture.tied_embeddings) or their_name(name) == lacking:
            continue
        kind = gguf.GGMLQuantizationType[form if value.ndim > 1 else "F32"]
        rows = value.numpy()
        stored[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(rows, kind), kind))
        if architecture.block == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = permuted(rows, heads if "q_proj" in name else key_heads)
        writer.add_tensor(their_name(name), gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize(("architecture", "form"), [(LLAMA, "Q4_1"), (UNTIED, "Q8_0"), (QWEN2, "F16"), (LLAMA, "F32")])
def test_a_file_is_the_model_of_its_dequantised_weights(tmp_path: Path, architecture: Architecture, form: str) -> None:
    path = tmp_path / "tiny.gguf"
    stored = write(path, architecture, form)
    loaded = load_gguf(str(path))
    assert arch_id(loaded.architecture) == arch_id(architecture)
    model = to_transformers(loaded.architecture, loaded.weights)
    for name, value in stored.items():
        assert torch.equal(model.state_dict()[name], value), name
    ours = Decoder(architecture)
    load_deployed(ours, loaded.weights)
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    assert f"{form} tensors" in loaded.notes[0] or f"{form}, " in loaded.notes[0]


def test_its_tokenizer_is_that_of_the_metadata_or_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path)
    given = load_parent(str(path)).model.tokenizer
    assert given is not None
    assert given.end_of_text == "<|end|>"
    tokenizer = Tokenizer.from_str(given.json)
    encoded = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == TEXT
    assert [token for token in encoded.tokens if len(token) > 1] == ["\u0120x", "<|end|>"]
    (tmp_path / "tokenizer.json").write_text(given.json.replace("\u0120x", "\u0120q"), encoding="utf-8")
    beside = load_gguf(str(path)).tokenizer
    assert beside is not None
    assert "\u0120q" in beside.json


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gemma"}, "must be a model of llama or qwen2, but is of 'gemma'"),
        ({"lacking": "blk.1.ffn_up.weight"}, "must hold all weights of its settings, but lacks 'blk.1.ffn_up.weight'"),
        ({"lacking": "token_embd.weight"}, "lacks 'token_embd.weight'"),
        ({"block_count": None}, "lacks the setting 'llama.block_count'"),
        ({"block_count": 1}, "must hold the weights of its settings alone, but has 'blk.1.attn_k.weight' too"),
        ({"feed_forward_length": 32}, r"'blk.0.ffn_gate.weight' of shape \(32, 32\), but it is \(64, 32\)"),
        ({"block_count": 2_000_000_000}, "the number of layers must be from 1 to 500, but is 2000000000"),
        ({"attention__head_count_kv": 3}, r"tiny.gguf' must have .* but: `num_kv_heads` must divide `num_heads`"),
        ({"attention__head_count": 0}, "`attention.head_count` of .* must divide the width, 32, but is 0"),
        ({"rope__scaling__type": "yarn"}, "`rope.scaling.type` of .* must be 'none', but is 'yarn'"),
        ({"rope__scaling__factor": 4.0}, "`rope.scaling.factor` of .* is linear then, but is 4; it cannot be imported"),
        ({"rope__scale_linear": 2.0}, "`rope.scaling.factor` of .* is linear then, but is 2; it cannot be imported"),
        ({"attention__sliding_window": 8}, "`attention.sliding_window` of .* must be 0, but is 8"),
        ({"rope__dimension_count": 4}, "`rope.dimension_count` of .* must be 8, but is 4"),
        ({"tokenizer__ggml__pre": "viking"}, "but is 'gpt2' of 'viking'; put its tokenizer.json beside the file"),
        ({"tokenizer__ggml__model": "llama"}, "must be 'gpt2' of kind .*, but is 'llama' of 'smollm'"),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, **changes)
    with pytest.raises(ValueError, match=message):
        load_gguf(str(path))
    with pytest.raises(ValueError, match=message):  # as a dry run reads it
        read_parent_architecture(str(path))


def test_what_gguf_cannot_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.raises(ValueError, match="must be a GGUF file, but there is none"):
        load_gguf(str(path))
    write(path, form="Q8_0")
    monkeypatch.setattr(checkpoint_memory, "free_bytes", lambda: 10**5)
    with pytest.raises(ValueError, match=r"has 37,\d+ weights, which take .* kB to load"):
        load_gguf(str(path))
    monkeypatch.undo()

    def dequantize(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(ValueError, match="must be in forms that gguf can dequantise, but 'token_embd.weight' is Q8_0"):
        load_gguf(str(path))
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(ValueError, match=r"must be a whole GGUF file, but: .*[^.]; get it again, or convert it\.$"):
        load_gguf(str(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope__scaling__factor": 1.0},
        {"rope__scale_linear": 0.0},
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
        {"attention__sliding_window": 16},
    ],
)
def test_settings_that_change_nothing_are_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, **changes)
    assert arch_id(load_gguf(str(path)).architecture) == arch_id(LLAMA)
