"""Networks as firmware for Cortex-M under QEMU: `python -m experiments.firmware`."""
