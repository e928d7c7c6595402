"""The store of engines and lease records: its port, its keys and its implementations."""
