"""Connectors with one fault each, by which the checks prove that they can fail."""
