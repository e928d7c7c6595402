"""Benchmarks; each figure has one command, and is a ratio against a peer in the same run."""
