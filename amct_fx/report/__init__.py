"""Reports: what became of each layer, and why."""

from amct_fx.report.summary import Summary, SummaryRow, summarize

__all__ = ["Summary", "SummaryRow", "summarize"]
