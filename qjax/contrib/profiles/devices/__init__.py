"""The profiles of devices, one file per vendor. Importing a file registers its profiles."""

from qjax.contrib.profiles.devices import apple, arm, espressif, executorch, google, intel, nvidia, qualcomm, st, ti

__all__ = ["apple", "arm", "espressif", "executorch", "google", "intel", "nvidia", "qualcomm", "st", "ti"]
