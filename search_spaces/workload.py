"""The subject of a price: how many tokens are asked for, of how long a prompt, and how the model is run meanwhile."""

from dataclasses import asdict, dataclass, field, fields
from functools import partial

from costmodel.deployment.deploy import Deployment, check_new_tokens, generation
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
        check_new_tokens(self.new_tokens, self.deployment)

    @property
    def words(self) -> str:
        """The prompt's length, and what is not as usual: `T=128, projection last, 4 new tokens`."""
        chosen = {choice.name: getattr(self.deployment, choice.name) for choice in fields(Deployment)}
        usual = asdict(Deployment())
        words = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items() if value != usual[name]]
        words += [f"{self.new_tokens} new tokens"] if self.new_tokens > 1 else []
        return ", ".join((f"T={self.prompt_len}", *words))

    def graphs(self, architecture: Architecture) -> list[OpGraph]:
        """Returns the op graphs of each new token.

        Raises UserError if prompt and new tokens do not fit the model's context.
        """
        return generation(
            partial(lower, architecture),
            prompt_len=self.prompt_len,
            new_tokens=self.new_tokens,
            deployment=self.deployment,
            context=architecture.context,
        )
