"""Post-training: steps that repair the accuracy of a quantized model without a loss to train on.

`qjax.post_training` tries them one after the other and keeps those that help; each also is a function of
`qjax.training`. In reading order:

- `post_training`, `steps`, `scoring`, `report`: the search, its steps, how each is judged, and what is printed.
- `layerwise_runner`, `unrolled`: run the model layer by layer, in floats and in codes, also the layers within a scan.
- `migration`, `pairs`, `rotation`, `residual_streams`: scales and rotations that move range between tensors.
- `ranges`, `precision`, `widths`, `sums`, `tables`: ranges, bits and scales of quantizers.
- `bias_correction`, `adaround`, `brecq`, `gptq`, `gptq_layer`, `as_matmul`: biases and learned rounding.
- `caches`, `symmetries`, `relations`, `labels`: parts of a state that a function of the model leaves interchangeable.
"""

from qjax.contrib.post_training.adaround import RoundedLayer, Rounding, adaround
from qjax.contrib.post_training.bias_correction import Correction, correct_bias
from qjax.contrib.post_training.brecq import RebuiltBlock, Reconstruction, brecq
from qjax.contrib.post_training.gptq import Solution, SolvedLayer, gptq
from qjax.contrib.post_training.migration import equalize, smooth
from qjax.contrib.post_training.migration_result import Migration, Moved
from qjax.contrib.post_training.post_training import post_training
from qjax.contrib.post_training.precision import Precision, Wider, widen
from qjax.contrib.post_training.ranges import Ranged, Ranges, output_ranges
from qjax.contrib.post_training.report import PostTrainingReport, Score, StepReport
from qjax.contrib.post_training.rotation import Rotated, rotate
from qjax.contrib.post_training.steps import STEPS
from qjax.contrib.post_training.tables import row_scales

__all__ = [
    "STEPS",
    "Correction",
    "Migration",
    "Moved",
    "PostTrainingReport",
    "Precision",
    "Ranged",
    "Ranges",
    "RebuiltBlock",
    "Reconstruction",
    "Rotated",
    "RoundedLayer",
    "Rounding",
    "Score",
    "Solution",
    "SolvedLayer",
    "StepReport",
    "Wider",
    "adaround",
    "brecq",
    "correct_bias",
    "equalize",
    "gptq",
    "output_ranges",
    "post_training",
    "rotate",
    "row_scales",
    "smooth",
    "widen",
]
