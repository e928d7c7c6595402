"""What every process needs around its domain code: configuration, logs, clock, gRPC plumbing."""
