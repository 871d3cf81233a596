"""What training a quantized model needs beyond gradients: constraints, learned rounding, and accuracy repairs."""

from qjax.ops.backward import gradient_key
from qjax.training.a2q import AccumulatorConstraint, accumulator_bound, constrain_accumulators
from qjax.training.adam import optimizer
from qjax.training.adapters import merge_adapters
from qjax.training.adaround import RoundedLayer, Rounding, adaround
from qjax.training.batch_norm import reestimate_batch_norm
from qjax.training.bias_correction import Correction, correct_bias
from qjax.training.brecq import RebuiltBlock, Reconstruction, brecq
from qjax.training.dampening import dampening
from qjax.training.distill import Distillation, Distilled, distill
from qjax.training.frozen import FrozenBase, freeze_base, thaw_base
from qjax.training.gptq import Solution, SolvedLayer, gptq
from qjax.training.learned_bits import BitsParam, LearnedBits
from qjax.training.log import ScalarWriter, TrainingLog
from qjax.training.migration import equalize, smooth
from qjax.training.migration_result import Migration, Moved
from qjax.training.oscillations import Oscillations
from qjax.training.pareto import ParetoFront, Point
from qjax.training.post_training import post_training
from qjax.training.precision import Precision, Wider, widen
from qjax.training.ranges import Ranged, Ranges, output_ranges
from qjax.training.report import PostTrainingReport, Score, StepReport
from qjax.training.resources import ebops
from qjax.training.rotation import Rotated, rotate
from qjax.training.sharding import shardings
from qjax.training.steps import STEPS
from qjax.training.stochastic import stochastic_forward
from qjax.training.tables import row_scales
from qjax.training.weights import Weights, codes_of, set_codes, weights_of

__all__ = [
    "STEPS",
    "AccumulatorConstraint",
    "BitsParam",
    "Correction",
    "Distillation",
    "Distilled",
    "FrozenBase",
    "LearnedBits",
    "Migration",
    "Moved",
    "Oscillations",
    "ParetoFront",
    "Point",
    "PostTrainingReport",
    "Precision",
    "Ranged",
    "Ranges",
    "RebuiltBlock",
    "Reconstruction",
    "Rotated",
    "RoundedLayer",
    "Rounding",
    "ScalarWriter",
    "Score",
    "Solution",
    "SolvedLayer",
    "StepReport",
    "TrainingLog",
    "Weights",
    "Wider",
    "accumulator_bound",
    "adaround",
    "brecq",
    "codes_of",
    "constrain_accumulators",
    "correct_bias",
    "dampening",
    "distill",
    "ebops",
    "equalize",
    "freeze_base",
    "gptq",
    "gradient_key",
    "merge_adapters",
    "optimizer",
    "output_ranges",
    "post_training",
    "reestimate_batch_norm",
    "rotate",
    "row_scales",
    "set_codes",
    "shardings",
    "smooth",
    "stochastic_forward",
    "thaw_base",
    "weights_of",
    "widen",
]
