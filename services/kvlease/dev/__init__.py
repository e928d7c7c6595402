"""Everything on one machine: the engine environment, the test model, engine processes and the stack."""
