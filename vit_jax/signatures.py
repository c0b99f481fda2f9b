"""Signatures of what a config names, and calls written as text."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from vit_jax.errors import UserError

NESTING = ('views', 'choice')  # transforms that take texts of others
WEIGHT = re.compile(r'\*(\d+(?:\.\d+)?)(?:\+|$)')  # of a source, before the next one
Parameters = dict[str, inspect.Parameter]


def parameters(constructor: Callable) -> Parameters:
    """Return the parameters of a function or class, with evaluated annotations.

    An annotation that only a type checker can evaluate becomes `Any`.
    """
    return dict(_parameters(constructor))


@functools.cache  # read many times for a config, and a sweep has many configs
def _parameters(constructor: Callable) -> Parameters:
    function = constructor.__init__ if inspect.isclass(constructor) else constructor
    scope = getattr(inspect.unwrap(function), '__globals__', {})
    declared = inspect.signature(constructor).parameters
    return {name: p.replace(annotation=_evaluated(p, scope)) for name, p in declared.items()}


def _evaluated(parameter: inspect.Parameter, scope: dict[str, Any]) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={'it': parameter.annotation})
    try:
        return typing.get_type_hints(holder, scope, include_extras=True)['it']
    except NameError:
        return Any


def parse_transforms(text: str) -> list[ast.expr]:
    """Parse transforms separated by bars; none for an empty text.

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
    """Return the functions named by transforms, including those in text arguments.

    Raises:
      UserError: if the text is malformed.
    """
    names = []
    for node in parse_transforms(text):
        names.append(function_name(node))
        for inner in nested_transforms(node):
            names += transform_names(inner)
    return names


def nested_transforms(node: ast.expr) -> list[str]:
    """Return the texts of transforms among the arguments of a transform."""
    if (name := function_name(node)) not in NESTING:
        return []
    args, kwargs = arguments(node)
    texts = args if name == 'choice' else args[2:]  # `views` begins with a name and a number
    return [text for text in (*texts, kwargs.get('transforms')) if isinstance(text, str)]


def parse_sources(text: str) -> list[tuple[str, float]]:
    """Return the sources of a mixture with their weights, as in 'folder:a*0.7+folder:b*0.3'.

    A text without a weight for each of two or more sources is a single one of weight 1.
    """
    *parts, remaining = WEIGHT.split(text)
    names, weights = parts[::2], parts[1::2]
    if remaining or len(names) < 2 or not all(names):
        return [(text, 1.0)]
    return [(name, float(weight)) for name, weight in zip(names, weights, strict=True)]


def parse_call(text: str, location: str) -> ast.expr:
    """Parse one function, with arguments or without.

    Raises:
      UserError: if the text is malformed; begins with `location`.
    """
    try:
        return ast.parse(text.strip(), mode='eval').body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{location}: {error}; write for example 'my_lab.packing(length=256)'"
        ) from error


def parse_keywords(text: str, location: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the keywords of a call `a.name(x=1)`, or of a plain name.

    Raises:
      UserError: for any other text; begins with `location`.
    """
    try:
        node = parse_call(text, location)
        args, keywords = arguments(node)
        function = node.func if isinstance(node, ast.Call) else node
        if args or not isinstance(function, (ast.Name, ast.Attribute)):
            raise ValueError(text)
    except (UserError, ValueError) as error:
        raise UserError(f"{location}: write a name, or a call as 'name(option=1)'") from error
    return function_name(node), keywords


def arguments(node: ast.expr) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a function, by position and by name.

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
    """Return the name of the function in a transform, which may be a call."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _pieces(node: ast.expr) -> list[ast.expr]:
    """Return the operands of `a|b|c`, which Python parses as a tree of binary operators."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_pieces(node.left), *_pieces(node.right)]
    return [node]
