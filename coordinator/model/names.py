"""Names: of states and an operator's stores, which become folders of the object store; a fleet's short id; the project's packages."""

from __future__ import annotations

import hashlib
import re

from coordinator.model.errors import InvalidRequestError

#: The project's packages.
PACKAGES = ("coordinator", "spark_jobs", "statefleet", "store_actors")
#: No '/', nothing that a path gives a meaning (``.``, ``..``), and no leading '_' or '.', which folders of the fleet's own have. 128
#: characters leave room in the 255 of a file system.
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

#: The begin of a store actor's name, before the id of its fleet.
_STORE = "statefleet-store-"
#: The same, and the id of the fleet.
_OF_FLEET = re.compile(rf"^{_STORE}[0-9a-f]+-")
#: The end of a store actor's name, if it is not the first of its node.
_NUMBER = re.compile(r"-[0-9a-f]{12}-(\d+)$")


def fleet_id_of(uri: str) -> str:
    """Return the short id of the fleet of a normalised URI: part of its actors' names."""
    return hashlib.blake2b(uri.encode(), digest_size=4).hexdigest()


def store_actors_prefix(uri: str) -> str:
    """Return the prefix of the names of the store actors of a normalised URI."""
    return f"{_STORE}{fleet_id_of(uri)}-"


def store_actor_name(uri: str, node_id: str, number: int = 0) -> str:
    """Return the name of a fleet's store actor on a node: the first one, or the one of a number."""
    name = f"{store_actors_prefix(uri)}{node_id[:12]}"
    return name if number == 0 else f"{name}-{number}"


def store_actor_number(name: str) -> int:
    """Return the number that a store actor has on its node, from its name."""
    number = _NUMBER.search(name)
    return 0 if number is None else int(number[1])


def store_actor_id(name: str) -> str:
    """Return a store actor's name without the prefix of its fleet: the beginning of its Ray node's id, and its number."""
    return _OF_FLEET.sub("", name)


def store_actor_text(name: str, host: str | None) -> str:
    """Return a store actor as users see it: the address of its node and its number there, or its id if the address is not known."""
    return store_actor_id(name) if host is None else f"{host}#{store_actor_number(name)}"


def dashboard_name(uri: str) -> str:
    """Return the name of the dashboard's actor of a normalised URI."""
    return f"statefleet-dashboard-{fleet_id_of(uri)}"


def is_state_name(name: object) -> bool:
    """Return whether a state can have this name."""
    return isinstance(name, str) and _FOLDER.fullmatch(name) is not None


def check_state_name(name: str) -> None:
    """Refuse a state's name that is not a folder's.

    Raises
    ------
    InvalidRequestError
        It is empty or too long, or has other characters.
    """
    if not is_state_name(name):
        raise InvalidRequestError(
            "a state's name is a folder: letters, digits, '_', '.', '-', starting with a letter or digit, 128 characters at most; "
            "nothing was changed; choose another name",
            name=name,
        )


def check_store_name(name: str) -> None:
    """Refuse a store's name that is not a folder's beside the files of a partition.

    Raises
    ------
    InvalidRequestError
        It is empty or too long, has other characters, or is kept for the fleet: digits alone are partitions, and ``.delta`` and
        ``.snapshot`` end the names of files.
    """
    if _FOLDER.fullmatch(name) is None or name.isdigit() or name.endswith((".delta", ".snapshot")):
        raise InvalidRequestError(
            "a store's name is a folder: letters, digits, '_', '.', '-', starting with a letter or digit, 128 characters at most, not "
            "digits alone, not ending in '.delta' or '.snapshot'; nothing was changed; choose another name",
            name=name,
        )
