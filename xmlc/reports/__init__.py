"""From a run folder, or a profile of memory, to one HTML page; needs no torch."""

from xmlc.reports.page import check_target, write_report
from xmlc.reports.profile import write_profile

__all__ = ["check_target", "write_profile", "write_report"]
