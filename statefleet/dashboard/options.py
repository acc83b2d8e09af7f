"""Where a fleet's dashboard is served, and the token that whoever looks must know."""

from __future__ import annotations

import os
from dataclasses import dataclass

from coordinator.model.errors import InvalidRequestError
from coordinator.model.names import fleet_id_of

__all__ = ["DashboardOptions"]

#: Environment of the head's Ray processes.
_TOKEN = "STATEFLEET_DASHBOARD_TOKEN"
_SHORTEST = 16
#: Ports that are tried first, below those that systems give to connections.
_FIRST_PORT, _PORTS = 20000, 10000
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """Where a dashboard is served.

    Attributes
    ----------
    host
        Address to bind. Other than a loopback's, a token is needed to look.
    port
        By default one that follows from the fleet's URI, so that a page finds it again, or a free one if somebody has that.
    """

    host: str = "127.0.0.1"
    port: int | None = None

    @classmethod
    def of(cls, host: str | None, port: int | None) -> DashboardOptions | None:
        """What somebody asked for; None if they did not.

        Raises
        ------
        InvalidRequestError
            The port is none.
        """
        if host is None and port is None:
            return None
        if port is not None and not 0 <= port < 65536:
            raise InvalidRequestError("a port is a number from 0 to 65535; 0 takes a free one", port=port)
        return cls(host or cls().host, port)

    @staticmethod
    def token() -> str | None:
        """The token in the environment of this process; None without one.

        Raises
        ------
        InvalidRequestError
            It can be guessed.
        """
        given = os.environ.get(_TOKEN) or None
        if given is not None and len(given) < _SHORTEST:
            raise InvalidRequestError(
                f"the token in {_TOKEN} is too short to keep anybody out; the dashboard was not started; take "
                f"{_SHORTEST} characters or more, or none, and one is made",
                characters=len(given),
            )
        return given

    def port_of(self, uri: str) -> int:
        """The port to try first."""
        return _FIRST_PORT + int(fleet_id_of(uri), 16) % _PORTS if self.port is None else self.port

    @staticmethod
    def shown_host(bound: str, node: str) -> str:
        """What people call the host of a bound address.

        Parameters
        ----------
        node
            Address of the Ray node.
        """
        host = node if bound in _EVERYWHERE else bound
        return f"[{host}]" if ":" in host else host
