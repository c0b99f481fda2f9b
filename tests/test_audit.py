"""The audit of other projects' configs notices what has no row, and rows of nothing."""

import importlib.util
import pathlib

import pytest
from helpers.messages import mentions

FILE = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'site' / 'audit.py'


@pytest.fixture(scope='module')
def audit():
    spec = importlib.util.spec_from_file_location('audit', FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('"""A recipe."""\nconfig.model_name = \'vit\'\n')
    return root


def test_new_configs_and_stale_rows_are_named(audit, tmp_path):
    root = written(tmp_path, 'big_vision/configs/new.py', 'big_vision/configs/common.py')
    found = audit.configs(root, 'BV')
    assert found.keys() == {'BV/new.py'}
    with pytest.raises(SystemExit, match=r"BV/new.py: 'A recipe.' .* ROWS") as error:
        audit.check(found)
    assert mentions(str(error.value), 'BV/vit_i1k.py', 'matches')


def test_the_table_of_the_page_is_made_of_all_rows(audit):
    page = audit.PAGE.read_text().partition(audit.TITLE)[2]
    verdicts = [line.split(' | ')[-1] for line in page.splitlines() if line.startswith('| BV/')]
    assert len(verdicts) == sum(row.pattern.startswith('BV/') for row in audit.ROWS)
    for row in audit.ROWS:
        assert f'{audit.VERDICTS[row.verdict]} {row.text}'.rstrip() in page


def test_a_folder_without_configs_is_refused(audit, tmp_path):
    with pytest.raises(SystemExit, match='holds no configs'):
        audit.configs(tmp_path, 'VT')
