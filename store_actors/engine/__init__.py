"""Tables of groups and rows in words, with compiled kernels."""

from store_actors.engine.compiled_code import drop_stale

# Before any of them is loaded.
drop_stale(__path__[0])

# Whole, under this package's import lock: Numba's modules import each other in circles, so that threads which each come by a kernel of
# their own first would find them half made. ``numba.types`` is not among those: it puts another module in its own place.
import numba  # noqa: E402
import numba.types  # noqa: E402, F401
