"""Small models of transformers, of random weights, that tests trace."""

from functools import partial

import pytest

transformers = pytest.importorskip("transformers")

SEQ_LEN, VOCAB, WIDTH, HEADS, HEAD_DIM = 9, 40, 32, 4, 8
SIZE = {
    "num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
}  # fmt: skip
SHARED_HEADS = {**SIZE, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125, "logits_scaling": 8.0,
}  # fmt: skip


def decoder(kind, sizes=SHARED_HEADS, **changes):
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **NO_SPECIAL, **changes})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


granite, llama = partial(decoder, "Granite"), partial(decoder, "Llama")
gemma2 = partial(decoder, "Gemma2", query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=1.5)
falcon = partial(decoder, "Falcon", SIZE, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=48)


def bert(kind="ForSequenceClassification", **changes):
    config = transformers.BertConfig(**SIZE, layer_norm_eps=1e-5, **changes)
    return getattr(transformers, f"Bert{kind}")(config)


def roberta(kind="ForSequenceClassification"):
    config = transformers.RobertaConfig(**SIZE, layer_norm_eps=1e-5)
    return getattr(transformers, f"Roberta{kind}")(config)


def cohere():
    return transformers.CohereForCausalLM(
        transformers.CohereConfig(**SIZE, num_key_value_heads=2, rope_theta=10_000.0, **NO_SPECIAL)
    )


def openai_gpt():
    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    return transformers.OpenAIGPTLMHeadModel(config)


def gpt2(**changes):
    config = transformers.GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCAB, n_positions=32, bos_token_id=None, eos_token_id=None,
        **changes,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def clip():
    config = transformers.CLIPTextConfig(**SIZE, max_position_embeddings=32, eos_token_id=2, bos_token_id=0)
    return transformers.CLIPTextModel(config)


def pythia(**changes):
    config = transformers.GPTNeoXConfig(
        **{**SIZE, **changes}, max_position_embeddings=32, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPTNeoXForCausalLM(config)


def qwen2(**changes):
    config = transformers.Qwen2Config(**{**SIZE, "num_key_value_heads": 2, **changes}, **NO_SPECIAL)
    return transformers.Qwen2ForCausalLM(config)
