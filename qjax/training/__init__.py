"""What training a quantized model needs beyond gradients: constraints, learned rounding, and accuracy repairs.

The steps of post-training, learned bits and bounds of accumulators lie in `qjax.contrib`, which registers their names.
"""

from typing import TYPE_CHECKING, Any

from qjax.ops.backward import gradient_key
from qjax.support import extensions
from qjax.training.adam import optimizer
from qjax.training.adapters import merge_adapters
from qjax.training.batch_norm import reestimate_batch_norm
from qjax.training.distill import Distillation, Distilled, distill
from qjax.training.frozen import FrozenBase, freeze_base, thaw_base
from qjax.training.log import ScalarWriter, TrainingLog
from qjax.training.oscillations import Oscillations, dampening
from qjax.training.sharding import shardings
from qjax.training.stochastic import stochastic_forward
from qjax.training.weights import Weights, codes_of, set_codes, weights_of

if TYPE_CHECKING:
    from qjax.contrib.learned_bits import (
        AccumulatorConstraint,
        BitsParam,
        LearnedBits,
        ParetoFront,
        Point,
        accumulator_bound,
        constrain_accumulators,
        ebops,
    )
    from qjax.contrib.post_training import (
        STEPS,
        Correction,
        Migration,
        Moved,
        PostTrainingReport,
        Precision,
        Ranged,
        Ranges,
        RebuiltBlock,
        Reconstruction,
        Rotated,
        RoundedLayer,
        Rounding,
        Score,
        Solution,
        SolvedLayer,
        StepReport,
        Wider,
        adaround,
        brecq,
        correct_bias,
        equalize,
        gptq,
        output_ranges,
        post_training,
        rotate,
        row_scales,
        smooth,
        widen,
    )

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


def __getattr__(name: str) -> Any:
    value = extensions.find_name(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
