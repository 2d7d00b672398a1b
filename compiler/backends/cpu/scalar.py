"""A scalar expression of a user's op -> TVMScript over vectors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Final

from pagec.compiler.errors import CompileError

Call = Callable[..., str]

# Functions of the vector library, by the number of their arguments.
_LIBRARY: Final = {"exp": 1, "sigmoid": 1, "silu": 1, "tanh": 1, "gelu": 1, "gelu_tanh": 1, "max": 2}
_KNOWN: Final = (*_LIBRARY, "min", "relu", "abs", "sqrt")
_OPERATORS: Final = {ast.Add: "+", ast.Sub: "-", ast.Div: "/"}
_MAX_POWER: Final = 8


def vector_code(
    text: str, operands: Mapping[str, str], call: Call, splat: Callable[[float], str], op: str
) -> str:
    """`operands` are the code of each name; `call` and `splat` make a library call and a constant."""
    writer = _Writer(operands, call, splat, op, text)
    try:
        return writer.visit(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise writer.error(str(error.msg)) from error


class _Writer:
    def __init__(
        self, operands: Mapping[str, str], call: Call, splat: Callable[[float], str], op: str, text: str
    ) -> None:
        self.operands, self.call, self.splat, self.op, self.text = operands, call, splat, op, text

    def error(self, message: str) -> CompileError:
        return CompileError(
            f"scalar expression {self.text!r}: {message}",
            place=f"op {self.op}",
            remedy=f"use + - * /, whole powers, the op's parameters, and {', '.join(_KNOWN)}",
        )

    def visit(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self.splat(float(value))
            case ast.Name():
                if node.id not in self.operands:
                    raise self.error(f"no parameter is named {node.id!r}")
                return self.operands[node.id]
            case ast.UnaryOp(op=ast.USub()):
                return f"({self.splat(0.0)} - {self.visit(node.operand)})"
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int() as power)) if (
                2 <= power <= _MAX_POWER
            ):
                return self._power(self.visit(node.left), power)
            case ast.BinOp(op=ast.Mult()):
                return self.call("mul", self.visit(node.left), self.visit(node.right))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return f"({self.visit(node.left)} {_OPERATORS[type(node.op)]} {self.visit(node.right)})"
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                return self._function(name, [self.visit(a) for a in node.args])
        raise self.error(f"{ast.unparse(node)!r} is not part of the language")

    def _power(self, x: str, power: int) -> str:
        result = x
        for _ in range(power - 1):
            result = self.call("mul", result, x)
        return result

    def _function(self, name: str, args: list[Any]) -> str:
        if len(args) != {"min": 2, "relu": 1, "abs": 1, "sqrt": 1, **_LIBRARY}.get(name):
            raise self.error(f"no function {name!r} of {len(args)} arguments")
        zero = self.splat(0.0)
        match name:
            case "min":
                return f"({zero} - {self.call('max', f'({zero} - {args[0]})', f'({zero} - {args[1]})')})"
            case "relu":
                return self.call("max", args[0], zero)
            case "abs":
                return self.call("max", args[0], f"({zero} - {args[0]})")
            case "sqrt":
                return f"T.sqrt({args[0]})"
        return self.call(name, *args)
