"""The counter of batches; see `qjax.progress`."""

from qjax.progress import track as track
