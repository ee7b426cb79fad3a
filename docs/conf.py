"""Sphinx: `make docs` builds these pages into build/docs, with every warning an error.

No page asks another host for anything: equations are MathML, which browsers typeset themselves, the theme and the
search come with their packages, and pictures are files of this directory (tests/test_docs.py).
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import gtpo_verl

sys.path.insert(0, str(Path(__file__).parent))
from generate import write_pages

project = "gtpo_verl"
author = "gtpo_verl contributors"
version = release = gtpo_verl.__version__
html_title = f"gtpo_verl {release}"
html_show_copyright = False

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_docs.py executes the notebook and compares what is stored in it
html_math_renderer = "mathml"

default_role = "code"  # `names` in docstrings
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
# Types of packages that are documented elsewhere, the end of a range, and our one error, which is printed as a line.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|collections|pathlib|ArrayLike|Path|Callable|Any|UserError|inf)\b.*")
]


def _inline_math(self: Any, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _display_math(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{tex2mathml(_aligned(node.astext()), as_block=True)}</div>\n')
    raise nodes.SkipNode


def _aligned(tex: str) -> str:
    """Several lines of TeX as one aligned block."""
    inside = r"\\" in tex and r"\begin{" not in tex
    return rf"\begin{{aligned}}{tex}\end{{aligned}}" if inside else tex


def _fields_as_list(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings explain arguments and fields one a line, `name: meaning`; here each becomes an item of a list."""
    field = re.compile(r"(\w+(?:, \w+)*): (.*)")
    found: list[str] = []
    for line in re.sub(r"\. (?=[a-z]\w*: )", ".\n", "\n".join(lines)).split("\n"):
        match = field.fullmatch(line)
        if match and not line.startswith(("Source:", "Returns:")):
            if found and found[-1] and not found[-1].startswith(("- ", "  ")):
                found.append("")
            found.append(f"- **{match[1]}**: {match[2]}")
        elif found and found[-1].startswith(("- ", "  ")) and line and not line[0].isupper():
            found.append(f"  {line}")
        else:
            if line and found and found[-1].startswith(("- ", "  ")):
                found.append("")
            found.append(line)
    lines[:] = found


def setup(app: Sphinx) -> None:
    """Register the renderer of equations, and write the pages that come from the code."""
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir)))
    app.connect("autodoc-process-docstring", _fields_as_list)
