"""The commands, links and code of the documentation are those of the code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest
from helpers import core_alone
from helpers.messages import says
from PIL import Image

import vit_jax
from vit_jax import __main__
from vit_jax.commands import _config_keys, launch
from vit_jax.commands._parser import RENAMED
from vit_jax.config import load
from vit_jax.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, UserError
from vit_jax.interop import files
from vit_jax.interop.families import vision_transformer
from vit_jax.models import vit
from vit_jax.runtime import processes
from vit_jax.scaling import coverage
from vit_jax.sweeps import space
from vit_jax.trainer import meter

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text()
COMMAND_PAGE = (ROOT / 'docs' / 'commands.md').read_text()
PYTHON_PAGE = (ROOT / 'docs' / 'python.md').read_text()
DOCUMENTS = [
    ROOT / 'README.md',
    ROOT / 'CONTRIBUTING.md',
    *(ROOT / 'docs').glob('*.md'),
    *(ROOT / 'experiments').rglob('*.md'),
]
SOURCES = [*DOCUMENTS, *(ROOT / 'experiments').rglob('*.py'), *(ROOT / 'vit_jax').rglob('*.py')]


def commands_in(text: str) -> list[str]:
    """The words after `python -m vit_jax`, for every line that gives a whole command."""
    lines = text.replace('\\\n', ' ').splitlines()
    found = [re.search(r'python -m vit_jax ([a-z]+ .*?--[^`]*)', line) for line in lines]
    words = [match[1].strip() for match in found if match]
    # In code the quote that ends the string is not the command's.
    return [text[:-1] if text.count("'") % 2 else text for text in words]


WITH_ACTIONS = ('launch', 'scaling', 'sweep')  # `scaling fit`, `sweep create`, ...
COMMANDS = sorted({command for path in SOURCES for command in commands_in(path.read_text())})


def task_of(args):
    """The task of a run or a checkpoint that is not there, by its name."""
    named = args.model or args.workdir or args.checkpoint or ''
    if 'cappa' in named:
        return 'caption'
    return 'siglip' if re.search('siglip|openai/clip', named) else 'classify'


@pytest.fixture(autouse=True)
def _flags_of_tasks(monkeypatch):
    monkeypatch.setattr('vit_jax.commands.predict.task_name', task_of)


@pytest.mark.parametrize('command', COMMANDS)
def test_documented_command_has_these_flags_and_config(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(shlex.split(command, comments=True), capsys)


def check(words, capsys):
    """Of what a launcher starts, too."""
    name, *words = words
    if '--' in words:
        cut = words.index('--')
        words, launched = words[:cut], words[cut + 1 :]
        check(launched, capsys)
    action = words[:1] if name in WITH_ACTIONS else []
    named = [word for word in ('--workdir', '--checkpoint') if name == 'predict' and word in words]
    own = words[words.index(named[0]) :][:2] if named else words[: name == 'predict']
    with pytest.raises(SystemExit) as stop:
        __main__.main([name, *action, *own, '--help'])
    assert stop.value.code == 0
    overrides, rest = load.split_overrides(words)
    flags = {word.partition('=')[0] for word in rest if word.startswith('--')}
    flags = {RENAMED.get(flag, flag) for flag in flags}
    assert flags <= set(re.findall(r'--[a-z][a-z-]*', capsys.readouterr().out))
    if name in ('train', *launch.WITH_CONFIG) and rest and rest[0][0] not in '-.':
        rest = ['--config', *rest]
    if '--config' in rest:
        load.load(rest[rest.index('--config') + 1], overrides)


class Parsed(BaseException):
    """All flags of a command were understood; it does not go on."""


def lines_in(text: str) -> list[str]:
    """Every line of the text's blocks that gives a command, without a comment or a redirection."""
    blocks = re.findall(r'```([^\n`]*)\n(.*?)```', text, re.DOTALL)
    shell = [block for language, block in blocks if language in ('', 'sh')]
    lines = ''.join(shell).replace('\\\n', ' ').splitlines()
    found = [re.search(r'python -m vit_jax ([a-z].*)', line) for line in lines]
    return [re.split(r' (?:#|>|&&|2>)', match[1])[0].strip() for match in found if match]


