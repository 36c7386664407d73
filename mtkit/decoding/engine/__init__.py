"""Engines that find translations otherwise than by mtkit's own search in torch."""
