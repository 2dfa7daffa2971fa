"""The report on a run: a table, pictures, a trace and a page. They are made from the files in the
run directory."""

from ptdmpi.report.pictures import centred_means, loss_curve, task_curves, write
from ptdmpi.report.run import RecordedRun, read
from ptdmpi.report.steps import compute_window, planned, shares, timelines
from ptdmpi.report.summary import rows_of, summary, table

__all__ = [
    "RecordedRun",
    "centred_means",
    "compute_window",
    "loss_curve",
    "planned",
    "read",
    "rows_of",
    "shares",
    "summary",
    "table",
    "task_curves",
    "timelines",
    "write",
]
