"""`trace`: the op graph of any torch model, from its exported ATen program.

The program is followed backwards from the logits: operations that only rearrange numbers are skipped, operations that a
pattern recognises become typed ops, and all others are listed in the error that refuses the model. Nothing is dropped
or priced as zero. Entropies, caches and other values that do not affect the logits are not part of the graph.

A sum with one operand times a learned scalar is priced as if both had one. Masks are public and free: attention under
any mask is run as causal, attention without a mask as it is, and other numbers that are added to scores are not run. A
prompt has no padding. Names are module paths, such as `transformer.h.3.attn.c_attn`.

A graph computes the model only if the rows of a packed projection's weight are ordered as queries, keys, values. It can
be priced but not run if an op reads a part of a value that is not a range of its columns.
"""

from collections import Counter
from typing import Any

from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, OpGraph, TakeColumns, TokenEmbedding, VocabProjection
from costmodel.tracing import attention, patterns
from costmodel.tracing.export import Module, path_of, program_of
from costmodel.tracing.patterns import TracedOp, TracedOps, first_match
from costmodel.tracing.program import SPLITS, FxNode, Program, first_column, kind, numel, size, writes

MAX_PLACES = 3  # modules named for each unsupported operation
# Unsupported operation -> the kind of model that has it, and a remedy.
REASONS: dict[str, str] = {
    "topk": "it chooses experts by secret scores; trace a model of the same shape without experts",
    "conv1d": "it convolves over tokens, as state-space layers do; trace a model with attention in their place",
}
REMEDY = "spell the modules out in known ops, or add ops for them as CONTRIBUTING.md says"


def trace(model: Module, seq_len: int, *, name: str = "model") -> OpGraph:
    """Return the op graph of a module for a prompt of `seq_len` tokens.

    Args:
        model: A torch.nn.Module, traced in evaluation mode. It takes 1 x T token ids and returns logits: a tensor, an
            object with `logits`, or a sequence or mapping that begins with them.
        seq_len: Tokens of the prompt.
        name: Name of the model in errors.

    Raises:
        UserError: If the model is not such a module, cannot be exported, reads a position table beyond its end, or has
            unsupported operations, which are listed with their modules.
    """
    program = program_of(model, seq_len, name)
    steps = _recognised(program, name)
    leaves = {path for path, module in model.named_modules() if not any(True for _ in module.children())}
    return OpGraph(nodes=tuple(_named(program, steps, leaves)))


def _recognised(program: Program, name: str) -> dict[FxNode, TracedOps]:
    """Return the steps of every operation that the output depends on and that is not local, in execution order."""
    if program.output not in program.secret or program.origin(program.output) is program.tokens:
        raise UserError(f"the logits of model {name!r} must be computed from its tokens, but they are not.")
    recognised: dict[FxNode, TracedOps] = {}
    unknown = [node for node in program.nodes if writes(node) and program.secret_inputs(node)]
    demanded = {program.output}
    for node in reversed(program.nodes):
        if node not in demanded or node is program.tokens:
            continue
        known = () if program.is_neutral(node) else (attention.PATTERNS, patterns.PATTERNS)
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
    """Format the unsupported operations, or only those that identify the kind of model."""
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
            inputs: list[str] = []
            layer = _layer(path, step, nodes)
            for source in step.inputs:
                made, columns = (source, None) if isinstance(source, TracedOp) else _made(program, source, names)
                if columns is not None and (made, columns) not in names:
                    names[made, columns] = f"{names[made]}.columns_{columns.first}"
                    nodes.append(Node(name=names[made, columns], layer=layer, op=columns, inputs=(names[made],)))
                inputs.append(names[made if columns is None else (made, columns)])
            nodes.append(Node(name=name, layer=layer, op=step.op, inputs=tuple(inputs)))
        names[node] = names[steps[-1]]
    return nodes


def _made(program: Program, node: FxNode, names: dict[Any, str]) -> tuple[FxNode, TakeColumns | None]:
    """Return the named operation that a value comes from, and which columns of it the value is; None if all."""
    cuts, source = [], node
    while source not in names:
        before = program.moved(source)[0]
        before = program.moved(before)[0] if kind(before) in SPLITS else before
        cuts += [source] if numel(source) != numel(before) else []
        source = before
    rows, features = numel(source) // size(source)[-1], size(source)[-1]
    starts = [start for cut in cuts if (start := first_column(cut, rows)) is not None]
    if not cuts or len(starts) < len(cuts):
        return source, None
    return source, TakeColumns(rows=rows, features=features, taken=numel(node) // rows, first=sum(starts))


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
    """Return the first index in a module's path; without one, `embed` before the layers and `head` after them."""
    if isinstance(step.op, TokenEmbedding):
        return "embed"
    if isinstance(step.op, VocabProjection):
        return "head"
    indices = [int(part) for part in path.split(".") if part.isdigit()]
    if indices:
        return indices[0]
    return "head" if any(isinstance(node.layer, int) for node in earlier) else "embed"
