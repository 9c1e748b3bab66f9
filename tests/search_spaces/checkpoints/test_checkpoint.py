import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import costmodel
from search_spaces.architecture import Architecture
from search_spaces.checkpoints.checkpoint import Settings, is_checkpoint, read_checkpoint

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def saved(kind: str, folder: Path, **settings: Any) -> str:
    """A folder with the settings of a small model alone."""
    getattr(transformers, f"{kind}Config")(**SIZES, **settings).save_pretrained(folder)
    return str(folder)


def test_a_folder_its_config_and_a_traced_module_cost_the_same(tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path, num_key_value_heads=2)
    priced, from_file = (
        costmodel.price(name, protocol="semi2k", seq_len=16) for name in (folder, f"{folder}/config.json")
    )
    traced = costmodel.price(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)),
        protocol="semi2k",
        seq_len=16,
    )
    assert priced.total == from_file.total
    assert (priced.sent_bytes, priced.rounds) == (traced.sent_bytes, traced.rounds)
    assert priced.asked.heading == f"{folder} (block llama), T=16"
    assert priced.deployed is not None


def test_a_family_that_is_no_block_of_ours_is_traced_without_weights_and_no_architecture(tmp_path: Path) -> None:
    folder = saved("Phi", tmp_path)
    checkpoint = read_checkpoint(folder)
    assert {value.device.type for value in checkpoint.model.parameters()} == {"meta"}
    assert checkpoint.unlike is not None
    assert "'phi'" in checkpoint.unlike
    priced = costmodel.price(folder, protocol="semi2k", seq_len=16)
    assert priced.asked.heading == f"{folder} (traced from PhiForCausalLM), T=16"
    assert priced.sent_bytes > 0
    from search_spaces.bases import BASES
    from search_spaces.resolve import resolve

    with pytest.raises(costmodel.UserError, match="'phi'.* It is only priced, by `python -m costmodel estimate`"):
        resolve(saved("Phi", tmp_path), BASES["gpt2-small"])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "activation_function": "silu"},
         "the activation of .* must be one of gelu_new, .*, but is 'silu'"),
        ({"model_type": "llama", **SIZES, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
         "`rope_type` of .* must be 'default', 'linear' or 'llama3', but is 'yarn' .YaRN.; it cannot be imported"),
    ],
)  # fmt: skip
def test_a_variant_of_a_known_family_is_traced_and_says_why(tmp_path: Path, settings: Any, why: str) -> None:
    priced = costmodel.price(written(tmp_path, settings), protocol="semi2k", seq_len=16)
    assert re.search(rf"\(traced from \w+, since {why}\), T=16$", priced.asked.heading)
    assert priced.sent_bytes > 0


def test_a_model_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, **large).save_pretrained(tmp_path)
    architecture = read_checkpoint(str(tmp_path)).model
    assert isinstance(architecture, Architecture)
    assert (architecture.num_layers, architecture.d_model) == (80, 8192)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{folder}", "but the folder has no config.json"),
        ("{folder}/nothing", "but there is no such folder"),
        ("{folder}/nothing.gguf", "must be a GGUF file, but there is none"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, name: str, said: str) -> None:
    assert is_checkpoint(name.format(folder=tmp_path))
    with pytest.raises(costmodel.UserError, match=said) as refused:
        costmodel.price(name.format(folder=tmp_path), protocol="semi2k")
    assert "\n" not in str(refused.value)


def test_text_is_no_number_of_a_gguf_file() -> None:
    settings = Settings("a.gguf", {"general.architecture": "llama", "llama.block_count": "12" * 99})
    with pytest.raises(costmodel.UserError, match=r"`llama.block_count` of 'a.gguf' must be a number, but is '12"):
        settings.own("block_count")
    assert Settings("a.gguf", {"general.architecture": "llama"}).own("rope.scaling.type", "linear") == "linear"


