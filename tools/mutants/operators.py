"""The changes that mutants make to a Python source, one place at a time.

No place is excluded by hand. Rules exclude annotations, code that only a type checker reads, and the insides of
f-strings, whose ranges ast does not know. A change that leaves the compiled code the same is dropped later, when its
mutant is made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from mutants.edits import Edit, Ranges

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: (r"<", ("<=", ">=")),
    ast.LtE: (r"<=", ("<", ">")),
    ast.Gt: (r">", (">=", "<=")),
    ast.GtE: (r">=", (">", "<")),
    ast.Eq: (r"==", ("!=",)),
    ast.NotEq: (r"!=", ("==",)),
    ast.Is: (r"\bis\b", ("is not",)),
    ast.IsNot: (r"\bis\s+not\b", ("is",)),
    ast.In: (r"\bin\b", ("not in",)),
    ast.NotIn: (r"\bnot\s+in\b", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: (r"/", "*"),
    ast.FloorDiv: (r"//", "*"),
    ast.Mod: (r"%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
    ast.BitOr: (r"\|", "&"),
    ast.BitAnd: (r"&", "|"),
    ast.BitXor: (r"\^", "&"),
}
_PAIRS = {"any": "all", "all": "any", "min": "max", "max": "min"}


def edits(source: bytes) -> Iterator[Edit]:
    """Returns all changes of a source, in the order of their places."""
    tree = ast.parse(source)
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found = _Operators(Ranges(source), modules)
    found.visit(tree)
    yield from sorted(set(found.edits), key=lambda edit: (edit.start, edit.end, edit.text))


class _Operators(ast.NodeVisitor):
    def __init__(self, ranges: Ranges, modules: set[str]) -> None:
        self.edits: list[Edit] = []
        self._ranges = ranges
        self._modules = modules
        self._function = ""

    # ---- new texts ------------------------------------------------------------------------------------------------
    def _replace(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> None:
        self.edits.append(Edit(self._ranges.start(node), self._ranges.end(node), text))

    def _replace_between(self, left: ast.expr, right: ast.expr, pattern: str, text: str) -> None:
        start, end = self._ranges.end(left), self._ranges.start(right)
        gap = re.sub(
            r"#[^\n]*", lambda comment: " " * len(comment[0]), self._ranges.source[start:end].decode("latin-1")
        )
        for found in re.finditer(pattern, gap):
            self.edits.append(Edit(start + found.start(), start + found.end(), text))

    def _drop_from(self, nodes: list[ast.expr] | list[ast.expr | ast.keyword], index: int) -> None:
        """Drops one of several items separated by commas."""
        node = nodes[index]
        if index + 1 < len(nodes):
            self.edits.append(Edit(self._ranges.start(node), self._ranges.start(nodes[index + 1]), ""))
        elif index:
            self.edits.append(Edit(self._ranges.end(nodes[index - 1]), self._ranges.end(node), ""))
        else:
            self._replace(node, "")

    def _swap(self, one: ast.expr, other: ast.expr) -> None:
        texts = self._ranges.text(one), self._ranges.text(other)
        between = self._ranges.source[self._ranges.end(one) : self._ranges.start(other)].decode()
        if texts[0] != texts[1]:
            self.edits.append(Edit(self._ranges.start(one), self._ranges.end(other), texts[1] + between + texts[0]))

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # these have operators of their own
            self._replace(test, f"(not ({self._ranges.text(test)}))")

    # ---- places excluded by rule ------------------------------------------------------------------------------------
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, node.name
        for child in [*node.decorator_list, node.args, *node.body]:
            self.visit(child)
        self._function = outer

    # ---- expressions ------------------------------------------------------------------------------------------------
    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            pattern, others = _COMPARISONS[type(operator)]
            for other in others:
                self._replace_between(left, right, pattern, other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_type = isinstance(node.right, ast.Constant) and node.right.value is None  # an alias, such as `int | None`
        if type(node.op) in _ARITHMETIC and not is_type:
            self._replace_between(node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pattern, other = (r"\band\b", "or") if isinstance(node.op, ast.And) else (r"\bor\b", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, pattern, other)
        for index, value in enumerate(node.values):
            kept = [self._ranges.text(other) for other in node.values if other is not value]
            self._replace(node, f"({f' {pattern[2:-2]} '.join(f'({text})' for text in kept)})")
            if index and isinstance(value, ast.Name | ast.Attribute | ast.Call):
                self._negate(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._replace(node, f"({self._ranges.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            for other in {value + 1, value - 1} if value else {1}:
                self._replace(node, f"({other})" if other < 0 else str(other))
        elif isinstance(value, float):
            self._replace(node, repr(value * 2) if value else "1.0")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self._replace(bound, "")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace(test, "True")
            self._negate(test)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _PAIRS:
            self._replace(node.func, _PAIRS[node.func.id])
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            return  # with other arguments the call always raises
        for one, other in zip(node.args, node.args[1:], strict=False):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                self._swap(one, other)
        arguments: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=self._ranges.start)
        for index, argument in enumerate(arguments):
            if isinstance(argument, ast.keyword) or (index + 1 == len(arguments) > 1):
                self._drop_from(arguments, index)
        if not arguments and isinstance(node.func, ast.Attribute):
            receiver = node.func.value
            if not (isinstance(receiver, ast.Name) and receiver.id in self._modules):
                self._replace(node, self._ranges.text(receiver))
        self.generic_visit(node)

    # ---- statements -------------------------------------------------------------------------------------------------
    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring, an ellipsis
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        # Without its first assignment a name is undefined: every test that runs the line would find that.
        first = self._function == "__init__" or any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
        if not first:
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        if type(node.op) in _ARITHMETIC:
            pattern, other = _ARITHMETIC[type(node.op)]
            self._replace_between(node.target, node.value, pattern + "=", other + "=")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")
        if isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            self._replace(node.exc.func, "Exception")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node.value, "None")
        elif node.value is None:
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue")
        self._replace(node, "pass")

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for index, item in enumerate(node.items):
            if item.optional_vars is not None:
                continue
            if len(node.items) == 1:
                start, end = self._ranges.start(node), self._ranges.end(item.context_expr)
                self.edits.append(Edit(start, end, "if True"))
            elif index:
                before = node.items[index - 1].optional_vars or node.items[index - 1].context_expr
                self.edits.append(Edit(self._ranges.end(before), self._ranges.end(item.context_expr), ""))
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        if node.finalbody:
            start, end = self._ranges.start(node.finalbody[0]), self._ranges.end(node.finalbody[-1])
            self.edits.append(Edit(start, end, "pass"))
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Tuple):
            for index in range(len(node.type.elts)):
                self._drop_from(node.type.elts, index)
        elif node.type is not None:
            self._replace(node.type, "()")
        self.generic_visit(node)
