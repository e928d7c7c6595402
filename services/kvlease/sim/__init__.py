"""The simulated engine: an OpenAI API over KV that is data, with the same leases as the real connector.

What a block holds is a digest over all that its KV depends on, and what an engine says is a digest of the blocks that
it really used: wrong reuse shows as another answer.
"""
