"""The LM head for every objective: cross-entropy, distillation, preferences, replayed sampling masks.

Also pair and ranking losses of scores inside ragged groups (`ragged`).
"""

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
from leanstep.objectives.ragged import (
    Groups,
    SampledPairs,
    bradley_terry,
    draw_pairs,
    hinge,
    make_groups,
    plackett_luce,
    top_pairs,
)
from leanstep.objectives.rollout import RolloutCorrection, correct_rollout
from leanstep.objectives.sampling_masks import MaskedLogProbs, MaskPath, linear_masked_logprobs
from leanstep.objectives.teachers import SoftLabels, TeacherHead, TeacherLogProbs, TeacherTopK

__all__ = [
    "PREFERENCES",
    "DistillLoss",
    "Divergence",
    "Groups",
    "HardLabels",
    "MaskPath",
    "MaskedLogProbs",
    "PairLosses",
    "PreferenceLoss",
    "PreferenceObjective",
    "RolloutCorrection",
    "SampledPairs",
    "SequenceLogProbs",
    "SoftLabels",
    "TeacherHead",
    "TeacherLogProbs",
    "TeacherTopK",
    "bradley_terry",
    "correct_rollout",
    "divergence",
    "draw_pairs",
    "hinge",
    "kto_losses",
    "linear_ahead_cross_entropy",
    "linear_cross_entropy",
    "linear_distill_loss",
    "linear_masked_logprobs",
    "linear_preference_loss",
    "linear_sequence_logprobs",
    "make_groups",
    "pair_losses",
    "plackett_luce",
    "top_pairs",
]
