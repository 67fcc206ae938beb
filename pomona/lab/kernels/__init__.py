"""Kernels that speed up the laboratory, and the benchmark behind `pomona bench`."""
