"""Pure decisions: a snapshot goes in, a plan comes out. No I/O, no clock, no randomness."""
