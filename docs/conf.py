"""How Sphinx builds this site: `make docs`."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
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

# A reference to something of hydra_ext that is not there is an error. Not looked up: names of other libraries, and
# types of its own that stand in signatures and no caller needs by name.
nitpicky = True
_OWN = (
    r"hydra_ext\.(_C|blocks|activations\.saving|optim\.host_optimizer|optim\.rows|fleet\.devices|data\.report\.TuningReport|runtime|tiled\.devices|profile"
    r"|plan\.\w+\.\w+\.Example|plan\.steps\.timeline\.TreatedStep)\b.*"
)
nitpick_ignore_regex = [(r"py:.*", r"(?!hydra_ext\.).*"), (r"py:.*", _OWN)]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
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
    shown = [nodes.Text(title.strip())] if title else [nodes.literal(path, path)]
    if (ROOT / path).is_dir():
        return shown, []
    # From the folder of the site, as Sphinx counts it; it copies the file beside the pages.
    return [addnodes.download_reference(rawtext, "", *shown, reftarget=f"/../{path}", refdoc="")], []


# Handed out and never made by a caller: their constructors are no interface.
_HANDED_OUT = re.compile(
    r"hydra_ext\.(\w+\.)*(Loaded|Packed|PipelineOutput|Run|Schedule|Simulation|Step\w+|Tiled\w+|\w*Report)"
)


def _signature(app: Sphinx, what: str, name: str, *_: Any) -> tuple[str, None] | None:
    return ("", None) if what == "class" and _HANDED_OUT.fullmatch(name) else None


def setup(app: Sphinx) -> None:
    app.add_role("repo", _repository_file)
    app.connect("autodoc-process-signature", _signature)
