from costmodel import ops
from costmodel.execution.interpreter import Array
from costmodel.ops import OpGraph


def kv_cache(graph: OpGraph, past: dict[str, Array]) -> dict[str, Array]:
    """The caches of a graph of phase `decode`, from the `values` of a run of the same model over earlier tokens."""
    reads = [(node.inputs, node.op) for node in graph]
    return {
        names[0]: past[names[1]][: op.past_len, -op.features :]
        for names, op in reads
        if isinstance(op, ops.KeyValueCache) and op.past_len
    }
