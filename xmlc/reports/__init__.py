"""From a run folder to one HTML page; reads files only, and needs no torch."""

from xmlc.reports.page import write_report

__all__ = ["write_report"]
