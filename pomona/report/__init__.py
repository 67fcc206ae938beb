"""The report of runs: one HTML file with interactive charts, and a live page of a run that is still training.

`collection` finds the runs, `run_data` reads one of them, `series` groups them, `charts` and `mask_charts` make figures
of plotly.js, `tables` makes HTML tables, `page` joins them with the assets, and `live` serves the page on localhost.
"""

from .collection import ReportData, collect_runs
from .live import serve
from .page import render_page, write_report
from .run_data import RunData

__all__ = ["ReportData", "RunData", "collect_runs", "render_page", "serve", "write_report"]
