"""The sidecar: registers the engines beside it, asks their holders, records their leases."""
