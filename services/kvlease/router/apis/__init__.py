"""The APIs that take turns, one module each. Nothing here waits."""
