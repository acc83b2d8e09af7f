"""The documentation site: pages of ``docs/*.md``, and the page that is made of the code."""
