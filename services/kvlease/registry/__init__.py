"""The registry: which engines and leases there are, and the way to their holders. Replicas keep no state."""
