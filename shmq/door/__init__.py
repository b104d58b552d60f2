"""The parts that every server of this package has towards strangers: the brake on guessing, and log
lines that any client can cause."""
