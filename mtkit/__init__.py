"""mtkit: a command-line toolkit that trains Transformers for machine translation and puts them to work."""

__version__ = "0.1.0"
