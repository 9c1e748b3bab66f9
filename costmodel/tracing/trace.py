"""Find the op graph of a torch model from its exported ATen program; see `trace`.

The program is followed backwards from the logits: operations that only move, copy or negate numbers are skipped, and
operations that a pattern recognises become typed ops. A model with any other operation on secret values is refused.
Entropies, caches and other values that do not affect the logits are not part of the graph.

A sum with one operand times a learned scalar is priced as if both operands had one. Masks are public and free.
Attention with a mask that hides scores is run as causal, other attention without a mask. Other numbers that are added
to scores, such as ALiBi's, are left out. Nodes are named after modules, such as `transformer.h.3.attn.c_attn`.

A graph computes the model only if the rows of a packed projection's weight are ordered as queries, keys, values. A
graph in which an op reads a part of a value that is not a range of columns can be priced, but not run.
"""

import inspect
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, TypeAlias

from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, OpGraph, TakeColumns, TokenEmbedding, VocabProjection
from costmodel.tracing import attention, patterns
from costmodel.tracing.patterns import TracedOp, TracedOps, first_match
from costmodel.tracing.program import (
    SPLITS,
    FxNode,
    Program,
    dependent,
    first_column,
    kind,
    numel,
    size,
    unpadded,
    writes,
)

Module: TypeAlias = Any  # torch.nn.Module; torch is imported only if there is a model
WRAPPED = "model"  # name of the traced module inside the module that extracts its logits
# Arguments of transformers and `nas.model.decoder` that make a model return only logits.
QUIET: dict[str, bool] = {"use_cache": False, "with_entropies": False}
# Operations that only wrap an inner graph -> the position of that graph among their arguments.
WRAPPERS: dict[str, int] = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}


def _program_of(model: Module, seq_len: int, name: str) -> Program:
    """Return a module's exported program; raise UserError as `trace`, but allow any operations and logits."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{name!r} must be an Architecture or a torch.nn.Module, but is {type(model).__name__}; "
            "let the factory return the model itself."
        )
    if seq_len < 1:
        raise UserError(f"`seq_len` must be at least 1, but got {seq_len}.")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # of transformers
        stacks = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in ("encoder", "decoder")]
        raise UserError(
            f"model {name!r} must read its tokens with one stack of layers, but {type(model).__name__} has an encoder "
            f"and a decoder (modules {', '.join(stacks[:2])}); let the factory return one of them with its embedding."
        )
    program = _program(_exported(model, seq_len, name), name)
    for node in program.nodes:  # the export does not check for positions beyond a table's end
        if kind(node) == "embedding" and node not in program.secret:
            rows, positions = size(node.args[0])[0], program.value(node.args[1])
            if not positions.is_meta and int(positions.max()) >= rows:
                raise UserError(
                    f"the prompt of model {name!r} must fit its table of {rows} positions, "
                    f"but it has {numel(program.tokens)} tokens, the last at position {int(positions.max())}."
                )
    return program


def _exported(model: Module, seq_len: int, name: str) -> Any:
    import torch
    from torch.fx import config

    class Logits(torch.nn.Module):
        """A module that returns only the logits of the model's output."""

        def __init__(self) -> None:
            super().__init__()
            setattr(self, WRAPPED, model)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            parameters = inspect.signature(model.forward).parameters
            quiet = {name: value for name, value in QUIET.items() if name in parameters}
            logits: torch.Tensor = _logits(model(tokens, **quiet))
            return logits

    device = next((parameter.device for parameter in model.parameters()), "cpu")
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device=device)
    was_training, disabled, traceless = model.training, logging.root.manager.disable, config.do_not_emit_stack_traces
    logging.disable(logging.CRITICAL)  # torch prints whole graphs if an export fails
    config.do_not_emit_stack_traces = True  # nobody reads which line of code an operation comes from
    try:
        with torch.no_grad(), warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")  # torch warns about its own deprecations while it exports
            exported = torch.export.export(Logits().eval(), (tokens,), strict=False)
            graphs = [part.graph for part in exported.graph_module.modules() if hasattr(part, "graph")]
            if any(writes(node) for graph in graphs for node in graph.nodes):
                exported = exported.run_decompositions({})  # removes in-place operations, which data flow does not show
            _unwrap(exported.graph_module)
            return exported
    except Exception as error:  # any exception of the user's model is bad input
        reason = str(error).strip().partition("\n")[0]
        path = _raised_in(error, model)
        raise UserError(
            f"model {name!r} must take a 1 x {seq_len} tensor of token ids and be exportable by torch.export, "
            f"but that raised {type(error).__name__}: {reason}{f' (in module {path})' if path else ''}"
        ) from None
    finally:
        logging.disable(disabled)
        config.do_not_emit_stack_traces = traceless
        model.train(was_training)


