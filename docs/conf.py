"""Configuration of Sphinx."""

project = "panelflow"
author = "The panelflow developers"
copyright = "the panelflow developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_title = "panelflow"
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
suppress_warnings = ["misc.highlighting_failure"]
