"""How good a translation is: corpus metrics with intervals, checks for texts that cannot be scored as they are, and public test sets."""
