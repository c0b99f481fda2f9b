"""Contents of a chip's memory during a step, from XLA's buffer assignment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vit_jax.profiling.scheduled_hlo import Module

ALLOCATION = re.compile(r'^allocation \d+: size (\d+)(?:, color (\d+))?(.*):$', re.M)
PARAMETER = re.compile(r'parameter (\d+)')
# How JAX names the arguments of a step: state.opt_state[1][0].mu['head']['kernel'].
PARTS = {
    'parameters': re.compile(r"(state\.params|variables\['params'\])"),
    'optimizer': re.compile(r'state\.opt_state'),
    'average of parameters': re.compile(r'state\.ema'),
    'batch': re.compile(r'batch'),
}
OTHER, TEMPORARIES = 'other', 'activations and temporaries'


def memory(buffers: str, module: Module) -> dict[str, int]:
    """Bytes of HBM by contents; donated arguments count once, tiles with their padding.

    Args:
      buffers: the text that XLA dumps.
      module: of these buffers, for the names of its arguments.
    """
    names = {int(p.text): p.op_name for p in module.entry.parameters}
    found = dict.fromkeys((*PARTS, TEMPORARIES, OTHER), 0)
    for size, color, what in ALLOCATION.findall(buffers):
        if (color or '0') == '0' and 'thread-local' not in what:
            found[_part(what, names)] += int(size)
    return {part: size for part, size in found.items() if size}


def _part(what: str, names: Mapping[int, str]) -> str:
    if 'preallocated-temp' in what:
        return TEMPORARIES
    match = PARAMETER.search(what)
    name = names.get(int(match[1]), '') if match else ''
    return next((part for part, pattern in PARTS.items() if pattern.match(name)), OTHER)


def estimated(state: Mapping[str, int], needed: float) -> dict[str, int]:
    """Bytes of HBM by contents for a step that does not fit, for which XLA reports only the sum.

    Args:
      state: bytes by field of the state, without padding.
      needed: the sum in bytes.
    """
    fields = {'params': 'parameters', 'opt_state': 'optimizer', 'ema': 'average of parameters'}
    found = {part: state[field] for field, part in fields.items() if state.get(field)}
    return found | {f'batch, {TEMPORARIES}': round(needed) - sum(found.values())}
