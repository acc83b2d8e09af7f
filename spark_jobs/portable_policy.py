"""A user's placement policy on its way to the coordinator."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType

from ray import cloudpickle

from coordinator.model.errors import InvalidRequestError
from coordinator.model.names import PACKAGES
from coordinator.placement.policies import POLICIES
from coordinator.placement.policy import PlacementPolicy

__all__ = ["portable_policy"]


def portable_policy(policy: str | PlacementPolicy) -> str | bytes:
    """Return the name of a policy that comes with Statefleet, or the pickle of a user's.

    The class of a user's policy travels with it, so that the coordinator need not be able to import its module.

    Raises
    ------
    InvalidRequestError
        There is no policy of that name, it is no policy, or it cannot be pickled.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidRequestError(
                f"a placement is {' or '.join(map(repr, POLICIES))}, or a policy of your own with a method assign()",
                placement=policy,
            )
        return policy
    if isinstance(policy, type) or not callable(getattr(policy, "assign", None)):
        raise InvalidRequestError(
            "a placement policy is an object with a method assign(request); see docs/architecture.md",
            placement=repr(policy),
        )
    with ExitStack() as stack:
        module = sys.modules.get(type(policy).__module__)
        if module is not None and not _is_ours(module):
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            pickled: bytes = cloudpickle.dumps(policy)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise InvalidRequestError(
                "the placement policy cannot be pickled, so it cannot be sent to the coordinator; keep connections, locks and the like "
                "out of it",
                placement=type(policy).__name__,
                cause=f"{type(error).__name__}: {error}",
            ) from error
    return pickled


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in PACKAGES
