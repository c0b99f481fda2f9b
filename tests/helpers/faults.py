"""The faults of tests/faults/README.md: who causes each, and a table of how it went.

`tests/conftest.py` imports the two hooks of pytest. A test's faults travel to the process that
writes the table as properties of its reports.
"""

import ast
import pathlib
import re
from typing import NamedTuple

TESTS = pathlib.Path(__file__).parents[1]
DOCUMENT = TESTS / 'faults' / 'README.md'
_ROW = re.compile(r'\| (\d+) \| (.+?) \| .* \| (.+?) \|')
_OUTCOMES = {'passed': 'survived', 'skipped': 'skipped', 'failed': 'FAILED', 'error': 'FAILED'}


class Row(NamedTuple):
    """A row of the document: the fault, and `file.py::test` or `file.py` of who causes it."""

    fault: str
    tests: list[str]


def rows() -> dict[int, Row]:
    """The rows of the document by the number of their fault."""
    found = (_ROW.fullmatch(line) for line in DOCUMENT.read_text().splitlines())
    return {int(m[1]): Row(m[2], re.findall(r'`([^`]+)`', m[3])) for m in found if m}


def marked() -> dict[str, set[int]]:
    """The faults of every marked test, by `file.py::test`; read off the files."""
    found: dict[str, set[int]] = {}
    for path in sorted(TESTS.rglob('test_*.py')):
        if 'mark.fault(' in (text := path.read_text()):
            body = ast.parse(text).body
            whole = _numbers(*(x for x in body if isinstance(x, ast.Assign)))
            for test in (x for x in body if isinstance(x, ast.FunctionDef)):
                name = f'{path.relative_to(TESTS).as_posix()}::{test.name}'
                if test.name.startswith('test_'):
                    found[name] = whole | _numbers(*test.decorator_list)
    return {name: numbers for name, numbers in found.items() if numbers}


def _numbers(*nodes: ast.AST) -> set[int]:
    """The arguments of all marks within."""
    calls = (x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Call))
    marks = (call for call in calls if ast.unparse(call.func) == 'pytest.mark.fault')
    return {ast.literal_eval(argument) for mark in marks for argument in mark.args}


def pytest_itemcollected(item) -> None:
    numbers = [number for mark in item.iter_markers('fault') for number in mark.args]
    item.user_properties.append(('faults', numbers))


def pytest_terminal_summary(terminalreporter, config) -> None:
    """With only fault tests selected, end with a line for each fault."""
    if config.option.markexpr != 'fault':
        return
    terminalreporter.section('faults')
    outcomes = _outcomes(terminalreporter.stats)
    for number, row in rows().items():
        terminalreporter.write_line(f'{number:4}  {outcomes.get(number, "-"):9} {row.fault}')


def _outcomes(stats: dict) -> dict[int, str]:
    """The word for each fault: the worst of its tests, of which a skipped one counts least."""
    found: dict[int, str] = {}
    for outcome in ('skipped', 'passed', 'failed', 'error'):
        for report in stats.get(outcome, ()):
            for number in dict(report.user_properties).get('faults', ()):
                found[number] = _OUTCOMES[outcome]
    return found
