"""One self-contained page that compares runs, built from their folders alone."""

from shortlist.report.page import write_report

__all__ = ["write_report"]
