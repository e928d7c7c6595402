"""Commands for those who run a fleet: each asks the processes over their own APIs, and says what it found."""
