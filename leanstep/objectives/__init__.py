"""The LM head for every objective: cross-entropy, distillation, preferences, replayed sampling masks."""

from leanstep.objectives.cross_entropy import linear_ahead_cross_entropy, linear_cross_entropy
from leanstep.objectives.distill import DistillLoss, HardLabels, linear_distill_loss
from leanstep.objectives.divergences import Divergence, divergence
from leanstep.objectives.linear_preference import (
    PreferenceLoss,
    SequenceLogProbs,
    linear_preference_loss,
    linear_sequence_logprobs,
)
from leanstep.objectives.pairwise import (
    PREFERENCES,
    PairLosses,
    PreferenceObjective,
    kto_losses,
    pair_losses,
)
from leanstep.objectives.teachers import SoftLabels, TeacherHead, TeacherLogProbs, TeacherTopK

__all__ = [
    "PREFERENCES",
    "DistillLoss",
    "Divergence",
    "HardLabels",
    "PairLosses",
    "PreferenceLoss",
    "PreferenceObjective",
    "SequenceLogProbs",
    "SoftLabels",
    "TeacherHead",
    "TeacherLogProbs",
    "TeacherTopK",
    "divergence",
    "kto_losses",
    "linear_ahead_cross_entropy",
    "linear_cross_entropy",
    "linear_distill_loss",
    "linear_preference_loss",
    "linear_sequence_logprobs",
    "pair_losses",
]
