"""Styles of .onnx files for other runtimes: `openvino` for OpenVINO's CPU plugin, `qonnx` for tools of FPGAs."""
