"""Files to deploy a network from: each is written, loaded back, compared with the network and timed."""

from __future__ import annotations

from .export_model import FORMATS, export
from .report import ExportReport

__all__ = ["FORMATS", "ExportReport", "export"]
