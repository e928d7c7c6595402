"""Pure protocol logic: no clock, no transport, no randomness, standard library only."""
