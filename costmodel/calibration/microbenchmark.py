"""Measure every kind of op in several sizes under an engine on this machine, for a testbed.

Every op is repeated, since other work of the machine can only lengthen a run. A session starts with a warm-up, which
makes keys, first oblivious transfers and first triples. A file of timings lets an interrupted run resume.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rich.progress import Progress, TimeElapsedColumn

from costmodel import ops
from costmodel.config.console import Console
from costmodel.config.files import MOST_JSON, decode, plain_json, read_bytes
from costmodel.config.units import format_seconds
from costmodel.engine import spu
from costmodel.engine.plan import CRYPTEN
from costmodel.engine.registry import INSTALL, check_installed
from costmodel.engine.session import Measured
from costmodel.errors import StoppedError, UserError
from costmodel.estimate import ENGINE
from costmodel.ops import OP_TYPES, OnScores, Op
from costmodel.protocols.derived import kind, op_name
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting, Holder

T = TypeVar("T")

# whether a protocol is slow -> number of runs of each size of a series, smallest first: short runs are disturbed the
# most; the largest sizes are left out for a slow protocol, where each would take minutes
REPEATS = {False: (12, 12, 8, 4, 3, 3), True: (3, 3, 3, 2, 2)}
MORE_REPEATS = {False: 3, True: 2}  # for the additional sizes of `_more`
WARM_UP: tuple[Op, ...] = (
    ops.Linear(rows=8, in_features=8, out_features=8, bias=False),
    ops.ScaledAdd(rows=8, features=8),
    ops.Relu(rows=8, features=8),
)

ELEMENTS = ((1, 16), (16, 16), (32, 64), (64, 128), (64, 256), (128, 512))  # rows x features
SCORES = ((1, 4, 4), (1, 16, 16), (2, 32, 32), (4, 64, 64), (2, 128, 128), (4, 128, 128))  # heads x queries x keys
# rows x in_features x out_features
PRODUCTS = ((1, 16, 16), (16, 64, 64), (32, 64, 256), (64, 256, 256), (16, 512, 768), (128, 256, 512))
HEAD_DIMS = (8, 8, 32, 16, 64, 32)  # of the attention products, in the order of SCORES
MANY_HEADS = (12, 32, 32, 64)  # heads x queries x keys x head_dim of an additional attention product
# many blocks of products per block of the result, as in the second linear of an FFN
LONG_PRODUCTS = ((64, 512, 64), (64, 2048, 64), (128, 768, 192), (128, 3072, 192))
LARGE_PRODUCTS = ((128, 768, 768), (128, 3072, 768))
# tokens x vocabulary x features
TABLES = ((2, 32, 16), (8, 256, 32), (16, 1024, 32), (32, 512, 128), (64, 1024, 64), (128, 8192, 512))
TILED_TABLE = (16, 50_257, 768)  # the table of GPT-2, which the engine cuts into tiles
LOOKUPS = TABLES[:5]  # a lookup compares every token with every entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """An op, or one kind of op in several sizes, with the number of runs of each size (`repeats`).

    weights: who holds the ops' weights: all parties, as shares (`secret`), or the `server`.
    cold: whether each run has a separate session, in which large memory is used for the first time.
    """

    weights: Holder
    sizes: tuple[Op, ...]
    repeats: tuple[int, ...]
    cold: bool = False

    @property
    def name(self) -> str:
        """The name of the series' timing: the kind of op or, for a single size, the kind and shape of the op."""
        return self.kind if len(self.sizes) > 1 else op_name(self.sizes[0], self.weights)

    @property
    def kind(self) -> str:
        return kind(self.sizes[0], self.weights)

    @property
    def sessions(self) -> list[list[Op]]:
        """The ops of each session, in order: the warm-up, then all runs of the series or, if `cold`, one of them."""
        runs = [op for op, repeats in zip(self.sizes, self.repeats, strict=True) for _ in range(repeats)]
        return [[*WARM_UP, op] for op in runs] if self.cold else [[*WARM_UP, *runs]]

    def by_size(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Return `values`, one for each run after the warm-up, split into one sequence per size."""
        return [values[start:end] for start, end in pairwise(accumulate(self.repeats, initial=0))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of a series: of its warm-up (`start_s`, least of all sessions) and each run; `kind` is `Series.name`."""

    kind: str
    start_s: float
    seconds: tuple[float, ...]


def plan(protocol: str) -> tuple[Series, ...]:
    """Return a series for every kind of op that the protocol prices.

    A type of op with hidden weights has a series with weights that are secret-shared and, if the protocol allows it,
    another one with weights that the server holds.
    """
    sizes = [_sizes(op_type, forms) for op_type in OP_TYPES for forms in _forms(op_type)]
    planned, engine = list[Series](), ENGINE_PROTOCOLS[protocol]
    repeats, more_repeats = REPEATS[engine.is_slow], MORE_REPEATS[engine.is_slow]
    holders: tuple[Holder, ...] = ("secret", "server")
    for weights in holders:
        for of_kind in sizes:
            if weights == "secret" or of_kind[0].weights == "hidden":
                with suppress(UserError):  # for an op without a price
                    engine.comm(of_kind[0], engine.setting(weights=weights))
                    more = _more(type(of_kind[0]), is_slow=engine.is_slow)
                    counts = (*repeats[: len(of_kind)], *[more_repeats] * len(more))
                    planned.append(Series(weights=weights, sizes=(*of_kind[: len(repeats)], *more), repeats=counts))
    return tuple(planned)


def _forms(op_type: type[Op]) -> list[dict[str, Any]]:
    """Return the keyword arguments of every form of an op type, which has at most one field for its form."""
    choices = {name: get_args(hint) for name, hint in get_type_hints(op_type).items() if get_origin(hint) is Literal}
    return [{name: form} for name, forms in choices.items() for form in forms] or [{}]


def _sizes(op_type: type[Op], forms: dict[str, Any]) -> tuple[Op, ...]:
    """Return the measured sizes of an op: its own, the shapes of scores, or rows and features."""
    if op_type in SIZES:
        return SIZES[op_type](**forms)
    make: Callable[..., Op] = partial(op_type, **forms)
    if issubclass(op_type, OnScores):
        return tuple(make(heads=heads, queries=queries, keys=keys) for heads, queries, keys in SCORES)
    return _by_elements(make)


def _more(op: type, *, is_slow: bool) -> tuple[Op, ...]:
    """Return the matrix products that dominate whole models; a slow protocol would take minutes for the largest."""
    tokens, vocab, features = TILED_TABLE
    heads, queries, keys, head_dim = MANY_HEADS
    if op is ops.Linear:
        shapes = LONG_PRODUCTS if is_slow else LONG_PRODUCTS + LARGE_PRODUCTS
        return tuple(ops.Linear(rows=m, in_features=k, out_features=n, bias=True) for m, k, n in shapes)
    if op is ops.AttentionScores or op is ops.AttentionMix:
        return (op(heads=heads, queries=queries, keys=keys, head_dim=head_dim),)
    if op is ops.VocabProjection and not is_slow:
        return (ops.VocabProjection(rows=tokens, features=features, vocab=vocab),)
    return ()


def measure(
    series: Iterable[Series],
    protocol: str,
    setting: EngineSetting,
    known: Iterable[Timing],
    run: Callable[..., Sequence[Measured]] = spu.measure,
) -> Iterator[Timing]:
    """Yield the timing of every series, in order; a series is run unless `known` has its timing with as many runs.

    run: function that measures the ops of a session. A UserError is raised if the engine is not installed, a
    StoppedError if the engine fails.
    """
    timed = {(timing.kind, len(timing.seconds)): timing for timing in known}
    start = len(WARM_UP)
    for some in series:
        if (timing := timed.get((some.name, sum(some.repeats)))) is None:
            held = replace(setting, weights=some.weights)
            costs = [run(session, protocol=protocol, setting=held) for session in some.sessions]
            timing = Timing(
                kind=some.name,
                start_s=min(sum(cost.seconds for cost in session[:start]) for session in costs),
                seconds=tuple(cost.seconds for session in costs for cost in session[start:]),
            )
        yield timing


def fastest(passes: Sequence[Sequence[Timing]]) -> list[Timing]:
    """Return one timing per series of a plan: the least seconds over `passes`, of each run and of the warm-up."""
    return [
        Timing(
            kind=timings[0].kind,
            start_s=min(timing.start_s for timing in timings),
            seconds=tuple(map(min, zip(*(timing.seconds for timing in timings), strict=True))),
        )
        for timings in zip(*passes, strict=True)
    ]


def save(timing: Timing, path: Path) -> None:
    """Append a timing to the file as a line of JSON, replacing an incomplete last line."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(asdict(timing)).encode() + b"\n")


def saved(path: Path) -> tuple[Timing, ...]:
    """Return the timings in a file, or none if there is no file; an incomplete last line is ignored.

    A UserError is raised for a file that cannot be read or, naming the line too, for a line that is not a timing.
    """
    timings = []
    for number, line in enumerate(read_bytes(path, MOST_JSON).splitlines(keepends=True) if path.exists() else [], 1):
        if line.endswith(b"\n"):
            where = f"{path}, line {number}"
            data = plain_json(line, f"{where} must be JSON (delete the line to measure what it held again)")
            timings.append(decode(Timing, data, where))
    return tuple(timings)


def check_engine(protocol: str) -> None:
    """Raise UserError unless the protocol's engine is installed, in the version that the formulas describe."""
    check_installed(protocol)
    if protocol != CRYPTEN and (engine := f"SecretFlow-SPU {version('spu')}") != ENGINE:
        raise UserError(f"the engine must be {ENGINE}, which the formulas are of, but is {engine}; run: {INSTALL}")


def timings_file(output: Path, protocol: str, setting: EngineSetting, num_pass: int = 1) -> Path:
    """Return the path for timings of pass `num_pass` (from 1), beside the testbed that is to be written, `output`."""
    threads = "" if setting.threads == 1 else f".{setting.threads}-threads"
    later = "" if num_pass == 1 else f".pass-{num_pass}"
    return output.with_suffix(f".{protocol}{threads}{later}.timings.jsonl")


def timed_run(
    plan: Sequence[Series],
    protocol: str,
    setting: EngineSetting,
    path: Path,
    expected_s: Callable[[Series], float] = lambda series: 1.0,
) -> list[Timing]:
    """Return the timing of every series; timings in the file at `path` are not measured again, new ones are appended.

    expected_s: estimates the time of a series, in any unit, from which the time left is reported on stderr. UserErrors
    are those of `saved` and `measure`. If the engine fails, the StoppedError says how to resume.
    """
    known, timings = saved(path), list[Timing]()
    console, total = Console(stderr=True, highlight=False, soft_wrap=True), len(plan)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(protocol, total=sum(map(expected_s, plan)), visible=console.is_terminal)
        try:
            for series, timing in zip(plan, measure(plan, protocol, setting, known), strict=True):
                if timing not in known:
                    save(timing, path)
                timings.append(timing)
                progress.update(task, advance=expected_s(series), description=f"{protocol}: {timing.kind}")
                if not console.is_terminal:
                    left_s = progress.tasks[task].time_remaining
                    eta = "" if left_s is None else f", about {format_seconds(left_s)} left"
                    console.print(f"{protocol}: {timing.kind}, {len(timings)} of {total} series{eta}")
        except StoppedError as error:
            raise StoppedError(f"{error} Timings so far are in {path}; run the command again to go on.") from None
    return timings


def _by_elements(op: Callable[..., Op]) -> tuple[Op, ...]:
    return tuple(op(rows=rows, features=features) for rows, features in ELEMENTS)


def _by_heads(op: Callable[..., Op]) -> tuple[Op, ...]:
    return tuple(
        op(heads=heads, queries=queries, keys=keys, head_dim=head_dim)
        for (heads, queries, keys), head_dim in zip(SCORES, HEAD_DIMS, strict=True)
    )


def _tables(encoding: ops.Encoding) -> tuple[Op, ...]:
    tables = LOOKUPS if encoding == "lookup" else TABLES
    return tuple(ops.TokenEmbedding(tokens=t, vocab=v, features=d, encoding=encoding) for t, v, d in tables)


# op type -> function that returns its measured sizes, if these are not ELEMENTS or SCORES
SIZES: dict[type[Op], Callable[..., tuple[Op, ...]]] = {
    ops.TokenEmbedding: _tables,
    ops.FrozenNorm: lambda: _by_elements(partial(ops.FrozenNorm, centred=True)),
    ops.Linear: lambda: tuple(ops.Linear(rows=m, in_features=k, out_features=n, bias=True) for m, k, n in PRODUCTS),
    ops.Rotary: lambda: tuple(ops.Rotary(rows=m, heads=4, rotary_dim=max(2, n // 8)) for m, n in ELEMENTS[1:]),
    ops.PackHeads: lambda: tuple(ops.PackHeads(rows=m, query_features=n, key_features=n) for m, n in ELEMENTS),
    ops.RepeatHeads: lambda: tuple(ops.RepeatHeads(rows=m, heads=4, key_heads=2, head_dim=n // 4) for m, n in ELEMENTS),
    ops.KeyValueCache: lambda: tuple(ops.KeyValueCache(rows=1, features=n, past_len=m) for m, n in ELEMENTS),
    ops.AttentionScores: lambda: _by_heads(ops.AttentionScores),
    ops.AttentionMix: lambda: _by_heads(ops.AttentionMix),
    ops.Scale: lambda: _by_elements(partial(ops.Scale, factor=0.5)),
    ops.TakeRows: lambda: tuple(ops.TakeRows(rows=m, features=n, taken=max(1, m // 2)) for m, n in ELEMENTS),
    ops.TakeColumns: lambda: tuple(ops.TakeColumns(rows=m, features=n, taken=n // 2) for m, n in ELEMENTS),
    ops.JoinRows: lambda: tuple(ops.JoinRows(rows=m, features=n, part=max(1, m // 2)) for m, n in ELEMENTS),
    ops.JoinColumns: lambda: tuple(ops.JoinColumns(rows=m, features=n, part=n // 2) for m, n in ELEMENTS),
    ops.VocabProjection: lambda: tuple(ops.VocabProjection(rows=t, vocab=v, features=d) for t, v, d in TABLES),
}
