"""Measure Python sources by their syntax trees: lines, complexity, attributes, and writes to attributes.

code                    lines with a token that is not a comment or a docstring
complexity              McCabe's complexity of a function including nested functions: 1 plus the number of branches,
                        loops, handlers, assertions, conditional expressions, comprehensions and their conditions, `and`
                        and `or`
writes to others        assignments to attributes of objects other than `self` and objects that the function creates;
                        `setattr` and `delattr` count too
outside constructors    attributes of a class that only methods set, not constructors
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__"}
_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING,
    tokenize.COMMENT,
}  # fmt: skip


@dataclass
class Sources:
    """Counts of some files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    complexity: dict[str, int] = field(default_factory=dict)  # by file and function
    attributes: dict[str, int] = field(default_factory=dict)  # by file and class
    outside_constructors: list[str] = field(default_factory=list)
    writes_to_others: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, leave_out: tuple[str, ...] = ()) -> "Sources":
        """Count all files below a folder, except those in folders with names in `leave_out`."""
        sources = cls()
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder)
            if not {"__pycache__", *leave_out} & set(name.parts):
                sources.count(str(name), path.read_text())
        return sources

    def count(self, name: str, text: str) -> None:
        """Add the counts of one file."""
        tree = ast.parse(text)
        self.files += 1
        self.lines += len(text.splitlines())
        self.code += _code_lines(text, tree)
        for scope, node, owner in _definitions(tree, (), None):
            where = f"{name}: {'.'.join(scope)}"
            if isinstance(node, ast.ClassDef):
                made, later = _attributes(node)
                self.attributes[where] = len(made | later)
                self.outside_constructors += [f"{where}.{attribute}" for attribute in sorted(later - made)]
            elif owner is None or not isinstance(owner, _DEFINITIONS):  # nested functions count for the outer one
                self.complexity[where] = 1 + sum(map(_branches, ast.walk(node)))
                self.writes_to_others += [f"{where}: {target}" for target in _writes_to_others(node, owner)]


def _code_lines(text: str, tree: ast.Module) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_DEFINITIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def _definitions(
    node: ast.AST, scope: tuple[str, ...], owner: ast.AST | None
) -> Iterator[tuple[tuple[str, ...], ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, ast.AST | None]]:
    """Yield all classes and functions, with qualified name and enclosing class or function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *_DEFINITIONS)):
            inner = (*scope, child.name)
            yield inner, child, owner
            yield from _definitions(child, inner, child)
        else:
            yield from _definitions(child, scope, owner)


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return isinstance(node, (*_BRANCHES, ast.match_case))


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the targets that a statement or expression assigns or deletes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        pending: list[ast.AST] = list(node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.NamedExpr)):
        pending = [node.target]
    else:
        return
    while pending:
        target = pending.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pending += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def _first_argument(function: ast.AST) -> str | None:
    """Return the name of the first argument: `self`, `cls`, or `ctx` in an autograd function."""
    assert isinstance(function, _DEFINITIONS)
    return function.args.args[0].arg if function.args.args else None


def _is_static(function: ast.AST) -> bool:
    assert isinstance(function, _DEFINITIONS)
    return any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)


def _attributes(cls: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Return the attributes that the class body and constructors set, and those that other methods set."""
    made = {each.id for item in cls.body for each in _targets(item) if isinstance(each, ast.Name)}
    later: set[str] = set()
    for item in cls.body:
        if isinstance(item, _DEFINITIONS):
            of_self = made if item.name in CONSTRUCTORS else later
            for target in (each for node in ast.walk(item) for each in _targets(node)):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == _first_argument(item):
                    of_self.add(target.attr)
    return made, later


def _writes_to_others(function: ast.AST, owner: ast.AST | None) -> Iterator[str]:
    own: set[str | None] = set()
    if isinstance(owner, ast.ClassDef) and not _is_static(function):
        own.add(_first_argument(function))
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            maker = ast.unparse(node.value.func).rpartition(".")[2]
            if maker[:1].isupper() or maker == "__new__":
                own |= {each.id for each in _targets(node) if isinstance(each, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield from () if ast.unparse(node.args[0]) in own else [ast.unparse(node)]
        for target in () if isinstance(node, ast.NamedExpr) else _targets(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in own:
                yield ast.unparse(target)