LINES = sorted({line for path in DOCUMENTS for line in lines_in(path.read_text())})


@pytest.fixture
def parse(monkeypatch):
    """Runs a command until its flags are parsed, and checks the files and configs it names."""
    monkeypatch.chdir(ROOT)
    parse_flags = argparse.ArgumentParser.parse_known_intermixed_args

    def stop(self, args=None, namespace=None):
        parsed, unknown = parse_flags(self, args, namespace)
        if unknown:  # a mistake, unless a command looks for some flags before the others
            return parsed, unknown
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, 'parse_known_intermixed_args', stop)

    def parse(words):
        name, *rest = words
        with pytest.raises(Parsed):
            importlib.import_module(f'vit_jax.commands.{name}').main(rest)
        if '--' in rest:
            parse(rest[rest.index('--') + 1 :])
        for word in rest:
            if word.startswith('experiments/sweeps/') or (name == 'sweep' and '.py' in word):
                space.load_sweep(word)

    return parse


@pytest.mark.parametrize('line', LINES)
def test_every_line_of_the_documents_is_understood(line, parse):
    parse(shlex.split(line))


@pytest.mark.parametrize('line', [line for line in LINES if line.startswith('launch ')])
def test_a_launch_is_printed_as_a_job(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    flags, launched = line.split(' -- ')
    words = [w for w in shlex.split(flags) if w != '--preflight']  # needs the compiler
    assert __main__.main([*words, '--dry-run', '--', *shlex.split(launched)]) == 0
    assert shlex.split(launched)[-1] in capsys.readouterr().out


def test_keys_that_the_documents_name_exist():
    known = {'model.name', 'task.name', 'evals.NAME'}
    for heading, keys in _config_keys.package_keys().items():
        section = heading.partition(',')[0].removeprefix('config').removeprefix('.')
        known |= {f'{section}.{key.name}'.removeprefix('.') for key in keys}
    sections = {key.rpartition('.')[0] for key in known}
    for document in DOCUMENTS:
        if document.name in ('moving.md', 'moving_configs.md'):  # names those of other code
            continue
        for name in re.findall(r'(?<![\w.])config\.([a-z_][\w.]*\w)', document.read_text()):
            if name in known | sections or name in ('json', 'py', 'md', 'run'):
                continue
            key = name.removeprefix('evals.').partition('.')[2]
            assert {f'evals.NAME.{key}', f'data.{key}'} & known, f'{document}: config.{name}'


@pytest.mark.parametrize(
    'line',
    [
        'train --config experiments/vit/digits.py --wrkdir runs/digits',
        'data --batches many --config experiments/vit/digits.py',
        'sweep work',
        'sweep create experiments/sweeps/digits.py:gird --study a',
        'launch sky --tpu v5litepod-16 -- train --confg a.py',
    ],
)
def test_a_line_with_a_mistake_is_not(line, parse):
    with pytest.raises(UserError):
        parse(shlex.split(line))


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document):
    text = re.sub(r'https?://\S+', '', document.read_text())
    named = re.findall(r'(?:experiments|tests|docs)/[\w/.]*\.(?:py|csv|png|md)', text)
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert [name for name in missing if '/foo/' not in name] == []  # a name made up


CHEAP = [
    line for line in LINES if re.match(r'(data|inspect) --config \S*digits.py(?!.*docs/)', line)
]


@pytest.mark.slow
@pytest.mark.parametrize('line', CHEAP)
def test_what_takes_seconds_runs(line, tmp_path, monkeypatch, capsys):
    (tmp_path / 'experiments').symlink_to(ROOT / 'experiments')
    monkeypatch.chdir(tmp_path)
    assert __main__.main(shlex.split(line)) == 0
    out = re.search(r'--out (\S+)', line)
    assert capsys.readouterr().out and (out is None or (tmp_path / out[1]).is_file())


