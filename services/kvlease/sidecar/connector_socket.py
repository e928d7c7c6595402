"""The unix socket at which connectors attach: its place, taken over from the sidecar before and left to the next."""

import os
import secrets
from pathlib import Path

from kvlease.core.errors import InvalidArgument

SOCKET_NAME = "sidecar.sock"
PATH_BYTES_MAX = 100
"""Linux allows 107."""


class ConnectorSocket:
    """A socket that is bound under a name of its own and then takes the place that connectors know.

    A server removes what it bound by its name, whoever is there by then. Nobody else has the first name; from
    the second one this removes its own socket only.

    Attributes:
        path: where connectors attach.
        bound_path: where a server binds.
    """

    def __init__(self, socket_dir: str) -> None:
        directory = Path(socket_dir)
        self.path = directory / SOCKET_NAME
        self.bound_path = directory / f".{secrets.token_hex(4)}"
        self._identity: tuple[int, int] | None = None

    def prepare(self) -> None:
        """Makes the directory, mode 0700.

        Raises:
            InvalidArgument: it cannot be made, or the path is too long for a unix socket.
        """
        directory = self.path.parent
        if len(os.fsencode(self.path)) > PATH_BYTES_MAX:
            raise InvalidArgument(
                f"socket_dir: {self.path} has over {PATH_BYTES_MAX} bytes, too long for a unix socket"
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
        except OSError as error:
            raise InvalidArgument(f"socket_dir: cannot use {directory}: {error}") from error

    def publish(self) -> None:
        """Lets connectors find what was bound, in place of a socket that another sidecar left or still serves.

        Raises:
            InvalidArgument: something else is in its place.
        """
        try:
            self._identity = _identity(self.bound_path)
            self.bound_path.replace(self.path)
        except OSError as error:
            self._identity = None
            raise InvalidArgument(f"socket_dir: cannot use {self.path}: {error}") from error

    def withdraw(self) -> None:
        """Removes the socket, unless another sidecar's is in its place. Idempotent.

        To be called while it is still bound, so that no other file can have its inode.
        """
        identity, self._identity = self._identity, None
        try:
            if identity is not None and _identity(self.path) == identity:
                self.path.unlink()
        except OSError:
            pass  # it is gone already


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
