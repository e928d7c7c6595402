"""Tests on real vLLM engines with real NIXL; one pair at a time."""
