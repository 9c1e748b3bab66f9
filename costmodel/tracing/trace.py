"""`trace`: the op graph of a torch model that nobody here wrote, from its exported ATen program.

What the logits depend on is followed backwards: operations that only rearrange numbers are passed through, those that
a pattern recognises become typed ops, and the model is refused with the list of all others. Nothing is dropped or
priced as zero. Entropies, caches and whatever else a model computes beside its logits are not part of it.

A sum with one operand times a learned scalar is charged as if both had one. Masks are public and cost nothing:
attention under any mask is run as causal, and without one as it is; what else is added to scores is not run. A prompt
has no padding.

Names are module paths, `transformer.h.3.attn.c_attn`. To run a graph, weights of a packed projection have to hold
queries, keys and values in this order, and no op may read a part of another's features, as the two halves of a gated
linear; to price it, both are fine.
"""

from collections import Counter
from typing import Any

from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, OpGraph, TokenEmbedding, VocabProjection
from costmodel.tracing import attention, norms, patterns
from costmodel.tracing.export import Module, path_of, program_of
from costmodel.tracing.patterns import TracedOp, TracedOps, first_match
from costmodel.tracing.program import FxNode, Program, kind, writes

MAX_PLACES = 3  # modules named for each unsupported operation
# An operation that no op stands for -> what kind of model has it, and what to do.
REASONS: dict[str, str] = {
    "topk": "it chooses experts by secret scores; trace a model of the same shape without experts",
    "conv1d": "it convolves over tokens, as state-space layers do; trace a model with attention in their place",
}
REMEDY = "spell the modules out in known ops, or add ops for them as CONTRIBUTING.md says"


def trace(model: Module, seq_len: int, *, name: str = "model") -> OpGraph:
    """The op graph of a module that takes 1 x T token ids and returns logits, for a prompt of `seq_len` tokens.

    model: a torch.nn.Module, traced in evaluation mode. It returns a tensor, something with `logits`, or a sequence
        or mapping that begins with them. name: what errors call it.

    Raises UserError if it is not such a module, cannot be exported, reads a position table beyond its end, or has
    operations that no op stands for; the message lists them with their modules.
    """
    program = program_of(model, seq_len, name)
    steps = _recognised(program, name)
    leaves = {path for path, module in model.named_modules() if not any(True for _ in module.children())}
    return OpGraph(nodes=tuple(_named(program, steps, leaves)))


def _recognised(program: Program, name: str) -> dict[FxNode, TracedOps]:
    """The steps of every operation that the output depends on and that is not local, in execution order.

    Raises UserError if there are some that nothing recognises, or if the output does not depend on the tokens.
    """
    if program.output not in program.secret or program.origin(program.output) is program.tokens:
        raise UserError(f"the logits of model {name!r} must be computed from its tokens, but they are not.")
    recognised: dict[FxNode, TracedOps] = {}
    unknown = [node for node in program.nodes if writes(node) and program.secret_inputs(node)]
    demanded = {program.output}
    for node in reversed(program.nodes):
        if node not in demanded or node is program.tokens:
            continue
        known = () if program.is_neutral(node) else (attention.PATTERNS, norms.PATTERNS, patterns.PATTERNS)
        if steps := next((steps for table in known if (steps := first_match(table, program, node))), ()):
            recognised[node] = steps
            demanded.update(source for step in steps for source in step.inputs if not isinstance(source, TracedOp))
            continue
        if program.origin(node) is node and not writes(node):
            unknown.insert(0, node)
        demanded.update(program.secret_inputs(node))
    if unknown:
        raise UserError(_unsupported(name, unknown))
    return dict(reversed(recognised.items()))


def _unsupported(name: str, unknown: list[FxNode]) -> str:
    """All of them, or those that tell by themselves what kind of model it is."""
    remedy = next((REASONS[kind(node)] for node in unknown if kind(node) in REASONS), REMEDY)
    unknown = [node for node in unknown if kind(node) in REASONS] or unknown
    listed = []
    for target, count in Counter(map(_target, unknown)).items():
        places = list(dict.fromkeys(path_of(node) or "the model itself" for node in unknown if _target(node) == target))
        more = ", ..." if len(places) > MAX_PLACES else ""
        listed.append(f"{target} ({count}x, in {', '.join(places[:MAX_PLACES])}{more})")
    return f"model {name!r} has operations on secret values that no op stands for: {', '.join(listed)}; {remedy}."


def _target(node: FxNode) -> str:
    return str(node.target) if "." in str(node.target) else kind(node)


def _named(program: Program, recognised: dict[FxNode, TracedOps], leaves: set[str]) -> list[Node]:
    names: dict[Any, str] = {program.tokens: "tokens"}
    taken = {"tokens"}
    nodes: list[Node] = []
    for node, steps in recognised.items():
        for step in steps:
            path = path_of(step.anchor)
            stem = path if path in leaves else ".".join(part for part in (path, step.part) if part)
            name = next(candidate for candidate in _candidates(stem, step.part) if candidate not in taken)
            taken.add(name)
            names[step] = name
            inputs = tuple(
                names[source if isinstance(source, TracedOp) else _made(program, source, names)]
                for source in step.inputs
            )
            nodes.append(Node(name=name, layer=_layer(path, step, nodes), op=step.op, inputs=inputs))
        names[node] = names[steps[-1]]
    return nodes


def _made(program: Program, node: FxNode, names: dict[Any, str]) -> FxNode:
    """The operation with a name that a value is a rearrangement of."""
    while node not in names:
        node = program.moved(node)[0]
    return node


def _candidates(stem: str, part: str) -> Any:
    yield stem
    if not stem.endswith(part):
        stem = f"{stem}.{part}"
        yield stem
    number = 2
    while True:
        yield f"{stem}_{number}"
        number += 1


def _layer(path: str, step: TracedOp, earlier: list[Node]) -> LayerId:
    """The first index in a module's path; without one, what stands before the layers or after them."""
    if isinstance(step.op, TokenEmbedding):
        return "embed"
    if isinstance(step.op, VocabProjection):
        return "head"
    indices = [int(part) for part in path.split(".") if part.isdigit()]
    if indices:
        return indices[0]
    return "head" if any(isinstance(node.layer, int) for node in earlier) else "embed"
