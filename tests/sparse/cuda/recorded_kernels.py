"""Kernels that the backend asked for, to be compiled for a GPU that this machine does not have."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pomona.sparse.cuda.launcher import REQUIRED_ARCHITECTURES, kernel_source

# The multiprocessors of a GPU of each compute capability, and the KiB of shared memory of a thread block.
GPUS = {
    (8, 0): (108, 163),
    (8, 6): (82, 99),
    (8, 9): (128, 99),
    (9, 0): (132, 227),
    (10, 0): (148, 227),
    (12, 0): (170, 99),
}
MULTIPROCESSOR_REGISTERS = 1 << 16


def properties_of(capability: tuple[int, int]) -> SimpleNamespace:
    """Return what torch reports of a GPU of this compute capability."""
    processors, shared_kib = GPUS[capability]
    major, minor = capability
    return SimpleNamespace(
        major=major, minor=minor, multi_processor_count=processors, shared_memory_per_block_optin=shared_kib << 10
    )


@dataclass
class RecordedKernel:
    """A substitute for `CompiledKernel` that runs nothing."""

    name: str
    threads: int
    shared_bytes: int
    macros: dict[str, int | str]

    def __call__(self, *arguments: Any) -> None:
        """Leave the output as it is."""

    def launch(self, *arguments: Any) -> None:
        """Leave the output as it is."""

    @property
    def source(self) -> str:
        """The source, as torch compiles it."""
        return kernel_source(self.name, **self.macros)

    def architecture(self, capability: tuple[int, int]) -> str:
        """Return the architecture that torch compiles the source for on a GPU of this capability."""
        return REQUIRED_ARCHITECTURES.get(self.name, "{}{}".format(*capability))
