"""Tables of groups and rows in words, with compiled kernels."""

from store_actors.compiled_code import drop_stale

# Before any of them is loaded.
drop_stale(__path__[0])
