"""Host, port and token of a fleet's dashboard."""

from __future__ import annotations

import os
from dataclasses import dataclass

from coordinator.model.errors import InvalidRequestError
from coordinator.model.names import fleet_id_of

#: Variable in the environment of the head's Ray processes.
_TOKEN = "STATEFLEET_DASHBOARD_TOKEN"
_SHORTEST = 16
#: Default ports, below those that systems use for outgoing connections.
_FIRST_PORT, _PORTS = 20000, 10000
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """Host and port of a dashboard."""

    #: Address to bind. If it is not a loopback address, requests need a token.
    host: str = "127.0.0.1"
    #: Port; by default it is derived from the fleet's URI, so that a page finds it again, or a free one if that is taken.
    port: int | None = None

    @classmethod
    def of(cls, host: str | None, port: int | None) -> DashboardOptions | None:
        """Return the options of a host and a port; None if neither is given.

        Raises
        ------
        InvalidRequestError
            The port is not valid.
        """
        if host is None and port is None:
            return None
        if port is not None and not 0 <= port < 65536:
            raise InvalidRequestError("a port is a number from 0 to 65535; 0 takes a free one", port=port)
        return cls(host or cls().host, port)

    @staticmethod
    def token() -> str | None:
        """Return the token in the environment of this process; None if there is none.

        Raises
        ------
        InvalidRequestError
            The token is too short.
        """
        token = os.environ.get(_TOKEN) or None
        if token is not None and len(token) < _SHORTEST:
            raise InvalidRequestError(
                f"the token in {_TOKEN} is too short to keep anybody out; the dashboard was not started; take "
                f"{_SHORTEST} characters or more, or none, and one is made",
                characters=len(token),
            )
        return token

    def port_of(self, uri: str) -> int:
        """Return the port to try first."""
        return _FIRST_PORT + int(fleet_id_of(uri), 16) % _PORTS if self.port is None else self.port

    @staticmethod
    def shown_host(bound: str, node: str) -> str:
        """Return the host of a bound address, as users address it; `node` is the address of the Ray node."""
        host = node if bound in _EVERYWHERE else bound
        return f"[{host}]" if ":" in host else host
