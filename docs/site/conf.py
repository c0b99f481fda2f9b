"""Sphinx's settings for the web site; docs/site/build.py lays out its sources and calls Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import vit_jax

project = 'vit_jax'
author = 'the authors of vit_jax'
copyright = author
version = release = vit_jax.__version__

extensions = [
    'myst_nb',
    'sphinx_design',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx_copybutton',
    'docstrings',
    'config_keys',
    'wide_tables',
]
exclude_patterns = ['experiments/*/**', 'downloads/**']
suppress_warnings = [
    # Several classes have fields of the same name, which docstrings cannot distinguish.
    'ref.python',
]

# Headings get GitHub's anchors; a link to a missing one is a warning.
myst_heading_anchors = 4
myst_enable_extensions = ['colon_fence']
# Training is cheap enough to execute; nothing is fetched for widgets.
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_output_stderr = 'remove'
# A run's output as text: its HTML has colors only for light pages.
nb_mime_priority_overrides = [('html', 'text/html', None)]
nb_ipywidgets_js = {}

autodoc_typehints = 'signature'
autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True, 'special-members': '__call__'}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = 'hide'

html_theme = 'sphinx_book_theme'
html_title = 'vit_jax'
html_static_path = ['static']
html_css_files = ['site.css']
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    'navbar_persistent': [],  # the search is in the sidebar
    'use_download_button': False,
    'use_fullscreen_button': False,
    'show_toc_level': 2,
    # Each page lists only its own section; all sections on all pages took half of the build.
    'collapse_navbar': True,
    'home_page_in_toc': False,
    'pygments_light_style': 'a11y-light',
    'pygments_dark_style': 'github-dark',
    'footer_content_items': [],
}