# In an environment of the core alone; what trains or draws for long is only parsed.
FLAGS_IN_CORE = {
    r'train ': ['--help-config'],
    r'launch sky': ['--dry-run'],
    r'(?:attention|benchmark|data|evaluate|rehearse|report|scaling (?:plan|report)) ': ['--help'],
}
NEEDED_EXTRAS = {
    'export': 'export',
    'launch sky': 'gcs',
    'preflight': 'preflight',
    'push': 'hub',
    'sweep create': 'sweep',
    'sweep work': 'sweep',
}
WITHOUT_FILES = ('colorize', 'colors', 'pack', 'robustness', 'sample', 'translate', 'vocab')


def plain_words(line: str) -> list[str]:
    """The words of a command of the README, in a form that takes about a second."""
    words = shlex.split(line.replace('cifar10_isoflop.py', 'cifar10_isoflop.py:smoke'))
    matching = (flags for pattern, flags in FLAGS_IN_CORE.items() if re.match(pattern, line))
    end = words.index('--') if '--' in words else len(words)
    return [*words[:end], *next(matching, []), *words[end:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    'page', [README, pytest.param(COMMAND_PAGE, marks=pytest.mark.long)], ids=['README', 'commands']
)
def test_a_page_is_for_a_plain_install(page, smoke_run, tmp_path):
    lines = [*lines_in(page), 'list experiments', 'list variants', '--completion bash']
    (tmp_path / 'experiments').symlink_to(ROOT / 'experiments')
    for run in ('a', 'b', 'digits', 'flowers'):
        (tmp_path / 'runs' / run).parent.mkdir(exist_ok=True)
        (tmp_path / 'runs' / run).symlink_to(smoke_run)
    for name in ('a.png', 'b.png', 'photo.jpg'):
        Image.new('L', (30, 50)).save(tmp_path / name)
    asked = {
        'blocked': core_alone.extra_modules(),
        'commands': [plain_words(line) for line in lines],
    }
    assert {'optuna', 'gcsfs', 'pytest'} <= set(asked['blocked'])
    done = subprocess.run(
        [sys.executable, core_alone.__file__],
        cwd=tmp_path, env={**os.environ, 'TFDS_DATA_DIR': str(tmp_path), 'PYTHONPATH': str(ROOT)},
        input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for line, (code, out, err) in found.items():
        extras = [extra for start, extra in NEEDED_EXTRAS.items() if line.startswith(start)]
        if extras:
            assert code == 2 and says(err, f"pip install -e '.[{extras[0]}]'"), line
        elif line.startswith(WITHOUT_FILES):
            assert code == 2 and says(err, 'error: ') and 'pip install' not in err, line
        else:
            assert code == 0 and out, (line, err)


def test_the_gallery_shows_what_it_makes():
    page = (ROOT / 'docs' / 'gallery.md').read_text()
    drawn = re.findall(
        r'docs/(\S+\.png)', ' '.join(re.findall(r'```sh\n(.*?)```', page, re.DOTALL))
    )
    shown = re.findall(r'!\[.+\]\((.*)\)', page)
    assert shown == drawn and len(shown) == len(set(shown))
    sizes = [(ROOT / 'docs' / name).stat().st_size for name in (*shown, 'hero.png')]
    assert sum(sizes) < 2_500_000


def test_every_picture_is_shown():
    shown = set()
    for path in DOCUMENTS:
        links = re.findall(r'\]\(([^)#:]+\.png)\)', path.read_text())
        shown |= {(path.parent / link).resolve() for link in links}
    assert set((ROOT / 'docs').rglob('*.png')) <= shown


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: path.name)
def test_pictures_are_described_for_those_who_do_not_see_them(document):
    texts = re.findall(r'!\[(.*?)\]\(', document.read_text(), re.DOTALL)
    assert all(len(text.split()) >= 3 for text in texts), texts


def test_every_command_is_on_their_page():
    assert set(re.findall(r'python -m vit_jax ([a-z]+) ', COMMAND_PAGE)) == set(__main__.commands())


def test_the_readme_is_read_in_five_minutes():
    assert len(README.split()) <= 1200


def test_the_readme_has_the_measured_coverage_of_published_curves():
    held, curves = coverage.MEASURED_REAL['image']
    assert f'{held} of {curves}' in README
    assert f'{held} of {curves}' in (ROOT / 'docs' / 'predictions.md').read_text()


def test_make_knows_how_to_make_what_each_target_needs():
    targets = re.findall(r'^([a-z-]+):.*##', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert 'test' in targets
    done = subprocess.run(['make', '-n', *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_links_exist(document):
    text = document.read_text()
    targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    assert set(re.findall(r'(?:^|`)make ([a-z-]+)', text, re.MULTILINE)) <= targets
    links = re.findall(r'\]\((?!https?:)([^)#]+)\)', text)
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_exit_codes_are_those_of_the_code():
    text = (ROOT / 'docs' / 'training.md').read_text()
    table = dict(re.findall(r'^\| (\d+) \| (.*) \|$', text, re.MULTILINE))
    failed = (processes.EXIT_FAILED, 2, meter.Diverged.exit_code, EXIT_PREEMPTED, EXIT_INTERRUPTED)
    codes = (0, *failed)
    assert set(table) == set(map(str, codes))


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A small stand-in for the released file that the README loads."""
    model = dict(num_classes=1000, **vit.variant('mu/16'))
    images = jax.numpy.zeros((1, 32, 32, 3))
    params = jax.jit(vit.Model(**model).init)(jax.random.key(0), images)['params']
    flat = vision_transformer.write(params, {'name': 'vit', **model})
    files.write_npz(tmp_path / 'ViT-B_16.npz', flat)
    monkeypatch.chdir(tmp_path)


BLOCKS = re.findall(r'```python\n(.*?)```', README + PYTHON_PAGE, re.DOTALL)
TRAINING = [code for code in BLOCKS if 'vit_jax.train(' in code]
TRAINED = [code for code in BLOCKS if 'vit_jax.evaluate(' in code]
CODE = [code for code in BLOCKS if code not in (*TRAINING, *TRAINED)]


@pytest.mark.slow
@pytest.mark.parametrize('code', CODE)
def test_code_of_the_first_pages_runs(code, released):
    names: dict = {}
    local = code.replace('hf://google/vit-base-patch16-224', 'ViT-B_16.npz')
    exec(local.replace("'B/16'", "'mu/16'"), names)
    assert names['model'].num_classes == 1000
    assert 'logits' not in names or names['logits'].shape == (1, 1000)


def test_tab_shows_the_functions_of_the_readme():
    named = set(re.findall(r'vit_jax\.(\w+)\(', README + PYTHON_PAGE))
    assert named <= set(vit_jax.__all__) <= set(dir(vit_jax))
    assert 'importlib' not in dir(vit_jax)


def test_training_in_the_readme_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr('vit_jax.trainer.train.train', lambda config, folder: {'test/accuracy': 1})
    exec(TRAINING[0].replace("'runs/digits'", repr(str(tmp_path))), {})
    assert capsys.readouterr().out == '1\n'


@pytest.mark.slow
def test_what_the_readme_asks_of_a_run_runs(smoke_run, monkeypatch, tmp_path, capsys):
    for name in ('a.png', 'b.png'):
        Image.new('L', (30, 50)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(TRAINED[0].replace("'runs/digits'", repr(str(smoke_run))), {})
    accuracy, *best = capsys.readouterr().out.splitlines()
    assert 0 <= float(accuracy) <= 1
    assert [line.split()[0] for line in best] == ['a.png', 'b.png']


PAGES = sorted((ROOT / 'docs').glob('*.md'))


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.name)
def test_a_page_begins_with_its_contents(page):
    headings = re.findall(r'^## (.*)$', page.read_text(), re.MULTILINE)
    listed = re.findall(r'^- \[(.*)\]\(#(.*)\)$', page.read_text(), re.MULTILINE)
    assert listed == [(heading, anchor(heading)) for heading in headings]


def test_the_index_lists_every_page_once():
    listed = re.findall(r'^- \[.+\]\((\w+\.md)\)$', (ROOT / 'docs' / 'README.md').read_text(), re.M)
    assert sorted(listed) == [page.name for page in PAGES if page.name != 'README.md']
