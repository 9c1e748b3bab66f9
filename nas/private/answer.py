"""One prompt, answered privately: the parties of this machine, and what became of every token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from costmodel.generation.agreement import Agreement, joined
from costmodel.generation.assignment import Assignment
from costmodel.generation.clear import ClearRun
from costmodel.generation.greedy import PrivateToken, generate
from costmodel.generation.plan import Plan
from costmodel.generation.predicted import Prediction
from costmodel.generation.session import Session, await_ready, started
from nas.private.prompt import Prompt
from nas.private.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """tokens: with the prediction of each. agreement: over all; None if nobody has the model in the clear."""

    prompt: Prompt
    tokens: tuple[tuple[PrivateToken, Prediction], ...]
    ready: "Ready"

    @property
    def text(self) -> str:
        return self.prompt.decoded([*self.prompt.ids, *(token.token for token, _ in self.tokens)])

    @property
    def agreement(self) -> Agreement | None:
        parts = [token.agreement for token, _ in self.tokens if token.agreement is not None]
        return joined(parts) if parts else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Parties that have met and shared. op_graph: the fingerprint that all agreed on. num_steps: of the plan.

    seconds: since they were started. shared_bytes: programs and weights' shares that the parties here have sent.
    """

    op_graph: str
    num_steps: int
    seconds: float
    shared_bytes: int


@contextmanager
def meeting(assignments: Sequence[Assignment]) -> Iterator[tuple[Session, Ready]]:
    """These parties as processes, once they have met the others. Raises UserError, StoppedError in one line."""
    begun = monotonic()
    with started(assignments) as session:
        said: dict[int, dict[str, Any]] = await_ready(session)
        first = said[assignments[0].rank]
        yield (
            session,
            Ready(
                op_graph=first["agreed"],
                num_steps=first["num_steps"],
                seconds=monotonic() - begun,
                shared_bytes=sum(each["shared_bytes"] for each in said.values()),
            ),
        )


def answer(
    setup: Setup,
    prompt: Prompt,
    new_tokens: int,
    assignments: Callable[[Plan], Sequence[Assignment]],
    on_ready: Callable[[Ready], None],
    on_token: Callable[[PrivateToken, Prediction], None],
) -> Answer:
    """Runs the client and whichever parties are given with it.

    Raises UserError before anything is run if it cannot be priced; UserError, StoppedError as `meeting`.
    """
    plan = Plan(kind="tokens", num_tokens=len(prompt.ids), num_new=new_tokens)
    steps = setup.steps(plan)
    predicted = setup.predicted(steps)
    clear = None if setup.model.weights is None else ClearRun(setup.model.weights)
    found = []
    with meeting(assignments(plan)) as (session, ready):
        on_ready(ready)
        for token, expected in zip(generate(session, steps, prompt.ids, clear, prompt.end), predicted, strict=False):
            on_token(token, expected)
            found.append((token, expected))
        session.leave()
    return Answer(prompt=prompt, tokens=tuple(found), ready=ready)
