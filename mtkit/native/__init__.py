"""Kernels in C for what torch is slow at on a CPU."""
