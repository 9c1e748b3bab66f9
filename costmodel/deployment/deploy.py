"""`deploy` rewrites the op graph of a prompt for a deployment; `generation` returns one op graph per new token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from costmodel import ops
from costmodel.deployment.known_layers import halves, public_layers, with_public_layers
from costmodel.deployment.rewrites import decode_step, for_last_row, in_query_blocks, in_vocab_blocks
from costmodel.errors import UserError
from costmodel.ops import Encoding, Input, OpGraph

Projection = Literal["all", "last"]
Phase = Literal["prefill", "decode"]
RunRows = Literal["all", "needed"]
NOT_DECODED = "--new-tokens counts from the whole prompt, so it does not go with phase decode; drop one."


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a model is run: choices that change its cost and not its function.

    Args:
        embedding: tokens one-hot encoded by the client, or looked up under the protocol.
        projection: logits of all tokens, or only of the last one, as for generation.
        phase: the whole prompt (prefill), or one token after seq_len - 1 tokens with cached keys and values (decode).
        rows: all tokens through every layer, or only the rows that the logits of the last token need; in the last
            attention layer the other tokens then only contribute keys and values.
        query_block: queries per block of causal attention, which reads the keys up to the block's end (default: all).
        batch: sequences at once, of seq_len tokens each; semi2k and crypten open weights once for all of them.
        vocab_blocks: number of blocks of the vocabulary projection, such as 2, so that the engine need not cut it into
            tiles.
        public_layers: layers whose weights all parties know, such as those of a public checkpoint without fine-tuning:
            0-5,7 for example (numbers from 0, ranges, embed and head).
        client_layers: number of first layers that the client, which has their weights, computes in plaintext after the
            embedding; 0 for only the embedding (default: the client computes no part of the model).

    Raises:
        UserError: If choices contradict each other, a block, batch or number of blocks is below 1, or `public_layers`
            is not written in this form.
    """

    embedding: Encoding = "one-hot"
    projection: Projection = "all"
    phase: Phase = "prefill"
    rows: RunRows = "all"
    query_block: int | None = None
    batch: int = 1
    vocab_blocks: int = 1
    public_layers: str | None = None
    client_layers: int | None = None

    def __post_init__(self) -> None:
        if self.public_layers is not None:
            public_layers(self.public_layers)
        if self.phase == "decode" and self.projection == "last":
            raise UserError(
                "`projection` last goes with phase prefill, but got phase decode, which runs one token alone; "
                "leave `projection` out."
            )
        if self.rows == "needed" and self.projection == "all":
            raise UserError(
                "`rows` needed goes with projection last, but got projection all, which needs every row; "
                "choose `projection` last."
            )
        if self.query_block is not None and self.query_block < 1:
            raise UserError(f"`query_block` must be at least 1, but got {self.query_block}.")
        for name, number in {"batch": self.batch, "vocab_blocks": self.vocab_blocks}.items():
            if number < 1:
                raise UserError(f"`{name}` must be at least 1, but got {number}.")


def deploy(graph: OpGraph, deployment: Deployment, num_tokens: int | None = None) -> OpGraph:
    """Return the op graph of a prompt, rewritten for a deployment.

    `num_tokens` is used only in phase decode: the number of tokens including the new one (None: as many as in `graph`).
    A UserError is raised if the graph cannot be run in this way, or lacks layers that the deployment names.
    """
    if deployment.public_layers is not None:
        graph = with_public_layers(graph, public_layers(deployment.public_layers))
    if deployment.embedding == "lookup":
        looked_up = [
            replace(node, op=replace(node.op, encoding="lookup")) if isinstance(node.op, ops.TokenEmbedding) else node
            for node in graph
        ]
        graph = replace(graph, nodes=tuple(looked_up))
    if deployment.phase == "decode":
        graph = decode_step(graph, num_tokens)
    elif deployment.projection == "last":
        graph = for_last_row(graph, through_layers=deployment.rows == "needed")
    if deployment.query_block is not None and deployment.phase == "prefill":
        graph = in_query_blocks(graph, deployment.query_block)
    if deployment.vocab_blocks > 1:
        graph = in_vocab_blocks(graph, deployment.vocab_blocks)
    if deployment.batch > 1:
        graph = in_batch(graph, deployment.batch)
    return graph if deployment.client_layers is None else halves(graph, deployment.client_layers).private


def in_batch(graph: OpGraph, batch: int) -> OpGraph:
    """Return the graph for `batch` sequences with interleaved tokens: all first tokens, then all second ones."""
    rewritten = {op: op.in_batch(batch) for op in dict.fromkeys(node.op for node in graph)}
    return OpGraph(
        nodes=tuple(replace(node, op=rewritten[node.op]) for node in graph),
        inputs=tuple(Input(name=read.name, shape=(read.shape[0] * batch, *read.shape[1:])) for read in graph.inputs),
    )


def check_new_tokens(new_tokens: int, deployment: Deployment) -> None:
    """Raise UserError if the number of new tokens is below 1, or above 1 in phase decode."""
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
    """Return one op graph per new token: the prompt's, then one per token that is decoded with cached keys and values.

    The last new token is not read again, so it needs no place in the context.

    Args:
        whole: Function that returns the op graph of a prompt, before deployment, given its number of tokens.
        prompt_len, new_tokens: Number of tokens of the prompt, and number of tokens to generate.
        deployment: How the prompt is run. Later runs have phase decode, projection all, rows all and its other choices.
        context: Number of tokens that the model can read; None if only `whole` checks it.

    Raises:
        UserError: As by `check_new_tokens`, `whole` and `deploy`, or if the tokens do not fit the context.
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
