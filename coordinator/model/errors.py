"""The errors of Statefleet, grouped by what the caller does next.

::

    StateStoreError
    ├── InvalidRequestError      fix the call (also a ValueError)
    │   ├── OperationOutOfOrderError   the handle is committed, aborted or released: open a new one
    │   └── VersionNotFoundError       no such version, or memory no longer holds it: load it
    │       └── VersionReplacedError   the version that was read is another one now: read again from the start
    ├── SumOverflowError         a sum left its type: change data or query (also an ArithmeticError)
    ├── WriterBusyError          another handle is changing the shard: end it first
    ├── StateMismatchError       the query and the state do not belong together
    ├── FencedError              a newer owner has the shard: stop, write nothing
    ├── StorageUnavailableError  the object store failed: nothing was lost, retry later
    │   └── CredentialsNeededError     no process has its credentials any more: connect with them again
    ├── CommitUnknownError       a commit may or may not have landed: ask, delete nothing
    ├── LogConflictError         another coordinator appended first: read the log, decide again
    ├── CorruptStateError        a file is damaged or missing, or another one than it should be: an operator has to look
    ├── StateReplacedError       the state's folder was put back or deleted meanwhile: look at what is there now
    ├── NewerFormatError         a later release wrote the state: use that one
    ├── StoreUnavailableError    no store actor or coordinator answered in time
    ├── MemoryLimitError         something does not fit a store actor's memory or spill folder: give it more, or use more shards
    and nodes └── SetupError               Ray, Java or the fleet is not there

Messages say what happened, what is safe and what to do next, and end with the variables as ``key=`value```.
"""

from __future__ import annotations

from functools import partial


class StateStoreError(Exception):
    """Root of every error that Statefleet raises on purpose.

    Parameters
    ----------
    message
        What happened, what is safe, what to do next.
    **context
        Variables of the failure (state, shard, version, file, ...), printed after the message.
    """

    def __init__(self, message: str, **context: object) -> None:
        self.message = message
        self.context = context
        super().__init__(message)

    def __str__(self) -> str:
        facts = " ".join(f"{key}=`{value}`" for key, value in self.context.items())
        return f"{self.message} [{facts}]" if facts else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Ray, Spark): keyword context needs its own way through pickle.
        return partial(type(self), self.message, **self.context), ()


class InvalidRequestError(StateStoreError, ValueError):
    """The call itself is wrong: an unknown column, an unsupported type or function, a bad URI."""


class OperationOutOfOrderError(InvalidRequestError):
    """A handle was used after its commit, abort or release, or committed twice. Nothing was changed."""


class VersionNotFoundError(InvalidRequestError):
    """A version is negative, does not exist, or is no longer in memory. What is stored is untouched."""


class VersionReplacedError(VersionNotFoundError):
    """A repeated batch made a version again since it was read, perhaps with other rows. Rows that were read of it are not valid."""


class SumOverflowError(StateStoreError, ArithmeticError):
    """A sum that must not wrap left its type (ANSI mode, intervals). The batch was not committed."""


class WriterBusyError(StateStoreError):
    """A shard has one writer at a time, and another handle is the writer. Commit or abort that one first."""


class StateMismatchError(StateStoreError):
    """The query and the existing state do not fit: schema, shard count or query identity differ."""


class FencedError(StateStoreError):
    """A newer owner holds the shard, or a newer run holds the state. Nothing was written."""


class StorageUnavailableError(StateStoreError):
    """The object store refused or failed. Committed versions are safe; retry when it is back."""


class CredentialsNeededError(StorageUnavailableError):
    """No process of the fleet has the object store's credentials any more. Connect with them again; nothing was lost."""


class CommitUnknownError(StateStoreError):
    """A conditional write, or a commit, may have landed or not. Read back before anything else, and delete nothing."""


class LogConflictError(StateStoreError):
    """The log has another coordinator's record where the next one belongs. The coordinator resolves it by reading the log."""


class CorruptStateError(StateStoreError):
    """A file named by a manifest is missing or damaged. The message names it."""


class StateReplacedError(StateStoreError):
    """The files of a state were put back, replaced or deleted while the fleet worked with them. Nothing was committed."""


class NewerFormatError(StateStoreError):
    """A file of a state is in a format of a later release. Nothing was read of it, and nothing was changed."""


class StoreUnavailableError(StateStoreError):
    """A store actor or the coordinator did not answer before the deadline."""


class MemoryLimitError(StateStoreError):
    """A request does not fit a store actor's memory limit or its spill folder. Nothing of it was committed, nothing was lost."""


class SetupError(StateStoreError):
    """The environment lacks something: a Ray cluster, Java 17, RayDP."""


__all__ = sorted(
    name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, StateStoreError)
)
