"""A decoder of any architecture as a transformers model, for `nas.export --format hf` where no known family fits.

`nas.conversion.huggingface` saves this code in one file with the modules that it needs (`CARRIED`); the file needs only
torch and transformers. Weights have the names of the op graph's nodes and the form in which the graph is run
(`deployed_weights`): temperatures are positive, and the gain of a frozen norm includes the division by the deviation.
Generation caches keys and values, so that a new token runs one position; beyond the context, each new token runs the
last tokens that fit again.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nas.model.layers import PlainDecoder
from nas.model.self_attention import Rotary

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # by version


class DecoderConfig(PretrainedConfig):
    """Configuration of a decoder: its architecture as plain data, and the arguments of PlainDecoder (`modules`)."""

    model_type = "private-inference-decoder"

    def __init__(
        self, architecture: dict[str, Any] | None = None, modules: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.architecture, self.modules = architecture, modules
        if architecture is not None:
            self.vocab_size, self.hidden_size = architecture["vocab_size"], architecture["d_model"]
            self.num_attention_heads, self.num_hidden_layers = architecture["num_heads"], len(architecture["layers"])
            self.max_position_embeddings = architecture["context"]
            settings = {"tie_word_embeddings": architecture["tied_embeddings"], **settings}
        super().__init__(**{"use_cache": True, **settings})


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder as a model of transformers. Raises ValueError if `config` lacks `architecture` or `modules`."""

    config_class = DecoderConfig
    main_input_name = "input_ids"
    _tied_weights_keys = {"decoder.logits.weight": "decoder.embed.weight"}  # noqa: RUF012  # version 4 reads the keys

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.architecture is None or config.modules is None:
            raise ValueError(
                "config.json must have `architecture` and `modules`; another version wrote it: export it anew."
            )
        self.decoder = PlainDecoder(**config.modules)
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
        """Return logits, batch x T x vocab, the cache if there is one, and with labels the mean loss in nats per token.

        input_ids, labels: batch x T; labels are the input tokens, which are shifted here. cache, past_key_values: keys
        and values of earlier tokens; the name depends on the version of transformers. use_cache: whether to make a
        cache if none is given. Raises ValueError beyond the context, or for a mask that hides tokens, such as padding.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "`attention_mask` must be all ones, but hides tokens; give prompts of one length, unpadded."
            )
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        logits = self.decoder.logits_of(self.decoder.continued(input_ids, cache))
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
        """Return the arguments of `forward`: the tokens not cached yet or, beyond the context, the last that fit."""
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
        """Compute the tables of rotary positions; all weights are in the file."""
        if isinstance(module, Rotary):
            module.compute()


DecoderConfig.register_for_auto_class()
DecoderForCausalLM.register_for_auto_class("AutoModelForCausalLM")
