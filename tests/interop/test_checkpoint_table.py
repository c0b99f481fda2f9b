"""The table of families of docs/checkpoints.md names what the tests read and write."""

from pathlib import Path

from helpers import checkpoint_table

DOCUMENT = Path(__file__).parents[2] / 'docs' / 'checkpoints.md'


def test_every_family_of_the_tests_is_in_the_table():
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith('| ')]
    table = {tuple(cell.strip() for cell in line.split('|')[1:5]) for line in lines}
    for (base, family), names in checkpoint_table.rows().items():
        written = checkpoint_table.written(base, family)
        assert (base, family, ', '.join(names), written) in table
