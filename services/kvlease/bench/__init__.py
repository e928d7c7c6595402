"""Figures, each measured by one command: `kvlease bench NAME`."""
