"""Small fakes for tests of kvlease and of programs that use it."""
