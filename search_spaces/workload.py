"""The workload that is priced: prompt length, number of new tokens, and how the model is run."""

from dataclasses import asdict, dataclass, field
from functools import partial

from costmodel.deployment.deploy import Deployment, check_new_tokens, generation
from costmodel.ops import OpGraph
from search_spaces.architecture import Architecture
from search_spaces.lower import lower


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """New tokens generated from a prompt: first the prompt, then one token at a time with a KV cache.

    A cost is per new token. The deployment's phase is that of the prompt. A UserError is raised if there is no new
    token, or several in phase decode.
    """

    prompt_len: int
    new_tokens: int = 1
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        check_new_tokens(self.new_tokens, self.deployment)

    @property
    def words(self) -> str:
        """The prompt's length and what is not the default: `T=128, projection last, 4 new tokens`."""
        usual, chosen = asdict(Deployment()), asdict(self.deployment)
        words = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items() if value != usual[name]]
        words += [f"{self.new_tokens} new tokens"] if self.new_tokens > 1 else []
        return ", ".join((f"T={self.prompt_len}", *words))

    def graphs(self, architecture: Architecture) -> list[OpGraph]:
        """Return the op graphs of each new token; a UserError is raised if the tokens do not fit the context."""
        return generation(
            partial(lower, architecture),
            prompt_len=self.prompt_len,
            new_tokens=self.new_tokens,
            deployment=self.deployment,
            context=architecture.context,
        )
