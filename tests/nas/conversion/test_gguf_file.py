from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from costmodel.errors import UserError  # noqa: E402
from costmodel.ops.rotary import RotaryScaling  # noqa: E402
from nas.conversion import pretrained  # noqa: E402
from nas.conversion.gguf_file import load_gguf  # noqa: E402
from nas.conversion.huggingface import to_transformers  # noqa: E402
from nas.conversion.parent import load_parent, read_parent_architecture  # noqa: E402
from nas.model.decoder import build  # noqa: E402
from nas.model.weights import deployed_weights  # noqa: E402
from search_spaces.architecture import Architecture, arch_id  # noqa: E402
from search_spaces.bases import Dimensions, base_architecture  # noqa: E402
from search_spaces.checkpoints.checkpoint import read_checkpoint  # noqa: E402
from search_spaces.positions import Positions  # noqa: E402
from tests.nas.conversion.test_families import FAMILIES, assert_close, ours, their_model  # noqa: E402

LLAMA = base_architecture(
    "smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=64, vocab=300, context=16)
)
UNTIED = replace(LLAMA, tied_embeddings=False, num_kv_heads=None, head_size=16)
QWEN2 = replace(LLAMA, block="qwen2")
GPT2 = base_architecture("gpt2-small", Dimensions(layers=2, heads=4, d_model=32, vocab=300, context=16))
TYPES = {"gpt_neox": "gptneox", "gemma3_text": "gemma3", "mistral": "llama"}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "<|end|>", "\u0120x", *(f"<{index}>" for index in range(42))]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * 43,
    "tokenizer.ggml.merges": ["\u0120 x"],
    "tokenizer.ggml.eos_token_id": 256,
}
EPSILONS = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
FILES: dict[str, dict[str, Any]] = {  # of the models of FAMILIES, changed to what a file can say
    "gpt2": {},
    "llama-linear": {},
    "mistral": {},
    "phi3": {},
    "phi3-partly": {},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "qwen3": {},
    "granite": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8, "num_hidden_layers": 7, "_sliding_window_pattern": 6},
    "olmo2": {},
    "starcoder2": {},
    "stablelm": {},
    "stablelm2": {},
    "gpt_neox": {},
    "gpt_neox-whole": {"use_parallel_residual": True},
}
TEXT = "def f(x):\n\treturn 1234 + x # \u00e7a va?<|end|> don't"


def stored(model: Any) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp writes for a model of transformers."""
    config, state, family = (
        model.config,
        model.state_dict(),
        TYPES.get(model.config.model_type, model.config.model_type),
    )
    heads, modules = config.num_attention_heads, {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names, tensors = gguf.get_tensor_name_map(modules[family], config.num_hidden_layers), {}
    for name, value in state.items():
        module, _, suffix = name.rpartition(".")
        if module in ("lm_head", "embed_out") and config.tie_word_embeddings:
            continue
        rows, rest = value.float().numpy(), value.shape[1:]
        if family in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):  # halves of a head
            groups = heads if "q_proj" in name else config.num_key_value_heads  # become neighbours
            rows = rows.reshape(groups, 2, -1, *rest).swapaxes(1, 2).reshape(value.shape)
        if "query_key_value" in name:  # heads x (query, key, value)
            rows = rows.reshape(heads, 3, -1, *rest).swapaxes(0, 1).reshape(value.shape)
        if family == "gpt2" and "transformer.h." in name and value.ndim == 2:
            rows = rows.T
        rows = rows + 1 if family.startswith("gemma") and "norm" in name else rows
        tensors[f"{names.get_name(module) or 'output'}.{suffix}"] = np.ascontiguousarray(rows, dtype=np.float32)
    return tensors


def settings_of(config: Any) -> dict[str, Any]:
    """The settings that llama.cpp writes for a config of transformers, without the name of its family."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    epsilon = next((getattr(config, name) for name in EPSILONS if hasattr(config, name)), None)
    rms = hasattr(config, "rms_norm_eps")
    given = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps if rms else None,
        "attention.layer_norm_epsilon": None if rms else epsilon,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)) if rope else None,
        "rope.scaling.type": "linear" if "factor" in rope else None,
        "rope.scaling.factor": rope.get("factor"),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
        "use_parallel_residual": getattr(config, "use_parallel_residual", None),
    }
    return {name: value for name, value in given.items() if value is not None} | TOKENIZER


