"""`qjax report`: writes the page, or says what is wrong with the call."""

import numpy as np


def test_a_model_and_two(qjax, folder):
    assert qjax("report", "dense.qjax").stdout.startswith("report.html: ")
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    np.savez(folder / "data.npz", x)
    qjax("report", "dense.qjax", "--data", "data.npz", "-o", "one.html", "--title", "A <model>")
    assert "<h1>A &lt;model&gt;</h1>" in (folder / "one.html").read_text()
    qjax("report", "dense.qjax", "--targets", "tflite_xnnpack", "--data", "data.npz", "-o", "two.html")
    text = (folder / "two.html").read_text()
    assert "Comparison of tflite_micro and tflite_xnnpack" in text
    assert "7 examples" in text


def test_mistakes(refused):
    assert "only one of them" in refused("report", "dense.qjax", "dense.qjax", "--targets", "tosa,tflite_micro")
    assert "two names with a comma" in refused("report", "dense.qjax", "--targets", "a,b,c")
    assert "no_such" in refused("report", "dense.qjax", "--target", "no_such")
