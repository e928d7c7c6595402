"""`kvlease bench multiturn`: what turn two of a conversation costs on real engines, by path and beside stock vLLM."""
