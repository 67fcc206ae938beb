"""The CUDA backend: CUDA C++ and Triton kernels, and the functions that choose and launch them."""
