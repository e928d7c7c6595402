"""The router: an OpenAI-compatible front that plans each turn and renews the leases of live conversations."""
