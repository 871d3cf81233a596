"""Expressions (`scalar.py`) as C99 text."""

from qjax.export.emit.c.scalar import SIGNED, Scalar, bits
from qjax.export.emit.c.text import TYPES, literal, stripped

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "and": "&",
    "or": "|",
    "xor": "^",
    "div": "/",
    "rem": "%",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}
_HINTS = {
    "mul": "product",
    "add": "total",
    "sub": "rest",
    "shl": "up",
    "sar": "down",
    "shr": "down",
    "max": "high",
    "min": "low",
    "select": "chosen",
    "clz": "zeros",
    "abs": "size",
    "cast": "wide",
    "and": "masked",
    "or": "merged",
    "div": "quotient",
    "rem": "remainder",
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Printer:
    """Prints expressions as C: statements for what is used more than once, one expression for the rest.

    helpers: receives the names of the helpers that the text calls.
    """

    def __init__(self, helpers: set[str]) -> None:
        self.helpers = helpers
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._uses: dict[int, int] = {}

    def program(self, root: Scalar, *, locals_: bool = True) -> str:
        """Adds the statements to `lines` and returns the value as an expression."""
        seen: list[Scalar] = []

        def visit(node: Scalar) -> None:
            for arg in node.args:
                self._uses[id(arg)] = self._uses.get(id(arg), 0) + 1
                if self._uses[id(arg)] == 1:
                    visit(arg)
            seen.append(node)

        visit(root)
        if locals_:
            for node in seen:
                if node.args and node is not root and (self._uses[id(node)] > 1 or len(self.text(node)) > 90):
                    self._declare(node)
        return stripped(self.text(root))

    def _declare(self, node: Scalar) -> None:
        text = stripped(self.text(node))
        hint = _HINTS.get(node.function.removesuffix("_wrap"), "test" if node.dtype == "bool" else "value")
        count = self._counts[hint] = self._counts.get(hint, 0) + 1
        name = hint if count == 1 else f"{hint}{count}"
        self.lines.append(f"const {TYPES[node.dtype]} {name} = {text};")
        self._names[id(node)] = name

    def text(self, node: Scalar) -> str:
        """The expression, in parentheses if it is more than an atom."""
        if id(node) in self._names:
            return self._names[id(node)]
        if node.function == "const":
            text = literal(node.low, node.dtype)
            return f"({text})" if text.startswith("-") else text
        if node.function == "param":
            return node.name
        if node.function == "float":
            self.helpers.add("floats")
            return node.name
        if node.function.startswith("float "):
            return self._floating(node.function.removeprefix("float "), [self.text(arg) for arg in node.args], node)
        return self._operation(node)

    def _floating(self, function: str, args: list[str], node: Scalar) -> str:
        """An operation on floats; a helper if C has no operator with the meaning of JAX's primitive."""
        self.helpers.add("floats")
        if function in _INFIX:
            return f"({args[0]} {_INFIX[function]} {args[1]})"
        if function == "select_n":
            return f"({args[0]} ? {args[2]} : {args[1]})"
        if function == "neg":
            return f"(-{args[0]})"
        if function == "convert_element_type" and node.dtype == "float32":
            return f"(float){args[0]}"
        name = "to_int" if function == "convert_element_type" else function
        return self._help(f"{name}_f32", *args)

    def _weak(self, node: Scalar) -> bool:
        """Whether the C type of the text may be int although the dtype has 64 bits."""
        if id(node) in self._names or node.function in ("param", "cast", "cast_wrap"):
            return False
        if node.function == "const":
            return abs(node.low) < 2**31
        if node.function.endswith("_wrap") or node.function in ("clz", "sar", "max", "min", "abs", "sign"):
            return False
        if node.function == "select":
            args = node.args[1:]
        else:
            args = node.args[:1] if node.function in ("shl", "shr") else node.args
        return all(self._weak(arg) for arg in args)

    def _help(self, name: str, *args: str) -> str:
        self.helpers.add(name)
        return f"{name}({', '.join(stripped(a) for a in args)})"

    def _operation(self, node: Scalar) -> str:
        args = [self.text(arg) for arg in node.args]
        function, dtype = node.function, node.dtype
        if function in _COMPARISONS:
            return f"({args[0]} {_INFIX[function]} {args[1]})"
        if dtype == "bool":
            if function == "not":
                return f"(!{args[0]})"
            if function == "select":
                return f"({args[0]} ? {args[2]} : {args[1]})"
            return f"({args[0]} {_INFIX[function]} {args[1]})"
        if function == "cast":
            return f"({TYPES[dtype]}){args[0]}"
        narrow = bits(dtype) < 32
        suffix = f"i{max(bits(dtype), 32)}" if dtype in SIGNED or narrow else f"u{bits(dtype)}"
        if function == "cast_wrap":
            return self._wrapped(args[0], dtype)
        if bits(dtype) == 64 and function != "select" and all(self._weak(a) for a in node.args[:1]):
            args[0] = f"({TYPES[dtype]}){args[0]}"
        text = self._wide(node, args, suffix)
        if not narrow:
            return text
        return self._wrapped(text, dtype) if function.endswith("_wrap") else f"({TYPES[dtype]}){text}"

    def _wrapped(self, text: str, dtype: str) -> str:
        unsigned = f"({TYPES['u' + dtype if dtype in SIGNED else dtype]}){text}"
        return self._help(f"to_i{bits(dtype)}", unsigned) if dtype in SIGNED else unsigned

    def _wide(self, node: Scalar, args: list[str], suffix: str) -> str:
        """The operation in the type that `suffix` names, which has at least 32 bits."""
        function = node.function
        native = suffix.startswith("u")
        if function.endswith("_wrap") and native and function not in ("div_wrap", "rem_wrap"):
            function = function.removesuffix("_wrap")
        if function in _INFIX:
            return f"({args[0]} {_INFIX[function]} {args[1]})"
        if function == "neg":
            return f"(0u - {args[0]})" if native else f"(-{args[0]})"
        if function == "not":
            return f"(~{args[0]})"
        if function == "select":
            return f"({args[0]} ? {args[2]} : {args[1]})"
        if function == "shl" and (native or node.args[0].low >= 0):
            return f"({args[0]} << {args[1]})"
        if function in ("shr", "sar") and (native or node.args[0].low >= 0):
            return f"({args[0]} >> {args[1]})"
        if function == "shl" and not native:
            function = "shl_wrap"
        if function == "neg_wrap":
            return self._help(f"sub_{suffix}", "0", args[0])
        if function in ("shl_wrap", "sar", "shr_wrap"):
            # the shift amount is below 64 here, so int32 holds it
            args[1] = args[1] if bits(node.args[1].dtype) <= 32 else f"(int32_t){args[1]}"
        return self._help(f"{function.removesuffix('_wrap')}_{suffix}", *args)
