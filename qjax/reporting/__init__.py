"""The report: one HTML file that shows what quantization did to a model.

`report` (`qjax.report`) takes a quantized model, a graph, or two graphs. `of_model`, `of_graph` and `of_pair` measure
and return a `Document`, which holds JSON values only; `page` combines a document and the committed script (`assets/`,
built by tools/report) into one file.
"""
