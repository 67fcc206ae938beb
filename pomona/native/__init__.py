"""C code: the toolchain that compiles it, the libraries it becomes, and the kernels of the engine's step."""
