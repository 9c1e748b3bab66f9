"""Exports a torch module to an ATen program, with its values sorted into secret and public ones for the tracer."""

import inspect
import logging
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, TypeAlias

from costmodel.errors import UserError
from costmodel.tracing.program import FxNode, Program, dependent, kind, numel, size, unpadded, writes

Module: TypeAlias = Any  # torch.nn.Module; torch is imported only if there is a model
WRAPPED = "model"  # name of the traced module inside the one that extracts its logits
# Arguments of transformers and `nas.model.decoder` that make a model return only logits.
QUIET: dict[str, bool] = {"use_cache": False, "with_entropies": False}
# Operations that only wrap an inner graph -> the position of that graph among their arguments.
WRAPPERS: dict[str, int] = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}


def program_of(model: Module, seq_len: int, name: str) -> Program:
    """Return the program of a module for `seq_len` tokens; errors are raised as by `costmodel.tracing.trace.trace`."""
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
    """Return the path of the module that an operation belongs to; empty for the model itself."""
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