@pytest.mark.parametrize(
    "name", ["SM+LN+G", "EReg(SM(t)+ScFuFFN)", "6xLSLGo-6xoSoFs", "some.module:factory", "a/b.yaml"]
)
def test_other_names_stay_what_they_are(name: str) -> None:
    assert not is_checkpoint(name)


# All that published files have of each family.
USUAL: dict[str, Any] = {
    "_name_or_path": "x", "architectures": ["X"], "bos_token_id": 1, "eos_token_id": [1, 2], "initializer_range": 0.04,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "attention_dropout": 0.1,
    "_model_name_or_path": "X", "unk_token_id": 0,  # transformers takes these from a GGUF file
}  # fmt: skip
ROTARY = {"rope_theta": 1e4, "rope_scaling": None, "pretraining_tp": 2}
LLAMA3: dict[str, Any] = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 16}
JS = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}
GEMMA: dict[str, Any] = {"attention_bias": False, "cache_implementation": "hybrid", "head_dim": 8}
GEMMA |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e4}
GEMMA2 = {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8}
GEMMA3 = {**GEMMA2, "rope_local_base_freq": 1e4, "sliding_window": 16, "sliding_window_pattern": 6}
WINDOW = {"max_window_layers": 2, "sliding_window": 32, "use_mrope": False, "use_sliding_window": False}
GPT2: dict[str, Any] = {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 96}
GPT2 |= {"activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
GPT2 |= {"layer_norm_epsilon": 1e-5, "summary_type": "cls_index", "summary_first_dropout": 0.2}
GPT2 |= {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "n_inner": None}
OPT: dict[str, Any] = {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"}
OPT |= {"do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 64, "init_std": 0.02, "layerdrop": 0.0}
OPT |= {"prefix": "</s>", "word_embed_proj_dim": 32, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96}
OPT |= {"num_hidden_layers": 2, "max_position_embeddings": 64}
STARCODER2: dict[str, Any] = {"mlp_type": "default", "norm_type": "layer_norm", "use_bias": True, "rope_theta": 9999.4}
STARCODER2 |= {"hidden_act": "gelu_pytorch_tanh", "embedding_dropout": 0.1, "residual_dropout": 0.1}
PHI3: dict[str, Any] = {"auto_map": {"AutoConfig": "a.B"}, "embd_pdrop": 0.0, "attention_bias": False}
PHI3 |= {"original_max_position_embeddings": 64, "sliding_window": 47, "lm_head_bias": False, "full_attn_mod": 1}
GRANITE = {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False}
PYTHIA = {"hidden_act": "gelu", "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {**ROTARY, "max_length": 4096}),
    "llama 3.1": ("llama", {**ROTARY, "rope_scaling": LLAMA3, "mlp_bias": False, "head_dim": 8}),
    "smollm2": ("llama", {**ROTARY, **JS, "is_llama_config": True, "rope_interleaved": False}),
    "smollm3": ("smollm3", {**ROTARY, **WINDOW, "no_rope_layers": [1, 0], "no_rope_layer_interval": 4}),
    "mistral": ("mistral", {"rope_theta": 1e4, "sliding_window": 32, "head_dim": None}),
    "qwen 2.5": ("qwen2", {**WINDOW, "rope_theta": 1e6}),
    "qwen 3": ("qwen3", {**ROTARY, **WINDOW, "attention_bias": False, "head_dim": 16}),
    "gemma": ("gemma", GEMMA),
    "gemma 2": ("gemma2", {**GEMMA2, "sliding_window": 32}),
    "gemma 3": ("gemma3_text", {**GEMMA3, "use_bidirectional_attention": False}),
    "phi 3": ("phi3", PHI3),
    "granite": ("granite", {**GRANITE, **ROTARY, "residual_multiplier": 0.2, "attention_bias": False}),
    "olmo 2": ("olmo2", {"rope_theta": 5e5, "rope_scaling": None, "attention_bias": False}),
    "starcoder 2": ("starcoder2", STARCODER2),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "rope_theta": 1e4, "use_qkv_bias": True}),
    "pythia": ("gpt_neox", {**PYTHIA, "attention_bias": True, "classifier_dropout": 0.1}),
    "gpt 2": ("gpt2", GPT2),
    "opt": ("opt", OPT),
}


def written(folder: Path, settings: dict[str, Any] | str) -> str:
    (folder / "config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_of_published_models_are_all_known(tmp_path: Path, name: str) -> None:
    kind, settings = PUBLISHED[name]
    sizes = {} if kind in ("gpt2", "opt") else {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 4}
    sizes |= {"hidden_size": 64} if kind in ("stablelm", "gpt_neox") else {}
    made = read_checkpoint(written(tmp_path, {"model_type": kind, **sizes, **USUAL, **settings}))
    assert isinstance(made.model, Architecture), made.unlike
    with pytest.raises(costmodel.UserError, match="`reads_backwards` of .* is 1"):
        read_checkpoint(written(tmp_path, {"model_type": kind, **sizes, **settings, "reads_backwards": 1}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_layer": -3}, "the number of layers must be from 1 to 500, but is -3"),
        ({"n_layer": 100_000}, "the number of layers must be from 1 to 500, but is 100000"),
        ({"n_layer": [2]}, r"the number of layers must be from 1 to 500, but is \[2\]"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**12}, "the number of layers must be from 1 to 500"),
        ({"model_type": "phi", "num_hidden_layers": 100_000}, "the number of layers must be from 1 to 500"),
        ({"n_embd": 10**60}, "`n_embd` of .* must be at most 2147483648, but is a number of 61 digits"),
        ({"n_embd": 0}, "`n_embd` of .* must be at least 1, but is 0"),
        ({"n_head": 0}, "`n_head` of .* must be at least 1, but is 0"),
        ({"n_embd": "32"}, "n_embd"),
        ({"n_embd": True}, "`n_embd` of .* must be a whole number, but is True"),
        ({"n_head": [4]}, "n_head"),
        ({"n_embd": 0, "activation_function": "silu"}, "`n_embd` of .* must be at least 1, but is 0"),
        ({"n_positions": -1, "scale_attn_by_inverse_layer_idx": True}, "`n_positions` of .* must be at least 1"),
        *(
            (
                {"model_type": kind, "hidden_size": value},
                "`hidden_size` of .* must be (at least 1|a whole number), but is",
            )
            for kind in ("phi", "llama", "gemma2", "opt", "gpt_neox")
            for value in (0, -3, "32", 2.5, True)
        ),
        *(
            ({"model_type": kind, "vocab_size": value}, "vocab_size")
            for kind in ("phi", "qwen2")
            for value in (math.inf, 2**40, {"a": "b"})
        ),
        ({"activation_function": 3}, "activation_function"),
        ({"activation_function": ["relu"]}, "activation_function"),
        ({"layer_norm_epsilon": math.nan}, "`layer_norm_epsilon` of .* must be a number, but is nan"),
        ({"model_type": ["gpt2"]}, "can be read, but"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": "2"}}, "`factor` of .* but is '2'"),
        ({"model_type": "llama", "rope_scaling": {"type": 3, "factor": 2.0}}, "`rope_type` of .* but is 3"),
        ('{"model_type": "gpt2", "n_layer": ' + "9" * 5000 + "}", "can be read, but"),
        ('{"a":' * 100_000, "can be read, but"),
        ("[" * 100_000, "can be read, but"),
        ("[1]", "can be read, but"),
        ("3", "can be read, but"),
        (" " * (2**24 + 1), "must be settings of at most 16,777,216 bytes"),
    ],
)
def test_settings_of_no_model_are_refused_in_one_line(tmp_path: Path, settings: Any, said: str) -> None:
    """Not traced: only a model that no block is, and that can be made, is."""
    folder = written(tmp_path, settings if isinstance(settings, str) else {"model_type": "gpt2", **settings})
    with pytest.raises(costmodel.UserError, match=said) as refused:
        costmodel.price(folder, protocol="semi2k")
    assert "\n" not in str(refused.value)
