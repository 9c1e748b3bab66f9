"""What a price is of: how many tokens are asked for, of how long a prompt, and how the model is run meanwhile."""

from dataclasses import dataclass, field, replace

from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from costmodel.ops import OpGraph
from search_spaces.architecture import Architecture
from search_spaces.lower import lower


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """New tokens from a prompt, each in its turn: the prompt at once, then a token at a time against a KV cache.

    prompt_len: tokens of the prompt. new_tokens: asked for; a price is per new token.
    deployment: how the model is run; its phase is that of the prompt.

    Raises UserError if no new token is asked for, or several of a deployment in phase decode.
    """

    prompt_len: int
    new_tokens: int = 1
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise UserError(f"--new-tokens must be at least 1, but got {self.new_tokens}.")
        if self.new_tokens > 1 and self.deployment.phase == "decode":
            raise UserError("--new-tokens counts from the whole prompt, so it does not go with phase decode; drop one.")

    def graphs(self, architecture: Architecture) -> list[OpGraph]:
        """What is run for all new tokens together.

        Raises UserError if prompt and new tokens do not fit the model's context.
        """
        longest = self.prompt_len + self.new_tokens - 1
        if self.new_tokens > 1 and longest > architecture.context:
            raise UserError(
                f"prompt and new tokens must fit the context of {architecture.context} tokens, but got a prompt of "
                f"{self.prompt_len} and {self.new_tokens} new tokens; shorten either."
            )
        decode = replace(self.deployment, phase="decode", projection="all")
        return [
            lower(architecture, self.prompt_len, self.deployment),
            *(lower(architecture, length, decode) for length in range(self.prompt_len + 1, longest + 1)),
        ]
