"""Protocol messages <-> domain objects, and domain errors <-> gRPC status: the only place that knows both."""
