"""Checks settings of transformers: values must be possible, and settings that could change a model must be known."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from costmodel.errors import UserError
from search_spaces.bases import MAX_LAYERS
from search_spaces.checkpoints.families import FAMILIES, Family

LARGEST = 2**31  # of any whole number in settings; several times the longest context
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
WHOLE = ("num_layers", "num_heads", "num_kv_heads", "head_size", "d_model", "d_ff", "vocab_size", "context")
COUNTS = {name for family in FAMILIES for name, ours in family.sizes.items() if ours in WHOLE}
# Settings of positions, which `search_spaces.checkpoints.settings` reads if the configuration class has them.
POSITIONS = frozenset(
    (
        "layer_types", "no_rope_layer_interval", "no_rope_layers",
        "original_max_position_embeddings", "rope_local_base_freq", "sliding_window", "use_sliding_window",
    )
)  # fmt: skip
ROTARY = ("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct")
PATTERNS = ("_sliding_window_pattern", "sliding_window_pattern")  # transformers makes `layer_types` of them
# Settings that do not change the logits of a family's model, whatever their value is: names and versions, tokens,
# initial weights, dropout, number formats and kernels, heads for other tasks, and how text is generated.
HARMLESS = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "_model_name_or_path",
        "_name_or_path", "_num_labels", "architectures", "attn_implementation", "auto_map", "dtype", "finetuning_task",
        "gradient_checkpointing", "id2label", "is_decoder", "is_llama_config", "label2id", "max_sequence_length",
        "model_max_length", "model_type", "n_ctx", "name_or_path", "neftune_noise_alpha", "num_labels",
        "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "quantization_config",
        "return_dict", "seq_length", "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype",
        "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache", "use_reentrant_checkpointing",
        "begin_suppress_tokens", "bos_token", "bos_token_id", "decoder_start_token_id", "eos_token", "eos_token_id",
        "forced_bos_token_id", "forced_eos_token_id", "pad_token", "pad_token_id", "prefix", "sep_token_id",
        "unk_token_id",
        "init_std", "initializer_factor", "initializer_range",
        "activation_dropout", "attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop",
        "embedding_dropout", "hidden_dropout", "layerdrop", "resid_pdrop", "residual_dropout", "summary_first_dropout",
        "attention_softmax_in_fp32", "chunk_size_feed_forward", "reorder_and_upcast_attn",
        "scale_attention_softmax_in_fp32", "use_flash_attention",
        "summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "bad_words_ids", "cache_implementation", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length",
        "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
        "temperature", "top_k", "top_p", "typical_p",
        "hidden_act", "hidden_activation",  # where transformers reads the other one
        "max_window_layers",  # of which transformers makes `layer_types`, if at all
    )
)  # fmt: skip


def require_sound(settings: Mapping[str, Any], path: str) -> None:
    """Raise UserError for settings that no model can have. path: the checkpoint's name in errors.

    These are a number of layers that is not from 1 to MAX_LAYERS, other sizes that are not whole or below 1, integers
    beyond LARGEST of either sign (unless in HARMLESS), and NaN. This is called before transformers reads the settings,
    because transformers makes lists with an entry per layer.
    """
    for name, value in _leaves(settings):
        if name in LAYER_COUNTS and value is not None and not (_is_integer(value) and 1 <= value <= MAX_LAYERS):
            raise UserError(
                f"{path!r} must have the settings of a model that can be made, but: the number of layers must be from "
                f"1 to {MAX_LAYERS}, but is {shortened(value)}."
            )
        if name in COUNTS and value is not None and not (_is_integer(value) and value >= 1):
            rule = "at least 1" if _is_integer(value) else "a whole number"
            raise UserError(f"`{name}` of {path!r} must be {rule}, but is {shortened(value)}.")
        if name not in HARMLESS and isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"`{name}` of {path!r} must be at most {LARGEST}, but is {shortened(value)}.")
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"`{name}` of {path!r} must be a number, but is {value}.")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values but lists and dictionaries, each after the name of the innermost setting that holds it.

    A list as a number of layers, which is an error, is yielded whole.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part, "" if name in LAYER_COUNTS else name)
        if name in LAYER_COUNTS:
            yield name, value
    else:
        yield name, value


def require_meaning(family: Family, config: Any, path: str) -> None:
    """Raise UserError for a setting that is not among the family's settings and could change the model.

    Such a setting must equal transformers' default, or be off (null, false, 0 or empty) if the default is off too or
    missing. config: the config of transformers. path: the checkpoint's name in errors.
    """
    settings, usual = config.to_dict(), type(config)().to_dict()
    patterns = PATTERNS if "layer_types" in usual else ()
    read = (*family.sizes, family.activation, *family.biases, *family.fixed, *family.read_only, "tie_word_embeddings")
    named = {*read, *patterns, *(POSITIONS & usual.keys()), *(ROTARY if family.turns else ())} | HARMLESS
    heads = config.num_attention_heads
    usual |= {"is_causal": True, "head_dim": config.hidden_size // heads, "num_key_value_heads": heads}  # as all have
    for name, value in settings.items():
        if name in named or (name in usual and value == usual[name]):
            continue
        if (value is None or value in (False, "") or value in ([], {})) and not usual.get(name):
            continue
        remedy = (
            f"must be {usual[name]!r:.80}, but is {shortened(value)}; it cannot be imported"
            if name in usual
            else f"is {shortened(value)}, but has no meaning here; remove it if it changes nothing that is computed"
        )
        raise UserError(f"`{name}` of {path!r} {remedy}.")


def number(settings: Mapping[str, Any], name: str, path: str, *, whole: bool) -> Any:
    """Return the number in setting `name`, None if it is missing. Raises UserError if it is none or must be `whole`."""
    value = settings.get(name)
    if value is None or _is_integer(value) or (not whole and isinstance(value, float) and math.isfinite(value)):
        return value
    kind = "a whole number" if whole else "a finite number"
    raise UserError(f"`{name}` of {path!r} must be {kind}, but is {shortened(value)}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shortened(value: Any) -> str:
    """Return a value as text of at most 80 characters; for integers above 40 digits, only the number of digits."""
    if _is_integer(value) and abs(value) >= 10**40:
        return f"a number of {math.floor(math.log10(abs(value))) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
