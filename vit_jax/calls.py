"""Text of a config that names functions, as `a(1, x=2)|b`; nothing of it is executed."""

from __future__ import annotations

import ast
from typing import Any

from vit_jax.errors import UserError


def parse_transforms(text: str) -> list[ast.expr]:
    """The transforms that stand between the bars, in order; none for an empty text.

    Raises:
      UserError: if the text is malformed.
    """
    if not text.strip():
        return []
    try:
        return _pieces(ast.parse(text.strip(), mode='eval').body)
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"transforms {text!r}: {error}; write for example 'pad_and_crop(4)|flip'"
        ) from error


def transform_names(text: str) -> list[str]:
    """The functions that transforms name, including those in texts within their arguments.

    Raises:
      UserError: if the text is malformed.
    """
    names = []
    for node in parse_transforms(text):
        names.append(function_name(node))
        if names[-1] == 'views':  # whose last argument are transforms
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            for inner in texts:
                names += transform_names(inner) if isinstance(inner, str) else []
    return names


def parse_call(text: str, where: str) -> ast.expr:
    """One function, with arguments or without.

    Raises:
      UserError: if the text is malformed; begins with `where`.
    """
    try:
        return ast.parse(text.strip(), mode='eval').body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{where}: {error}; write for example 'my_lab.packing(length=256)'"
        ) from error


def parse_keywords(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """The name and the keywords of `a.name(x=1)`, or of a name alone.

    Raises:
      UserError: for any other text; begins with `where`.
    """
    try:
        node = parse_call(text, where)
        args, keywords = arguments(node)
        function = node.func if isinstance(node, ast.Call) else node
        if args or not isinstance(function, (ast.Name, ast.Attribute)):
            raise ValueError(text)
    except (UserError, ValueError) as error:
        raise UserError(f"{where}: write a name, or a call as 'name(option=1)'") from error
    return function_name(node), keywords


def arguments(node: ast.expr) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function, by position and by name.

    Raises:
      UserError: if they are not plain values.
    """
    if not isinstance(node, ast.Call):
        return [], {}
    try:
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError('**')
        args = [ast.literal_eval(arg) for arg in node.args]
        return args, {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
    except (TypeError, ValueError) as error:
        raise UserError('arguments must be plain numbers, strings or tuples of them') from error


def function_name(node: ast.expr) -> str:
    """The function that a transform names, with arguments or without."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _pieces(node: ast.expr) -> list[ast.expr]:
    """`a|b|c` is a Python expression: a tree of binary operators."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_pieces(node.left), *_pieces(node.right)]
    return [node]
