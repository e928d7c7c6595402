"""Runs in an environment of its own, with stock etcd3: prints what it reads below a prefix, then what it watches.

Not a test: `test_etcd3_interop.py` runs it as `python stock_etcd3.py HOST PORT PREFIX EVENTS`.
"""

import json
import queue
import sys
from typing import Any

import etcd3  # type: ignore[import-not-found]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(host: str, port: str, prefix: str, events: str) -> None:
    client = etcd3.client(host=host, port=int(port), timeout=30)
    seen: queue.Queue[Any] = queue.Queue()
    client.add_watch_prefix_callback(prefix, seen.put)
    pairs = [(about.key.decode(), value.hex()) for value, about in client.get_prefix(prefix)]
    say(read=pairs)
    while int(events):
        for event in seen.get(timeout=60).events:
            say(kind=type(event).__name__, key=event.key.decode(), value=event.value.hex())
            events = str(int(events) - 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
