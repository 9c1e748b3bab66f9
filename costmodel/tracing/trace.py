"""`trace`: the op graph of a torch model that nobody here wrote, from its exported ATen program.

What the logits depend on is followed backwards: operations that only rearrange numbers are passed through, those that
a pattern recognises become typed ops, and the model is refused with the list of all others. Nothing is dropped or
priced as zero. Entropies, caches and whatever else a model computes beside its logits are not part of it.

A sum with one operand times a learned scalar is charged as if both had one. Masks are public and cost nothing, so
attention is priced, and would be run, as causal.

Names are module paths, `transformer.h.3.attn.c_attn`. To run a graph, weights of a packed projection have to hold
queries, keys and values in this order, and no op may read a part of another's features, as the two halves of a gated
linear; to price it, both are fine.
"""

import inspect
import re
import warnings
from collections import Counter
from typing import Any, TypeAlias

from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, OpGraph, TokenEmbedding, VocabProjection
from costmodel.tracing import attention, patterns
from costmodel.tracing.patterns import TracedOp, TracedOps, first_match
from costmodel.tracing.program import (
    FxNode,
    Program,
    dependent,
    kind,
    moved,
    numel,
    origin,
    secret_inputs,
    size,
    writes,
)

Module: TypeAlias = Any  # torch.nn.Module; torch is imported only where a model is at hand
WRAPPED = "model"  # the traced module's name inside the one that takes its logits out
# Arguments that keep a model from returning more than logits: of transformers, and of `nas.model.decoder`.
QUIET: dict[str, bool] = {"use_cache": False, "with_entropies": False}
# Operations that only say how the operations of a graph inside are run, and where among their arguments that graph is.
WRAPPERS: dict[str, int] = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}
MAX_PLACES = 3  # modules named for each unsupported operation


def trace(model: Module, seq_len: int, *, name: str = "model") -> OpGraph:
    """The op graph of a module that takes 1 x T token ids and returns logits, for a prompt of `seq_len` tokens.

    model: a torch.nn.Module, traced in evaluation mode. It returns a tensor, something with `logits`, or a sequence
        or mapping that begins with them. name: what errors call it.

    Raises UserError if it is not such a module, cannot be exported, reads a position table beyond its end, or has
    operations that no op stands for; the message lists all of them.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name!r} must be an Architecture or a torch.nn.Module, but is {type(model).__name__}.")
    if seq_len < 1:
        raise UserError(f"`seq_len` must be at least 1, but got {seq_len}.")
    exported = _exported(model, seq_len, name)
    program = _program(exported)
    _check_tables(program, exported, name)
    found = _recognised(program, name)
    leaves = {path for path, module in model.named_modules() if not any(True for _ in module.children())}
    return OpGraph(nodes=tuple(_named(program, found, leaves)))


def _exported(model: Module, seq_len: int, name: str) -> Any:
    import torch

    class Logits(torch.nn.Module):
        """Takes the logits out of whatever a model returns."""

        def __init__(self) -> None:
            super().__init__()
            setattr(self, WRAPPED, model)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = _logits(model(tokens, **_quiet(model)))
            return logits

    device = next((parameter.device for parameter in model.parameters()), "cpu")
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device=device)
    was_training = model.training
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own deprecations while it exports
            exported = torch.export.export(Logits().eval(), (tokens,), strict=False)
            if any(writes(node) for graph in _graphs(exported.graph_module) for node in graph.nodes):
                exported = exported.run_decompositions({})  # without operations in place, data flow is all there is
            _unwrap(exported.graph_module)
            return exported
    except Exception as error:  # whatever foreign code raises is the user's bad input
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model {name!r} must take a 1 x {seq_len} tensor of token ids and be exportable by torch.export, "
            f"but that raised {type(error).__name__}: {reason}"
        ) from None
    finally:
        model.train(was_training)


def _graphs(module: Module) -> list[Any]:
    """The graph of an exported module, and those inside it."""
    return [each.graph for each in module.modules() if hasattr(each, "graph")]


def _unwrap(module: Module) -> None:
    """Puts the operations of graphs inside a graph in their place."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and (position := WRAPPERS.get(kind(node))) is not None:
            inner = getattr(module, node.args[position].target)
            _unwrap(inner)
            parameters = [each for each in inner.graph.nodes if each.op == "placeholder"]
            outer = dict(zip(parameters, node.args[position + 1 :], strict=True))
            with module.graph.inserting_before(node):
                results = module.graph.graph_copy(inner.graph, outer)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])


def _quiet(model: Module) -> dict[str, bool]:
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in QUIET.items() if name in parameters}


def _logits(output: Any) -> Any:
    import torch

    while not isinstance(output, torch.Tensor):
        if hasattr(output, "logits"):
            output = output.logits
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
        elif isinstance(output, dict) and output:
            output = next(iter(output.values()))
        else:
            raise UserError(f"a model must return a tensor of logits, but returned {type(output).__name__}.")
    return output


