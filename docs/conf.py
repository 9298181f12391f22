"""The site: `make docs` builds it from these pages, the docstrings and the examples, without a network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]  # also where the package is not installed

import conftest  # noqa: E402, F401  (makes torchvision importable beside a CPU build of torch)

from acclimate import __version__  # noqa: E402

project = "acclimate"
author = "the authors of acclimate"
copyright = "the authors of acclimate, MIT licence"  # noqa: A001
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/**/*.ipynb", "gallery/**/*.py"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4

highlight_language = "none"  # of blocks that name none: commands and drawings
nitpicky = True
default_role = "code"  # docstrings and pages share the Markdown of backticks
autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # they are long, and the text says what is expected
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "forward, adapt, extra_repr"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpick_ignore_regex = [("py:.*", r"(?!acclimate\.).*"), ("py:.*", r"acclimate\.(core|parts|engine|data|bench)\..*")]

html_theme = "pydata_sphinx_theme"
html_title = "acclimate"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "show_toc_level": 2,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {"index": [], "start": []}

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r".*\.py",
    "backreferences_dir": "gallery/backreferences",
    "doc_module": ("acclimate",),
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_srcset": [],
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "remove_config_comments": True,
    "min_reported_time": 60,
    "matplotlib_animations": False,
    "reset_modules": ("matplotlib",),
    "capture_repr": (),
}
os.environ.setdefault("MPLBACKEND", "agg")

SECTIONS = {
    "index": ["start", "using", "measuring", "Examples <gallery/index>", "Reference <api/README>", "extending"],
    "using": [
        *("choosing", "methods/README", "calibration", "online", "online-measurements", "service"),
        *("scale", "parallel", "shared-learning", "engine", "robustness", "segmentation"),
    ],
    "methods/README": [
        *("source", "bn-adapt", "tent", "memo", "cotta", "sar", "roid", "rdumb", "tea", "dat"),
        *("eata", "eata-c"),
    ],
    "measuring": ["demo", "benchmark", "results", "results-tables", "paper", "faithful", "corruptions"],
    "extending": ["own-method", "architecture", "contributing", "compatibility", "changes"],
}
"""The order of the site. A page that is not named here comes last in its folder's section."""
_CODE = re.compile(r"(`+.+?`+)")
_FOLDER = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
_OUTSIDE = {"../CONTRIBUTING.md": "contributing.md", "../README.md": "index.md", "../CHANGELOG.md": "changes.md"}


def _escaped(line: str) -> str:
    """Return a docstring's line in which stars and bars outside code are letters."""
    if line.lstrip().startswith((">>>", "...", "- ")):
        return line
    return "".join(part if part.startswith("`") else re.sub(r"([*|])", r"\\\1", part) for part in _CODE.split(line))


def _process_docstring(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = [_escaped(line).replace("Eq. ", "Eq.\u2060\u00a0") for line in lines]  # no end of a sentence
    if what in ("attribute", "property", "data"):
        lines.insert(0, "")  # else napoleon takes what is before a colon for a type


def _process_source(_app: Any, page: str, source: list[str]) -> None:
    """Lead links out of docs/ to pages of the site, make those to folders plain text, and add the section's pages."""
    for outside, inside in _OUTSIDE.items():
        source[0] = source[0].replace(f"]({outside}", f"]({inside}")
    source[0] = source[0].replace("](../examples)", "](gallery/index.rst)")
    folder = (DOCS / page).parent
    source[0] = _FOLDER.sub(lambda link: link[1] if (folder / link[2]).is_dir() else link[0], source[0])
    if page in SECTIONS:
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *_pages(page), "```\n"])


def _pages(section: str) -> list[str]:
    """Return the pages of a section: the named ones that exist, and others of its folder that no section names."""
    folder = (DOCS / section).parent
    named = [name for name in SECTIONS[section] if "<" in name or (folder / f"{name}.md").exists()]
    if section not in ("using", "methods/README"):
        return named
    known = {section.rpartition("/")[2], "index", *(name for names in SECTIONS.values() for name in names)}
    return named + sorted({page.stem for page in folder.glob("*.md")} - known)


def setup(app: Any) -> None:
    """Connect the two changes of text."""
    app.connect("autodoc-process-docstring", _process_docstring, priority=100)
    app.connect("source-read", _process_source)
