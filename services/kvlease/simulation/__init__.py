"""Runs the production code of every part in virtual time over a faulty network, by seed, and checks promises."""