def _program(exported: Any) -> Program:
    import torch
    from torch.nn import functional

    nodes = tuple(exported.graph.nodes)
    signature = exported.graph_signature
    by_name = {node.name: node for node in nodes}
    (tokens,) = (by_name[name] for name in signature.user_inputs)
    secret = dependent(nodes, {tokens})
    learned = dependent(nodes, {by_name[name] for name in signature.inputs_to_parameters}) - secret
    samples = torch.linspace(-8, 8, 65, dtype=torch.float64)
    activations = {
        "gelu": functional.gelu(samples),
        "gelu-tanh": functional.gelu(samples, approximate="tanh"),
        "relu": functional.relu(samples),
        "silu": functional.silu(samples),
        "square": samples.square(),
    }
    return Program(
        nodes=nodes,
        tokens=tokens,
        output=by_name[signature.user_outputs[0]],
        secret=secret,
        learned=learned,
        samples=samples,
        activations=activations,
    )


def _check_tables(program: Program, exported: Any, name: str) -> None:
    """Raises UserError for a position beyond a table's end, which nothing checks while a model is exported."""
    for node in program.nodes:
        if kind(node) == "embedding" and node not in program.secret:
            rows, positions = size(node.args[0])[0], _value(exported, node.args[1])
            if not positions.is_meta and int(positions.max()) >= rows:
                raise UserError(
                    f"the prompt of model {name!r} must fit its table of {rows} positions, "
                    f"but it has {numel(program.tokens)} tokens, the last at position {int(positions.max())}."
                )


def _value(exported: Any, node: FxNode) -> Any:
    """What a node that does not depend on the tokens computes."""
    from torch.fx.node import map_arg

    if node.op == "placeholder":
        signature = exported.graph_signature
        names = signature.inputs_to_parameters | signature.inputs_to_buffers
        names = names | signature.inputs_to_lifted_tensor_constants
        return {**exported.state_dict, **exported.constants}[names[node.name]]
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: _value(exported, each))
    return node.target(*args, **kwargs)


def _recognised(program: Program, name: str) -> dict[FxNode, TracedOps]:
    """The steps of every operation that the output depends on and that is not local, in execution order.

    Raises UserError if there are some that nothing recognises, or if the output does not depend on the tokens.
    """
    if program.output not in program.secret or origin(program, program.output) is program.tokens:
        raise UserError(f"the logits of model {name!r} must be computed from its tokens, but they are not.")
    found: dict[FxNode, TracedOps] = {}
    unknown = [node for node in program.nodes if writes(node) and secret_inputs(program, node)]
    demanded = {program.output}
    for node in reversed(program.nodes):
        if node not in demanded or node is program.tokens:
            continue
        if steps := _steps(program, node):
            found[node] = steps
            demanded.update(each for step in steps for each in step.inputs if not isinstance(each, TracedOp))
            continue
        if origin(program, node) is node and not writes(node):
            unknown.insert(0, node)
        demanded.update(secret_inputs(program, node))
    if unknown:
        raise UserError(_unsupported(name, unknown))
    return dict(reversed(found.items()))


def _steps(program: Program, node: FxNode) -> TracedOps:
    known = (attention.PATTERNS, patterns.PATTERNS)
    return next((steps for each in known if (steps := first_match(each, program, node))), ())


def _unsupported(name: str, unknown: list[FxNode]) -> str:
    listed = []
    for target, count in Counter(map(_target, unknown)).items():
        places = list(dict.fromkeys(_path(node) or "the model itself" for node in unknown if _target(node) == target))
        more = ", ..." if len(places) > MAX_PLACES else ""
        listed.append(f"{target} ({count}x, in {', '.join(places[:MAX_PLACES])}{more})")
    return f"model {name!r} has operations on secret values that no op stands for: {'; '.join(listed)}."


def _target(node: FxNode) -> str:
    return str(node.target) if "." in str(node.target) else kind(node)


def _named(program: Program, found: dict[FxNode, TracedOps], leaves: set[str]) -> list[Node]:
    names: dict[Any, str] = {program.tokens: "tokens"}
    taken = {"tokens"}
    nodes: list[Node] = []
    for node, steps in found.items():
        for step in steps:
            path = _path(step.anchor)
            stem = path if path in leaves else ".".join(part for part in (path, step.part) if part)
            name = next(each for each in _candidates(stem, step.part) if each not in taken)
            taken.add(name)
            names[step] = name
            inputs = tuple(
                names[each if isinstance(each, TracedOp) else _made(program, each, names)] for each in step.inputs
            )
            nodes.append(Node(name=name, layer=_layer(path, step, nodes), op=step.op, inputs=inputs))
        names[node] = names[steps[-1]]
    return nodes


def _made(program: Program, node: FxNode, names: dict[Any, str]) -> FxNode:
    """The operation with a name that a value is a rearrangement of."""
    while node not in names:
        node = moved(program, node)[0]
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


def _path(node: FxNode) -> str:
    """The path of the module that an operation belongs to; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return re.sub(r"@\d+", "", path.removeprefix(WRAPPED).removeprefix("."))


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
