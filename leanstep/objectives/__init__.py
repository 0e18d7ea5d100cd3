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
from leanstep.objectives.rollout import RolloutCorrection, correct_rollout
from leanstep.objectives.sampling_masks import MaskedLogProbs, MaskPath, linear_masked_logprobs
from leanstep.objectives.teachers import SoftLabels, TeacherHead, TeacherLogProbs, TeacherTopK

__all__ = [
    "PREFERENCES",
    "DistillLoss",
    "Divergence",
    "HardLabels",
    "MaskPath",
    "MaskedLogProbs",
    "PairLosses",
    "PreferenceLoss",
    "PreferenceObjective",
    "RolloutCorrection",
    "SequenceLogProbs",
    "SoftLabels",
    "TeacherHead",
    "TeacherLogProbs",
    "TeacherTopK",
    "correct_rollout",
    "divergence",
    "kto_losses",
    "linear_ahead_cross_entropy",
    "linear_cross_entropy",
    "linear_distill_loss",
    "linear_masked_logprobs",
    "linear_preference_loss",
    "linear_sequence_logprobs",
    "pair_losses",
]
