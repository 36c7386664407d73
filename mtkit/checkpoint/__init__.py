"""Models and training states on disk: their format, which of them to keep, and their average."""
