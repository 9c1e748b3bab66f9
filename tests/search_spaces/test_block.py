import ast
from pathlib import Path

import pytest

from search_spaces.block import BLOCKS

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for room in ("costmodel", "search_spaces", "nas", "experiments") for path in (ROOT / room).rglob("*.py")
]
# Compare names that GGUF has for tokenizers and families, some of which are blocks' too.
OF_GGUF = {Path("search_spaces/checkpoints/checkpoint.py"), Path("nas/conversion/gguf_file.py")}


def asks_for_a_block(source: str) -> bool:
    """Whether a block's name is compared with something, or is a key of a table beside another's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and _names([node.left, *node.comparators]):
            return True
        if isinstance(node, ast.MatchValue) and _names([node.value]):
            return True
        if isinstance(node, ast.Dict) and len(_names(node.keys)) > 1:
            return True
    return False


def _names(nodes: list) -> set[str]:
    held = {leaf.value for node in nodes if node for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
    return {name for name in held if name in BLOCKS}


def test_only_the_table_tells_blocks_apart():
    asking = [path.relative_to(ROOT) for path in SOURCES if asks_for_a_block(path.read_text(encoding="utf-8"))]
    assert set(asking) - OF_GGUF == {Path("search_spaces/block.py")}


@pytest.mark.parametrize(
    "line",
    [
        "x = a.block == 'sas'",
        "x = 'gpt2' != made['block']",
        "x = a.block in ('gpt2', 'pythia')",
        "match a.block:\n  case 'sas': pass",
        "x = {'gpt2': 1, 'sas': 2}[a.block]",
    ],
)
def test_the_check_sees_every_way_to_ask(line):
    assert asks_for_a_block(line)
