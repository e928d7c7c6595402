"""The log of an HTTP server, in which a peer that does not speak HTTP/1 is one line and no traceback."""

import logging

from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web import RequestPayloadError


class _OneLine(logging.Filter):
    """Says of a request that could not be read who sent it, and what was wrong with it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites such a record, and lets every one pass."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, BadHttpMessage | RequestPayloadError):
            record.__dict__["remote"] = next(iter(record.args or ()), "")
            record.msg, record.args = "a request could not be read: %s", (what_is_wrong(error),)
            record.exc_info = None
            # It is the peer's fault, and none of the process; what aiohttp takes for noise stays at debug.
            record.levelno = min(record.levelno, logging.WARNING)
            record.levelname = logging.getLevelName(record.levelno)
        return True


def what_is_wrong(error: BadHttpMessage | RequestPayloadError) -> str:
    """Why a request could not be read, without anything of what it holds."""
    if isinstance(error, RequestPayloadError):
        return "the body cannot be read as it is encoded"
    if isinstance(error, LineTooLong):
        return "a line of its head is too long"  # aiohttp quotes the line, which may hold a key
    if "PRI" in error.message:
        return (
            "it is HTTP/2, as gRPC clients speak, to an address that serves HTTP/1; gRPC has its own address"
        )
    return error.message.partition("\n")[0].rstrip(": ")


server_logger = logging.getLogger("kvlease.http")
"""Give it to every server of aiohttp."""
server_logger.addFilter(_OneLine())
