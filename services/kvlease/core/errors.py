"""Violations of the protocol. A lease that is gone is no error: see `MissReason`.

KvleaseError
├── InvalidArgument      the call makes no sense as it stands
├── UnknownEngine        no such engine is registered
├── EngineIdReused       an engine id came back under another boot id
├── NotOwner             the caller does not own what it names
├── NotAllowed           the caller's identity may not make this call
├── StoreUnavailable     the store does not answer; try again
├── HolderUnreachable    the engine's sidecar does not answer; try again
├── QuotaExceeded        a cap of the tenant is reached
└── VersionMismatch      the two sides speak different versions
"""


class KvleaseError(Exception):
    """Base of every violation. Messages never contain prompt text or keys."""


class InvalidArgument(KvleaseError):
    """The call makes no sense as it stands."""


class UnknownEngine(KvleaseError):
    """No such engine is registered."""


class EngineIdReused(KvleaseError):
    """An engine id came back under another boot id: it must not be configured."""


class NotOwner(KvleaseError):
    """The caller does not own what it names."""


class NotAllowed(KvleaseError):
    """The caller's identity may not make this call."""


class StoreUnavailable(KvleaseError):
    """The store does not answer; the call may be repeated."""


class HolderUnreachable(KvleaseError):
    """The engine's sidecar does not answer; the call may be repeated."""


class QuotaExceeded(KvleaseError):
    """A cap of the tenant is reached."""


class VersionMismatch(KvleaseError):
    """The two sides speak different protocol versions."""
