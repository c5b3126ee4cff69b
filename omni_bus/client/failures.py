"""What goes wrong between a client and a gateway.

::

    ClientError
    ├── ConnectFailed       nobody answers, or the server refuses: nothing was opened
    ├── EventRefused        the server did not do what one event asked for; the connection goes on
    └── ConnectionLost      the connection ended before its time
        └── ResumeFailed    and its session can't be gone on with

What the caller itself got wrong before anything was sent is a `BadInput`, as everywhere.
"""

from __future__ import annotations

ABNORMAL = 1006
"""Of a connection that ended without a close frame (RFC 6455, section 7.1.5)."""

RESUMABLE = (1001, ABNORMAL, 1011, 1012, 1013)
"""Close codes after which the session may live on: the server's, not what the client did."""

FOR_NOW = (408, 429)
"""HTTP statuses below 500 that may pass."""


class ClientError(Exception):
    """Parent of all."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConnectFailed(ClientError):
    """Nothing was opened.

    `status` is HTTP's, where the server answered so; `code` and `param` are those of the error event that came instead
    of a session.
    """

    def __init__(
        self, message: str, *, status: int | None = None, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def may_pass(self) -> bool:
        """Whether the same may be tried again later."""
        return self.code is None and (self.status is None or self.status >= 500 or self.status in FOR_NOW)


class EventRefused(ClientError):
    """The server did not do what an event asked for; `event_id` is that event's, as its ``send`` returned it."""

    def __init__(
        self, message: str, *, code: str | None, param: str | None = None, event_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.event_id = event_id


class ConnectionLost(ClientError):
    """The connection ended before its time, with this WebSocket close code and reason."""

    def __init__(self, message: str, *, close_code: int = ABNORMAL, reason: str = "") -> None:
        super().__init__(message)
        self.close_code = close_code
        self.reason = reason


class ResumeFailed(ConnectionLost):
    """The session can't be gone on with; `code` is the server's, None if no server was reached in time."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