def _raised_in(error: BaseException, model: Module) -> str:
    """Return the path of the innermost module that an error came from; empty for the model itself or foreign code."""
    paths = {id(module): path for path, module in model.named_modules()}
    innermost, frame = "", error.__traceback__
    while frame is not None:
        innermost = paths.get(id(frame.tb_frame.f_locals.get("self")), innermost)
        frame = frame.tb_next
    return innermost


def path_of(node: FxNode) -> str:
    """Return the path of the innermost module that an operation belongs to; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return re.sub(r"@\d+", "", path.removeprefix(WRAPPED).removeprefix("."))


def _unwrap(module: Module) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_function" and (position := WRAPPERS.get(kind(node))) is not None:
            inner = getattr(module, node.args[position].target)
            _unwrap(inner)
            parameters = [inner_node for inner_node in inner.graph.nodes if inner_node.op == "placeholder"]
            outer = dict(zip(parameters, node.args[position + 1 :], strict=True))
            with module.graph.inserting_before(node):
                results = module.graph.graph_copy(inner.graph, outer)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])


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


def _program(exported: Any, name: str) -> Program:
    import torch
    from torch.nn import functional

    nodes = tuple(exported.graph.nodes)
    signature = exported.graph_signature
    by_name = {node.name: node for node in nodes}
    (tokens,) = (by_name[name] for name in signature.user_inputs)
    whole, device = unpadded(nodes, tokens), tokens.meta["val"].device
    secret = dependent(nodes, {tokens}, whole)
    learned = dependent(nodes, {by_name[name] for name in signature.inputs_to_parameters}) - secret
    known = {node: torch.ones(size(node), dtype=torch.bool, device=device) for node in whole}
    samples = torch.linspace(-8, 8, 65, dtype=torch.float64)
    activations = {
        "gelu": functional.gelu(samples),
        "gelu-tanh": functional.gelu(samples, approximate="tanh"),
        "relu": functional.relu(samples),
        "sigmoid": samples.sigmoid(),
        "silu": functional.silu(samples),
        "square": samples.square(),
        "square-less-1": samples.square() - 1,
        "tanh": samples.tanh(),
    }
    return Program(
        nodes=nodes,
        tokens=tokens,
        output=by_name[signature.user_outputs[0]],
        secret=secret,
        learned=learned,
        value=_evaluator(exported, known, name),
        samples=samples,
        activations=activations,
    )


def _evaluator(exported: Any, known: dict[FxNode, Any], name: str) -> Callable[[FxNode], Any]:
    """Return a function that computes nodes that do not depend on the tokens, each once, starting from `known` values.

    It raises a UserError for a node that cannot be computed.
    """
    from torch.fx.node import map_arg

    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants

    def value(node: FxNode) -> Any:
        if node not in known:
            if node.op == "placeholder":
                known[node] = {**exported.state_dict, **exported.constants}[names[node.name]]
            else:
                args, kwargs = map_arg((node.args, dict(node.kwargs)), value)
                try:
                    known[node] = node.target(*args, **kwargs)
                except (IndexError, RuntimeError) as error:  # such as a table that is too short
                    raise UserError(
                        f"what model {name!r} computes of positions must be within its tables, but {node.target} in "
                        f"{path_of(node) or 'the model itself'} raised {type(error).__name__}: "
                        f"{str(error).strip().partition(chr(10))[0]}; choose a smaller `seq_len`."
                    ) from None
        return known[node]

    return value


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
            object with `logits`, or a tuple, list or dict that begins with them.
        seq_len: Tokens of the prompt.
        name: Name of the model in errors.

    Raises:
        UserError: If `seq_len` is below 1, or the model is not such a module, has an encoder and a decoder, cannot be
            exported, reads a position table beyond its end, computes its logits without its tokens, or has unsupported
            operations. These are listed with some of their modules; if some are in `REASONS`, only those are listed.
    """
    program = _program_of(model, seq_len, name)
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
                    stem = f"{names[made]}.columns_{columns.first}"
                    names[made, columns] = next(name for name in _candidates(stem, stem) if name not in taken)
                    taken.add(names[made, columns])
                    nodes.append(Node(name=names[made, columns], layer=layer, op=columns, inputs=(names[made],)))
                inputs.append(names[made if columns is None else (made, columns)])
            nodes.append(Node(name=name, layer=layer, op=step.op, inputs=tuple(inputs)))
        names[node] = names[steps[-1]]
    return nodes


def _made(program: Program, node: FxNode, names: dict[Any, str]) -> tuple[FxNode, TakeColumns | None]:
    """Return the named operation that a value comes from, and its columns there; None if all, or not a range."""
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
    """Return the first index in a module's path; without one, `embed` before the layers and `head` after them.

    The token embedding is always `embed`, and the vocabulary projection `head`.
    """
    if isinstance(step.op, TokenEmbedding):
        return "embed"
    if isinstance(step.op, VocabProjection):
        return "head"
    indices = [int(part) for part in path.split(".") if part.isdigit()]
    if indices:
        return indices[0]
    return "head" if any(isinstance(node.layer, int) for node in earlier) else "embed"
