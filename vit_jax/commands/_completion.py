"""Shell completion: a script made of the commands, their actions and their flags."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterable

from vit_jax.errors import check_choice

BASH = """\
_vit_jax() {
  local cur="${COMP_WORDS[COMP_CWORD]}" i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    [ "${COMP_WORDS[i]}" = vit_jax ] && break
  done
  [ "$i" -lt "$COMP_CWORD" ] || return 0
  local command='' action=''
  [ $((i + 1)) -lt "$COMP_CWORD" ] && command="${COMP_WORDS[i + 1]}"
  [ $((i + 2)) -lt "$COMP_CWORD" ] && action="${COMP_WORDS[i + 2]}"
  COMPREPLY=($(compgen -W "$(_vit_jax_words "$command" "$action")" -- "$cur"))
}
complete -o default -o bashdefault -F _vit_jax python python3
"""
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_vit_jax() {
  local i=${words[(i)vit_jax]} command='' action=''
  if (( i >= CURRENT )); then
    if (( $+functions[_python] )); then _python; else _files; fi
    return
  fi
  (( i + 1 < CURRENT )) && command=${words[i + 1]}
  (( i + 2 < CURRENT )) && action=${words[i + 2]}
  compadd -- ${=$(_vit_jax_words "$command" "$action")}
  _files
}
compdef _vit_jax python python3
"""
SHELLS = {'bash': BASH, 'zsh': ZSH}


def script(shell: str, commands: Iterable[str]) -> str:
    """The script with which a shell of SHELLS completes `python -m vit_jax ...`.

    Raises:
      UserError: for another shell.
    """
    check_choice('shell', shell, SHELLS)
    names, cases = sorted(commands), []
    for command in names:
        module = importlib.import_module(f'vit_jax.commands.{command}')
        actions = list(getattr(module, 'ACTIONS', ()))
        for action in actions:
            cases.append((f'{command}/{action}', flags(command, action)))
        cases.append((f'{command}/*', actions or flags(command)))
    cases.append(('*', [*names, '--help', '--version', '--completion']))
    lines = [f"    {place}) echo '{' '.join(w)}' ;;" for place, w in cases]
    function = ['_vit_jax_words() {', '  case "$1/$2" in', *lines, '  esac', '}', '']
    return '\n'.join(function) + SHELLS[shell]


def flags(*words: str) -> list[str]:
    """The flags in the `--help` of a command, or of one of its actions."""
    command, *rest = words
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(f'vit_jax.commands.{command}').main([*rest, '--help'])
    found = re.findall(r'^ +(?:-\w, )?(--[a-z][a-z-]*)', shown.getvalue(), re.MULTILINE)
    return list(dict.fromkeys(found))
