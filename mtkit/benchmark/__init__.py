"""Measures what this machine does with mtkit's own code paths: the functions that the commands call, not copies of them."""