def write(
    path: Path,
    model: Any = LLAMA,
    form: str = "F32",
    *,
    family: str | None = None,
    lacking: str | None = None,
    **changes: Any,
) -> Any:
    """Returns transformers' model of the weights that are in the file.

    model: theirs, or an architecture of ours. form: of matrices. lacking: a tensor to leave out. changes: of settings,
    with `__` for a dot; None leaves one out.
    """
    if isinstance(model, Architecture):
        model = to_transformers(model, deployed_weights(build(model, torch.Generator().manual_seed(0))))
    kind = gguf.GGMLQuantizationType[form]
    with torch.no_grad():
        for parameter in model.parameters() if form != "F32" else ():
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    name = family or TYPES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, name)
    for key, value in (settings_of(model.config) | {k.replace("__", "."): v for k, v in changes.items()}).items():
        full = key if key.startswith("tokenizer.") else f"{name}.{key}"
        writer.add_key_value(full, value, gguf.GGUFValueType.get_type(value)) if value is not None else None
    for tensor, rows in stored(model).items():
        of = kind if rows.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor, gguf.quantize(rows, of), raw_dtype=of) if tensor != lacking else None
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(("name", "changes"), FILES.items())
def test_a_file_of_a_family_has_the_logits_of_its_model(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    path = tmp_path / "tiny.gguf"
    theirs = write(path, their_model(name, **changes) if name in FAMILIES else GPT2)
    loaded = load_gguf(str(path))
    tokens = torch.randint(40, (2, min(loaded.architecture.context, 20)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(ours(loaded)(tokens).logits, theirs(tokens).logits)
    assert len({value.untyped_storage().data_ptr() for value in loaded.weights.values()}) == len(loaded.weights)


@pytest.mark.parametrize(("architecture", "form"), [(LLAMA, "Q4_1"), (UNTIED, "Q8_0"), (QWEN2, "F16"), (LLAMA, "F32")])
def test_a_file_is_the_model_of_its_dequantised_weights(tmp_path: Path, architecture: Architecture, form: str) -> None:
    path = tmp_path / "tiny.gguf"
    theirs = write(path, architecture, form)
    loaded = load_gguf(str(path))
    assert arch_id(loaded.architecture) == arch_id(architecture)
    again = to_transformers(loaded.architecture, loaded.weights).state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(again[name], value), name
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
    (tmp_path / "tokenizer.json").write_text(given.json.replace("<3>", "<q>"), encoding="utf-8")
    beside = load_gguf(str(path)).tokenizer
    assert beside is not None
    assert "<q>" in beside.json
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"generation_config\.json must be a mapping of settings; restore it"):
        load_gguf(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mamba"}, "must be a model of type gpt2, .*, opt, but is of 'mamba'"),
        ({"lacking": "blk.1.ffn_up.weight"}, "must hold all weights of its settings, but lacks 'blk.1.ffn_up.weight'"),
        ({"lacking": "token_embd.weight"}, "lacks 'token_embd.weight'"),
        ({"block_count": None}, "lacks the setting 'llama.block_count'"),
        ({"block_count": 1}, "must hold the weights of its settings alone, but has 'blk.1.attn_k.weight' too"),
        ({"feed_forward_length": 32}, r"'blk.0.ffn_gate.weight' of shape \(32, 32\), but it is \(64, 32\)"),
        ({"block_count": 2_000_000_000}, "the number of layers must be from 1 to 500, but is 2000000000"),
        ({"attention__head_count_kv": 3}, r"tiny.gguf' must have .* but: `num_kv_heads` must divide `num_heads`"),
        ({"attention__head_count": 0}, "`attention.head_count` of .* must divide the width, 32, but is 0"),
        ({"rope__scaling__type": "yarn"}, "must be 'default', 'linear' or 'llama3', but is 'yarn' .YaRN."),
        ({"rope__dimension_count": 4}, "`rope.dimension_count` of .* must be 8, but is 4"),
        ({"tokenizer__ggml__pre": "viking"}, "kind 'gpt2', cut as 'viking', is not known; put the model's tokeniz"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__add_space_prefix": False}, "'smollm' without a space"),
        ({"tokenizer__ggml__model": "bert"}, "the tokenizer in .* must be one that can be read, but: kind 'bert'"),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, **changes)
    with pytest.raises(ValueError, match=message):
        load_gguf(str(path))
    with pytest.raises(ValueError, match=message):  # as a dry run reads it
        read_parent_architecture(str(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope__scaling__factor": 4.0}, {"positions": (Positions(scaling=RotaryScaling(factor=4.0)),)}),
        ({"rope__scale_linear": 2.0}, {"positions": (Positions(scaling=RotaryScaling(factor=2.0)),)}),
        ({"rope__scaling__factor": 1.0}, {}),
        ({"rope__scale_linear": 0.0}, {}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {}),
        ({"attention__sliding_window": 16}, {}),
        ({"attention__sliding_window": 8}, {"positions": (Positions(window=8),), "context": 8, "longest_context": 16}),
    ],
)
def test_scaled_angles_and_windows_are_taken(tmp_path: Path, changes: dict[str, Any], said: dict[str, Any]) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, **changes)
    for read in (load_gguf(str(path)).architecture, read_checkpoint(str(path)).model):
        assert read == replace(LLAMA, **said)


def test_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    path, pieces = tmp_path / "tiny.gguf", ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-6.0, -5.0, -4.0, -2.0, -1.0, -3.0]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6]
    described: dict[str, Any] = {"model": "llama", "pre": "default", "merges": None, "tokens": tokens, "scores": scores}
    described |= {"token_type": kinds, "eos_token_id": 2}
    changes: dict[str, Any] = {f"tokenizer__ggml__{name}": value for name, value in described.items()}
    write(path, **changes)
    given = load_gguf(str(path)).tokenizer
    assert given is not None
    assert given.end_of_text == "</s>"
    tokenizer = Tokenizer.from_str(given.json)
    encoded = tokenizer.encode("ab a\u00e7</s>b", add_special_tokens=False)
    assert encoded.tokens == ["\u2581ab", "\u2581a", "<0xC3>", "<0xA7>", "</s>", "b"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "ab a\u00e7</s>b"


def test_what_gguf_cannot_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.raises(ValueError, match="must be a GGUF file, but there is none"):
        load_gguf(str(path))
    write(path, form="Q8_0")
    monkeypatch.setattr(pretrained, "free_bytes", lambda: 10**5)
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
