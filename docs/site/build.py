"""Build the web site from docs/ and the package: `make site`.

The Markdown files stay as GitHub shows them. They are copied to a separate folder, where links
point to the site's pages; the gallery becomes cards, and each module gets a page.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Rooms of the package that other code may import from.
ROOMS = {
    '': 'The package',
    'models': 'Models',
    'tasks': 'Tasks',
    'evaluators': 'Evaluators',
    'data.sources': 'Data: sources',
    'data.transforms': 'Data: transforms',
    'data.plans': 'Data: plans',
    'nn': 'Layers',
    'ops': 'Parameter-free arithmetic',
    'optim': 'Optimizers and schedules',
}
# Public modules of other rooms, and base classes for your own systems.
TOP = (
    'trainer.api',
    'inference.load',
    'inference.embed',
    'inference.predict',
    'viz.base',
    'writers.base',
    'errors',
    'step',
    'gradients',
)
LINK = re.compile(r'(!?\[[^\[\]]*\])\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)')


def pages() -> dict[Path, Path]:
    """The path of each repository file among the site's sources."""
    docs = ROOT / 'docs'
    found = {path: path.relative_to(docs) for path in docs.rglob('*.md')}
    found |= {path: path.relative_to(docs) for path in docs.rglob('*.png')}
    found |= {docs / 'tour.ipynb': Path('tour.ipynb')}
    found[HERE / 'index.md'] = Path('index.md')
    faults = 'tests/faults/README.md'
    for name in ('experiments/README.md', faults, 'CONTRIBUTING.md', 'CHANGELOG.md'):
        found[ROOT / name] = Path(name)
    return found


def stage(folder: Path, *, with_reference: bool = True) -> None:
    """Lay out the site's sources in a new folder; without the reference, building is quick."""
    where = pages()
    for path, place in where.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == '.png':
            shutil.copy(path, target)
            continue
        text = from_readme(path.read_text())
        if path.name == 'gallery.md':
            text = cards(text)
        if place == Path('index.md'):
            text = text.replace('<!-- pages -->', tables_of_contents())
        if place == Path('config.md'):
            text += toctree('', ['config/*'])
        target.write_text(relink(without_contents(text), path, folder, where))
    # The notebook trains from a config, and in this folder.
    shutil.copytree(
        ROOT / 'experiments',
        folder / 'experiments',
        dirs_exist_ok=True,
        ignore=lambda _, names: [n for n in names if n in ('README.md', '__pycache__')],
    )
    reference(folder / 'api', list(ROOMS) if with_reference else [])


def from_readme(text: str) -> str:
    """The text with the README's reasons and tables in their places; links as from docs/site/."""
    readme = (ROOT / 'README.md').read_text()
    parts = {
        'reasons': r'^- \*\*A stopped.*?(?=^##)',
        'tables': r'^## Systems\n.*?(?=^## Pages)',
    }
    for name, pattern in parts.items():
        part = re.search(pattern, readme, re.M | re.S)
        assert part is not None
        text = text.replace(f'<!-- {name} -->', re.sub(r'\]\((?!https?:)', '](../../', part[0]))
    return text


def tables_of_contents() -> str:
    """The pages that docs/README.md lists, below its headings."""
    kinds = re.split(r'^## (.*)$', (ROOT / 'docs' / 'README.md').read_text(), flags=re.M)[1:]
    parts = []
    for kind, listed in zip(kinds[::2], kinds[1::2], strict=True):
        links = re.findall(r'\[(.+)\]\((.+)\.(?:md|ipynb)\)', listed)
        parts.append(toctree(kind, [f'{label} <{page}>' for label, page in links]))
    return '\n'.join(parts)


def toctree(caption: str, entries: list[str]) -> str:
    """A hidden table of contents; entries may be patterns."""
    options = [':hidden:', ':glob:', *([f':caption: {caption}'] if caption else [])]
    return '\n'.join(['', '```{toctree}', *options, '', *entries, '```', ''])


def without_contents(text: str) -> str:
    """A page's text without its table of contents, which the site shows in the margin."""
    return re.sub(r'(?:^- \[.*\]\(#.*\)\n)+\n', '', text, count=1, flags=re.MULTILINE)


