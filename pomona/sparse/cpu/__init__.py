"""The CPU backend: C kernels, the toolchain that compiles them, and the functions that call them."""
