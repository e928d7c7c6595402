"""`kvlease bench routing`: the router's planner beside other ways to route, on simulated engines in virtual time."""
