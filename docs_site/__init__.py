"""The documentation site: how ``docs/*.md`` become pages, and the page that is made of the code."""