def relink(text: str, path: Path, folder: Path, where: dict[Path, Path]) -> str:
    """The text with links to the site's pages; other linked repository files are copied."""

    def link(match: re.Match) -> str:
        label, target, fragment = match[1], match[2], match[3] or ''
        file = (path.parent / target).resolve()
        if file.is_dir() and (file / 'README.md') in where:
            file = file / 'README.md'
        if file == ROOT / 'README.md':
            file, fragment = HERE / 'index.md', ''
        if not file.is_file():
            return match[0]  # Sphinx warns
        place = where.get(file)
        if place is None:
            place = Path('downloads') / file.relative_to(ROOT)
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / place)
        start = folder / where[path].parent
        return f'{label}({os.path.relpath(folder / place, start)}{fragment})'

    return LINK.sub(link, text)


def cards(text: str) -> str:
    """The gallery as cards: pictures with a title, and their commands below."""
    card = re.compile(
        r'((?:(?!#|```|!\[)[^\n]+\n)+)\n```sh\n((?:(?!```).+\n)+)```\n((?:\n!\[.*\]\(.*\)\n)+)'
    )

    def replace(match: re.Match) -> str:
        said, command, picture = (part.strip() for part in match.groups())
        return f':::{{card}}\n{picture}\n\n{said.rstrip(":")}\n\n```sh\n{command}\n```\n:::\n'

    return card.sub(replace, text)


def reference(folder: Path, chosen: list[str]) -> None:
    """Write a page for each public module, and one for each room."""
    folder.mkdir(parents=True)
    for room in chosen:
        names = modules(room)
        for name in names:
            page(folder / f'{name}.rst', name, f'.. automodule:: {name}\n')
        entries = ''.join(f'   {name.rpartition(".")[2]} <{name}>\n' for name in names)
        page(
            folder / f'{room or "package"}.rst',
            ROOMS[room],
            f'.. toctree::\n   :maxdepth: 1\n\n{entries}',
        )
    rooms = ''.join(f'   {room or "package"}\n' for room in chosen)
    page(folder / 'index.rst', 'Reference', f'.. toctree::\n   :maxdepth: 2\n\n{rooms}')


def page(path: Path, title: str, text: str) -> None:
    """Write a page of reStructuredText."""
    path.write_text(f'{title}\n{"=" * len(title)}\n\n{text}')


def modules(room: str) -> list[str]:
    """The names of a room's public modules."""
    package = ROOT / 'vit_jax'
    if not room:
        return ['vit_jax', *(f'vit_jax.{name}' for name in TOP)]
    files = sorted((package / room.replace('.', '/')).glob('[a-z]*.py'))
    return [f'vit_jax.{room}.{path.stem}' for path in files]


def build(source: Path, target: Path, *, builder: str = 'html', execute: bool = True) -> int:
    """Run Sphinx in its own process; every warning is an error."""
    command = [
        sys.executable,
        '-m',
        'sphinx',
        '-b',
        builder,
        '-c',
        str(HERE),
        '-q',
        '-W',
        '--keep-going',
        '-E',
        '-j',
        'auto',
        '-D',
        f'nb_execution_mode={"force" if execute else "off"}',
        '-d',
        str(source.parent / 'doctrees'),
        str(source),
        str(target),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    quiet = {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu', 'PYDEVD_DISABLE_FILE_VALIDATION': '1'}
    return subprocess.run(command, env=os.environ | quiet).returncode


def main() -> int:
    """Build the site in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('output', type=Path, nargs='?', default=ROOT / 'site')
    parser.add_argument(
        '--sources',
        type=Path,
        default=ROOT / '.cache' / 'site',
        help='a folder for what Sphinx reads, which is emptied',
    )
    parser.add_argument('--builder', default='html', help="Sphinx's; dummy only checks")
    parser.add_argument(
        '--no-execute', action='store_true', help='show stored outputs of notebooks'
    )
    parser.add_argument('--no-reference', action='store_true', help='leave the package out')
    args = parser.parse_args()
    shutil.rmtree(args.sources, ignore_errors=True)
    source = args.sources.resolve() / 'source'
    stage(source, with_reference=not args.no_reference)
    # Notebooks are executed in a folder next to Sphinx's output.
    made = source.parent / 'html'
    code = build(source, made, builder=args.builder, execute=not args.no_execute)
    if code == 0:
        shutil.rmtree(args.output, ignore_errors=True)
        shutil.move(made, args.output)
    return code


if __name__ == '__main__':
    raise SystemExit(main())
