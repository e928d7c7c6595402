"""What an address must look like: gRPC has `host:port`, HTTP a base URL, and one is not the other."""

from urllib.parse import urlsplit


def is_host_port(text: str) -> bool:
    """Whether a text is `host:port`: no URL, and with a port below 65536."""
    host, colon, port = text.rpartition(":")
    return bool(colon) and "/" not in host and port.isascii() and port.isdigit() and int(port) < 65_536


def is_base_url(text: str) -> bool:
    """Whether a text is `http://host:port`, with or without a port and a path, or the same with https."""
    try:
        parts = urlsplit(text)
        bare = not parts.query and not parts.fragment
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and bare
    except ValueError:  # the port is no number, or too large
        return False
