"""Prices published models by kind of op, and what is left of each with every cheap choice of its own space.

The configurations are those of the Hugging Face hub, as far as they decide about the op graph; `_name_or_path` in each
is where it is from. With every cheap choice, a model keeps all its attention and FFNs: all norms are frozen, so that
they fold; caps of scores are left out; and attention and activations are of the form that sends least.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UnpricedOpError
from costmodel.estimate import Estimate, Pricer, estimate
from costmodel.ops import Node
from costmodel.protocols import load_pricer
from nas.run.own_space import own_space
from search_spaces.architecture import Architecture, Layer
from search_spaces.checkpoints.checkpoint import read_checkpoint
from search_spaces.deployed import deployed
from search_spaces.forms import FROZEN_NORMS, LINEAR_FFNS, Attention, Norm
from search_spaces.inner import with_cheapest_inner
from search_spaces.lower import lower
from search_spaces.space import member_of

MODELS = Path(__file__).parent / "data" / "families"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- by python -m experiments run families -->\n", "<!-- end -->\n"
DEPLOYMENT = Deployment(projection="last")
TABLES = (ops.TokenEmbedding, ops.PositionEmbedding, ops.VocabProjection)
ACTIVATIONS = (ops.Gelu, ops.Relu, ops.Silu, ops.Square, ops.Multiply)
ATTENTIONS: tuple[Attention, ...] = ("softmax", "bounded", "power8")
KINDS = ("tables", "linears", "softmax", "norms", "inner norms", "activations", "rest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML: tokens of the prompt, and protocols with a testbed."""

    seq_len: int
    protocols: tuple[str, ...]


def run(name: str, settings: Settings, console: Console) -> None:
    """Print the table, and put it into the page about models where that is at hand."""
    text = "\n".join((*HEADER, *(row(model, protocol, settings.seq_len) for model, protocol in rows(settings))))
    console.print(text, markup=False, soft_wrap=True)
    if PAGE.is_file():
        page = PAGE.read_text(encoding="utf-8")
        before, (_, after) = page.partition(START)[0], page.split(END)
        PAGE.write_text(f"{before}{START}\n{text}\n\n{END}{after}", encoding="utf-8")


HEADER = (
    f"| model | protocol | GB | {' | '.join(KINDS)} | with all cheap choices | seconds |",
    f"|---|---|{'---|' * (len(KINDS) + 3)}",
)


def rows(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield every model with every protocol."""
    return product(sorted(path.name for path in MODELS.iterdir()), settings.protocols)


def row(model: str, protocol: str, seq_len: int) -> str:
    """Return a line of the table: gigabytes that all parties send, and seconds, of the model and of what is left."""
    architecture, pricer = read_checkpoint(str(MODELS / model)).model, load_pricer(protocol)
    whole = priced(deployed(architecture), pricer, seq_len)
    least = cheapest(architecture, pricer, seq_len)
    by_kind = defaultdict[str, float](float)
    for node, price in whole.by_op:
        by_kind[kind_of(node)] += price.sent_bytes / 1e9
    gigabytes = [whole.total.sent_bytes / 1e9, *(by_kind[kind] for kind in KINDS), least.total.sent_bytes / 1e9]
    seconds = f"{whole.total.latency_s:,.0f} to {least.total.latency_s:,.0f}"
    return f"| {model} | {protocol} | {' | '.join(f'{number:.2f}' for number in gigabytes)} | {seconds} |"


def priced(architecture: Architecture, pricer: Pricer, seq_len: int) -> Estimate:
    return estimate(lower(architecture, seq_len, DEPLOYMENT), pricer)


def cheapest(architecture: Architecture, pricer: Pricer, seq_len: int) -> Estimate:
    """Price the folded member of a model's own space that sends least and keeps all attention and FFNs."""
    space = own_space(architecture)
    choices = space.definition.choices
    assert choices is not None
    ffns = [ffn for ffn in choices.ffn if ffn not in (*LINEAR_FFNS, "none")]
    least: Estimate | None = None
    for attention, ffn in product(ATTENTIONS, ffns):
        layer = Layer(norm1=_frozen(choices.norm1), attention=attention, norm2=_frozen(choices.norm2), ffn=ffn)
        member = member_of(space, [with_cheapest_inner(architecture, layer)] * architecture.num_layers)
        with suppress(UnpricedOpError):
            made = priced(deployed(member.architecture), pricer, seq_len)
            least = made if least is None or made.total.sent_bytes < least.total.sent_bytes else least
    assert least is not None
    return least


def _frozen(norms: tuple[Norm, ...]) -> Norm:
    return next((norm for norm in norms if norm in FROZEN_NORMS), norms[0])


def kind_of(node: Node) -> str:
    """Return the column of an op."""
    if isinstance(node.op, TABLES):
        return "tables"
    if isinstance(node.op, ops.LayerNorm | ops.RmsNorm):
        return "norms" if node.name.endswith(("norm1", "norm2", "final_norm")) else "inner norms"
    if isinstance(node.op, ACTIVATIONS):
        return "activations"
    if isinstance(node.op, ops.Softmax | ops.Tanh):
        return "softmax"
    return "linears" if node.op.is_product else "rest"
