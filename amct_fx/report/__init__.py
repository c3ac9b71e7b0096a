"""Reports: what became of each layer, which layers lose accuracy, and pages to look at."""

from amct_fx.report.analysis import Analysis, LayerAnalysis, Sensitivity, Suggestion
from amct_fx.report.analyze import analyze
from amct_fx.report.html import save_html
from amct_fx.report.plots import save_png
from amct_fx.report.recorder import History, TrainingRecorder
from amct_fx.report.summary import Summary, SummaryRow, summarize

__all__ = [
    "Analysis",
    "History",
    "LayerAnalysis",
    "Sensitivity",
    "Suggestion",
    "Summary",
    "SummaryRow",
    "TrainingRecorder",
    "analyze",
    "save_html",
    "save_png",
    "summarize",
]
