"""A decoder of any architecture as a transformers model: the code that `nas.export --format hf` saves with the weights.

It needs only torch and transformers, which copies the files of relative imports too. Weights have the names of the op
graph's nodes and are in deployed form: temperatures are positive, and the gain of a frozen norm includes the division
by the deviation. Generation caches keys and values, so that a new token runs one position; beyond the context, the last
tokens that fit are run again.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .huggingface_layers import (
    NORMS,
    RMSNORM_EPSILON,
    FeedForward,
    Past,
    SelfAttention,
    ShapedSelfAttention,
    capped,
)

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # by version


class DecoderConfig(PretrainedConfig):
    """Configuration of a decoder: dimensions and layers as plain data (`architecture`), facts of its block (`block`).

    join: `sequential` if the FFN reads the sum with attention, `parallel` if both read the stream, `shaped` if
        attention has no skip connection. rotary_share: one in this many features of a head is rotated; None for a
        position table. packs_qkv: whether queries, keys and values are one linear. biases: linears with a bias if
        others have none. query_key_norm: norms of queries and keys: none, by head, or over the width. norms_after:
        whether attention and FFN end with a norm. A layer's `inner1` and `inner2` say which norms and caps it has.
    """

    model_type = "private-inference-decoder"

    def __init__(
        self, architecture: dict[str, Any] | None = None, block: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.architecture, self.block = architecture, block
        if architecture is not None:
            self.vocab_size, self.hidden_size = architecture["vocab_size"], architecture["d_model"]
            self.num_attention_heads, self.num_hidden_layers = architecture["num_heads"], len(architecture["layers"])
            self.max_position_embeddings = architecture["context"]
            settings = {"tie_word_embeddings": architecture["tied_embeddings"], **settings}
        super().__init__(**{"use_cache": True, **settings})


class _Block(nn.Module):
    """Attention and FFN of one layer, joined as `DecoderConfig` says."""

    def __init__(self, made: dict[str, Any], index: int) -> None:
        super().__init__()
        layer, folded, self.join = made["layers"][index], made.get("folded", False), made["block"]["join"]
        reads_values = self.join == "shaped" and index > 0  # no linear takes up its gain
        size = made["d_model"], made.get("norm_epsilon", RMSNORM_EPSILON)
        self.norm1 = NORMS[layer["norm1"]](*size, not folded or reads_values)
        self.scale = made.get("residual_scale", 1.0)
        self.attention: nn.Module | None = None
        if self.join == "shaped":
            self.attention = ShapedSelfAttention(made, index)
        elif layer["attention"] != "none":
            self.attention = SelfAttention(made, index)
        self.norm2 = NORMS[layer["norm2"]](*size, not folded)
        self.ffn = None if layer["ffn"] == "none" else FeedForward(made, layer)

    def forward(self, stream: Tensor, past: Past) -> Tensor:
        joined = stream
        if self.attention is not None:
            attended: Tensor = self.attention(self.norm1(stream), past)
            attended = attended if self.scale == 1 else attended * self.scale
            joined = attended if self.join == "shaped" else stream + attended
        if self.ffn is not None:
            joined = self.ffn(self.norm2(stream if self.join == "parallel" else joined), joined)
        return joined


class Decoder(nn.Module):
    """Maps tokens to logits. made: `architecture` of a `DecoderConfig`, with the facts of its block as `block`."""

    def __init__(self, made: dict[str, Any]) -> None:
        super().__init__()
        vocab_size, d_model = made["vocab_size"], made["d_model"]
        self.context = made["context"]
        self.cap = made.get("logit_cap")
        self.scales = made.get("embedding_scale", 1.0), made.get("logit_scale", 1.0)
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(self.context, d_model) if made["block"]["rotary_share"] is None else None
        self.layers = nn.ModuleList(_Block(made, index) for index in range(len(made["layers"])))
        self.counts_alone = all(layer.attention is None for layer in self.layers)
        self.final_norm = NORMS[made["final_norm"]](d_model, made.get("norm_epsilon", RMSNORM_EPSILON), True)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor, cache: Any | None = None) -> Tensor:
        """Return logits. tokens: batch x T, after the cached ones. Raises ValueError beyond the context."""
        past, length = Past(cache), tokens.shape[1]
        first = past.num_positions
        if first + length > self.context:
            raise ValueError(f"a sequence must fit the context of {self.context}, but has {first + length} tokens.")
        stream: Tensor = self.embed(tokens)  # batch x T x d_model
        stream = stream if self.scales[0] == 1 else stream * self.scales[0]
        if self.position is not None:
            stream = stream + self.position.weight[first : first + length]
        if self.counts_alone:  # only the number of positions is cached
            past.joined(*(stream.new_zeros(len(tokens), 1, length, 1) for _ in range(2)))
        for layer in self.layers:
            stream = layer(stream, past)
        logits: Tensor = self.logits(self.final_norm(stream))
        return capped(logits if self.scales[1] == 1 else logits * self.scales[1], self.cap)


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with the interface of transformers: returns `logits`, and `loss` if there are labels."""

    config_class = DecoderConfig
    main_input_name = "input_ids"
    _tied_weights_keys = {"decoder.logits.weight": "decoder.embed.weight"}  # noqa: RUF012  # version 4 reads the keys

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.architecture is None or config.block is None:
            raise ValueError(
                "config.json must have `architecture` and `block`; another version wrote it: export it anew."
            )
        self.decoder = Decoder({**config.architecture, "block": config.block})
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        cache: Any | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the loss if there are labels. Raises ValueError for padding.

        input_ids, labels: batch x T; the label of a position is its own token. cache: also accepted as past_key_values.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "`attention_mask` must be all ones, but hides tokens; give prompts of one length, unpadded."
            )
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        logits = self.decoder(input_ids, cache)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def prepare_inputs_for_generation(  # arguments depend on the version
        self,
        input_ids: Tensor,
        past_key_values: Any | None = None,
        cache: Any | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the tokens that are not cached; beyond the context, the last tokens that fit, without a cache."""
        context = self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, -context:]
        if input_ids.shape[1] > context:
            return {"input_ids": input_ids[:, -context:], "attention_mask": mask, "use_cache": False}
        cache = past_key_values if cache is None else cache
        first = 0 if cache is None else int(cache.get_seq_length())
        return {"input_ids": input_ids[:, first:], "attention_mask": mask, CACHE: cache, "use_cache": use_cache}

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.logits

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, since all weights are in the file."""


DecoderConfig.register_for_auto_class()
DecoderForCausalLM.register_for_auto_class("AutoModelForCausalLM")
