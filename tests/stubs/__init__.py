"""Stand-ins for the processes around the one under test."""
