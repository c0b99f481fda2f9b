"""The tables of docs/checkpoint_families.md name what the tests read and write, and count."""

from pathlib import Path

import pytest
from helpers import checkpoint_table, transformers_totals
from helpers.messages import mentions

DOCUMENT = Path(__file__).parents[2] / 'docs' / 'checkpoint_families.md'


def test_every_family_of_the_tests_is_in_the_table():
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith('| ')]
    table = {tuple(cell.strip() for cell in line.split('|')[1:5]) for line in lines}
    for (base, family), names in checkpoint_table.rows().items():
        written = checkpoint_table.written(base, family)
        assert (base, family, ', '.join(names), written) in table


def test_the_forms_of_transformers_that_are_counted():
    pytest.importorskip('transformers')
    forms = list(transformers_totals.forms())
    assert f'of {len(forms)} classes' in ' '.join(DOCUMENT.read_text().split())
    name, config, fields, tower = forms[0]
    assert transformers_totals.outcome(name, config, fields, tower) == 'read'
    other = transformers_totals.outcome(name, config, {**fields, 'hidden_act': 'relu'}, tower)
    assert mentions(other, 'hidden_act', "'relu'")
