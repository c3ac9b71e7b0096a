"""How Sphinx builds these pages: ``sphinx-build -W --keep-going docs build/docs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pygments import token
from pygments.lexer import RegexLexer

import amct_fx

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "amct_fx"
author = "the authors of amct_fx"
version = release = amct_fx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["*.py"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"amct_fx {release}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False


class TextProtoLexer(RegexLexer):
    """Colours of protobuf text format; the "protobuf" of Pygments is the schema language."""

    tokens: ClassVar = {
        "root": [
            (r"#.*$", token.Comment.Single),
            (r"\"[^\"]*\"|'[^']*'", token.String),
            (r"[A-Za-z_]\w*(?=\s*[:{])", token.Name.Attribute),
            (r"true|false", token.Keyword.Constant),
            (r"-?\d[\d.e+-]*", token.Number),
            (r"[A-Z]\w*", token.Name.Constant),
            (r"[\s{}\[\]:,;<>]+", token.Text),
        ]
    }


def setup(app: Sphinx) -> None:
    """Let the configurations of the pages be coloured."""
    app.add_lexer("protobuf", TextProtoLexer)
