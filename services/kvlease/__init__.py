"""kvlease: lets a prefill/decode-disaggregated vLLM fleet reuse the KV cache its decode nodes hold."""

__version__ = "0.1.0"
