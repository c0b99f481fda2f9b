"""The flags for evaluators that the config of a run does not have."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from typing import Any

from vit_jax.config import defaults, schema
from vit_jax.errors import UserError
from vit_jax.signatures import keyword_only

FIT = 'train'


def add_evaluator_flags(parser: argparse.ArgumentParser) -> None:
    """`--evaluator`, which may be repeated, and `--fit`."""
    parser.add_argument(
        '--evaluator',
        action='append',
        default=[],
        metavar='NAME',
        help="what to measure instead, as 'knn' or 'fewshot(shots=(1, 5))'; may be repeated",
    )
    parser.add_argument(
        '--fit', metavar='SPLIT', help=f'what evaluators learn from; {FIT} by default'
    )


def evaluator_entries(words: Sequence[str], fit: str | None) -> dict[str, dict[str, Any]]:
    """`fewshot(seeds=5)` -> {'fewshot': {'evaluator': 'fewshot', 'seeds': 5, 'fit': 'train'}}.

    Args:
      words: names of evaluators, with keywords or without.
      fit: the split that those learn from which learn at all; None for the usual one.

    Raises:
      UserError: for a name that is none, or keywords that cannot be read.
    """
    if fit is not None and not words:
        raise UserError(f'--fit {fit!r}: no --evaluator learns from it')
    entries = {}
    for word in words:
        name, keywords = parse_call(word)
        fitted = {'fit': fit or FIT} if schema.evaluator_class(name).learns else {}
        entries[name.rpartition('.')[-1]] = {'evaluator': name, **keywords, **fitted}
    return entries


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """`a.name(x=1)` -> ('a.name', {'x': 1}); nothing is executed."""
    try:
        node = ast.parse(text.strip(), mode='eval').body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if call.args or any(k.arg is None for k in call.keywords):
            raise ValueError('a value without its key')
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except (SyntaxError, ValueError) as e:
        raise UserError(f"--evaluator {text!r}: {e}; write 'NAME' or 'NAME(KEY=VALUE)'") from e
    return ast.unparse(call.func), keywords


def parse_classes(text: str) -> tuple[int, ...]:
    """`8,9` -> (8, 9)."""
    try:
        return tuple(int(word) for word in text.split(','))
    except ValueError as e:
        raise UserError(f"--classes {text!r}: write numbers of classes, as '8,9'") from e


def data_keywords(section: Any) -> dict[str, Any]:
    """What an entry of `config.evals` says of its data."""
    known = {'batch_size', *keyword_only(schema.constructor('data'))}
    return {k: v for k, v in defaults.keywords(section).items() if k in known}
