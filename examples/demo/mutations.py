"""Small, deterministic changes of a project's source: what an agent under training might have written.

Each mutation replaces one expression: a comparison, an arithmetic operator, a boolean operator or a number. Some
change nothing at all, so that a right answer is among the rollouts.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}


@dataclass(frozen=True)
class Mutation:
    """One changed file.

    Attributes:
        file: path of the file in the project.
        line: line of the change, 0 if there is none.
        before: the expression as it was.
        after: the expression as it is now.
        source: the whole file after the change.
    """

    file: str
    line: int
    before: str
    after: str
    source: str

    @property
    def title(self) -> str:
        """The change in a few words."""
        if not self.line:
            return "no change"
        return f"{Path(self.file).name}:{self.line} {self.before} -> {self.after}"


def _changed(node: ast.AST) -> ast.expr | None:
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            new.ops = [_COMPARISONS[type(operator)]()]
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            new.op = _OPERATORS[type(operator)]()
        case ast.BoolOp(op=operator):
            new.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.Constant(value=value) if type(value) is int:
            new.value = value + 1
        case _:
            return None
    return new if isinstance(new, ast.expr) else None


def _mutations_of(root: Path, file: str) -> Iterator[Mutation]:
    source = (root / file).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        new = _changed(node)
        if new is None or not isinstance(node, ast.expr) or node.end_lineno != node.lineno:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.lineno - 1] + (node.end_col_offset or 0)
        after = f"({ast.unparse(new)})"
        yield Mutation(file, node.lineno, source[begin:end], after, source[:begin] + after + source[end:])


def choose(root: Path, files: list[str], count: int, *, unchanged: int, seed: int) -> list[Mutation]:
    """Return ``count`` mutations of the given files, ``unchanged`` of them without any change; the same every time.

    Args:
        root: the project.
        files: Python files in it, pure ASCII.
        count: how many in all.
        unchanged: how many of them change nothing.
        seed: another seed gives another choice.
    """
    chance = random.Random(seed)
    found = [mutation for file in sorted(files) for mutation in _mutations_of(root, file)]
    found.sort(key=lambda mutation: (mutation.file, mutation.line, mutation.before))
    chosen = chance.sample(found, count - unchanged)
    original = files[0]
    chosen += [Mutation(original, 0, "", "", (root / original).read_text())] * unchanged
    chance.shuffle(chosen)
    return chosen
