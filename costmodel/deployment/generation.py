"""The op graphs of new tokens, one after the other: the prompt's, which gives the first, then one for each other."""

from collections.abc import Callable
from dataclasses import replace

from costmodel.deployment.deploy import Deployment, deploy
from costmodel.errors import UserError
from costmodel.ops import OpGraph

NOT_DECODED = "--new-tokens counts from the whole prompt, so it does not go with phase decode; drop one."


def check_new_tokens(new_tokens: int, deployment: Deployment) -> None:
    """Raises UserError if no new token is asked for, or several of a deployment in phase decode."""
    if new_tokens < 1:
        raise UserError(f"--new-tokens must be at least 1, but got {new_tokens}.")
    if new_tokens > 1 and deployment.phase == "decode":
        raise UserError(NOT_DECODED)


def generation(
    whole: Callable[[int], OpGraph],
    *,
    prompt_len: int,
    new_tokens: int,
    deployment: Deployment,
    context: int | None = None,
) -> list[OpGraph]:
    """What is run for each new token. The last one is not read again, so it needs no place in the context.

    whole: the graph of a prompt of so many tokens, before it is deployed. deployment: of the prompt. context: the
        tokens that the model can read; None where only `whole` knows.

    Raises UserError for new tokens that `check_new_tokens` refuses or that do not fit the context.
    """
    check_new_tokens(new_tokens, deployment)
    longest = prompt_len + new_tokens - 1
    if new_tokens > 1 and context is not None and longest > context:
        raise UserError(
            f"prompt and new tokens must fit the context of {context} tokens, but got a prompt of "
            f"{prompt_len} and {new_tokens} new tokens; shorten either."
        )
    runs = [deploy(whole(prompt_len), deployment)]
    if new_tokens > 1:
        decode = replace(deployment, phase="decode", projection="all", rows="all")
        last = whole(longest)
        runs += (deploy(last, decode, length) for length in range(prompt_len + 1, longest + 1))
    return runs
