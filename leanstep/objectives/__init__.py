"""The LM head for every objective: cross-entropy, distillation, preferences, replayed sampling masks."""

from leanstep.objectives.cross_entropy import linear_ahead_cross_entropy, linear_cross_entropy
from leanstep.objectives.distill import DistillLoss, HardLabels, linear_distill_loss
from leanstep.objectives.divergences import Divergence, divergence
from leanstep.objectives.teachers import SoftLabels, TeacherHead, TeacherLogProbs, TeacherTopK

__all__ = [
    "DistillLoss",
    "Divergence",
    "HardLabels",
    "SoftLabels",
    "TeacherHead",
    "TeacherLogProbs",
    "TeacherTopK",
    "divergence",
    "linear_ahead_cross_entropy",
    "linear_cross_entropy",
    "linear_distill_loss",
]
