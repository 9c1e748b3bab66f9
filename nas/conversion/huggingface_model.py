"""A decoder of any placement as a transformers model; the code that `nas.export --format hf` saves beside its weights.

It imports the installed package `private-inference-nas`, so that an exported model computes what was trained, and not
what a copy of the code did. There is no cache of keys and values: every new token runs the whole prompt.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from costmodel.errors import UserError

try:  # transformers would otherwise advise to install another package of that name
    from nas.hf import load_decoder, rotary_tables
except ImportError as error:
    raise ImportError("this model needs the package private-inference-nas; install it from its repository.") from error


class DecoderConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """architecture: as `search_spaces.architecture.canonical` gives it."""

    model_type = "private-inference-decoder"

    def __init__(self, architecture: dict[str, Any] | None = None, **settings: Any) -> None:
        self.architecture = architecture
        if architecture is not None:
            self.vocab_size, self.hidden_size = architecture["vocab_size"], architecture["d_model"]
            self.num_attention_heads, self.num_hidden_layers = architecture["num_heads"], len(architecture["layers"])
            self.max_position_embeddings = architecture["context"]
        super().__init__(**{"tie_word_embeddings": False, "use_cache": False, **settings})


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The decoder behind the interface of transformers: `loss` if there are labels, `logits` always."""

    config_class = DecoderConfig
    main_input_name = "input_ids"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.decoder = load_decoder(config.architecture)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """input_ids, labels: batch x T; the label of a position is its own token. Raises UserError for padding."""
        if attention_mask is not None and not attention_mask.all():
            raise UserError(
                "`attention_mask` must be all ones, but hides tokens; give prompts of one length, unpadded."
            )
        logits = self.decoder(input_ids).logits
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(  # type: ignore[override]  # no cache, so neither of its arguments
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor | None]:
        """The last tokens that the context holds. transformers asks for `kwargs` by that name."""
        start = -self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, start:]
        return {"input_ids": input_ids[:, start:], "attention_mask": mask}

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.logits

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Only what is in no file: transformers makes models without memory and then fills in the weights."""
        if hasattr(module, "cosines"):
            cosines, sines = module.get_buffer("cosines"), module.get_buffer("sines")
            for buffer, table in zip((cosines, sines), rotary_tables(*cosines.shape), strict=True):
                buffer.copy_(table)


DecoderConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
DecoderForCausalLM.register_for_auto_class("AutoModelForCausalLM")  # type: ignore[no-untyped-call]
