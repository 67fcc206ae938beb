"""The CPU backend: C kernels and the functions that call them."""
