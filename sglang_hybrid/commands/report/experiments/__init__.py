"""Experiments of a report, one file each. ``EXPERIMENTS`` lists them in the order of the page."""

from sglang_hybrid.commands.report.experiments.base import Experiment
from sglang_hybrid.commands.report.experiments.hc_codebook import HcCodebook
from sglang_hybrid.commands.report.experiments.hc_memory import HcMemory
from sglang_hybrid.commands.report.experiments.hc_needle import HcNeedle
from sglang_hybrid.commands.report.experiments.hc_tau import HcTau
from sglang_hybrid.commands.report.experiments.hgca_perplexity import HgcaPerplexity
from sglang_hybrid.commands.report.experiments.hgca_rate import HgcaRate
from sglang_hybrid.commands.report.experiments.policies import Policies
from sglang_hybrid.commands.report.experiments.scout_ablation import ScoutAblation
from sglang_hybrid.commands.report.experiments.scout_accuracy import ScoutAccuracy
from sglang_hybrid.commands.report.experiments.scout_batch import ScoutBatch
from sglang_hybrid.commands.report.experiments.scout_block_size import ScoutBlockSize
from sglang_hybrid.commands.report.experiments.scout_breakdown import ScoutBreakdown
from sglang_hybrid.commands.report.experiments.scout_cosines import ScoutCosines
from sglang_hybrid.commands.report.experiments.scout_length import ScoutLength
from sglang_hybrid.commands.report.experiments.scout_ratio import ScoutRatio

EXPERIMENTS: tuple[Experiment, ...] = (
    Policies(),
    ScoutRatio(), ScoutAccuracy(), ScoutLength(), ScoutBatch(), ScoutBlockSize(), ScoutBreakdown(), ScoutAblation(),
    ScoutCosines(),
    HgcaPerplexity(), HgcaRate(),
    HcTau(), HcCodebook(), HcNeedle(), HcMemory(),
)  # fmt: skip
