"""How Sphinx builds this site: `make docs`."""

from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx.application import Sphinx

import hydra_ext

ROOT = Path(__file__).resolve().parents[1]

project = "hydra_ext"
author = "the authors of hydra_ext"
version = release = hydra_ext.__version__
html_title = f"hydra_ext {version}"
html_theme = "furo"
html_show_copyright = False
exclude_patterns = ["_build"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A reference to something of hydra_ext that is not there is an error; names of other libraries are not looked up.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!hydra_ext\.).*"), (r"py:.*", r"hydra_ext\._C\..*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True


def _repository_file(
    name: str, rawtext: str, text: str, lineno: int, inliner: Inliner, options: Any = None, content: Any = None
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """{repo}`csrc/paging/pager.h`, or {repo}`the pager <csrc/paging/pager.h>`: a file of the repository."""
    title, _, path = text.rpartition("<")
    path = path.removesuffix(">") if title else text
    if not (ROOT / path).exists():
        message = inliner.reporter.warning(f"the repository has no {path}", line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    shown: list[nodes.Node] = [nodes.literal(path, path)]
    if title:
        shown = [nodes.Text(f"{title.strip()} ("), *shown, nodes.Text(")")]
    return shown, []


def setup(app: Sphinx) -> None:
    app.add_role("repo", _repository_file)
