"""Sphinx's configuration. The site is made of ``docs/*.md`` as they are, and its pages fetch nothing from elsewhere."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "Statefleet"
version = release = version_of("statefleet")
html_title = f"Statefleet {version}"
html_theme = "furo"
extensions = ["myst_parser", "docs_site.navigation"]
root_doc = "index"
# Links to headings are the same as on GitHub.
myst_heading_anchors = 4
# Keep quotes and dashes as the text has them.
smartquotes = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
# Summaries are made of pages that are fetched, which browsers refuse where pages are opened as files: see docs_site.navigation.
html_show_search_summary = True
html_copy_source = False
html_show_copyright = False
html_use_index = False
nitpicky = True
