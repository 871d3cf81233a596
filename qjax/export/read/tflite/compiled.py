"""Custom operators that hold a program for one device in place of a model."""

COMPILED = {
    "CUSTOM 'ethos-u'": (
        "it is a program for Arm's Ethos-U, which Vela compiled from the model",
        "Read the .tflite file that Vela was given",
    ),
    "CUSTOM 'edgetpu-custom-op'": (
        "it is a program for Google's Edge TPU, which edgetpu_compiler compiled from the model",
        "Read the .tflite file that the compiler was given",
    ),
}
"""name -> what it is, and the cure."""
