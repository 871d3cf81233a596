"""A small model, and the same as a vendor's chip computes it."""

import pytest

import qjax
from qjax.export import Backend
from qjax.export.integer_graph import IntegerGraph
from tests.assign.chip import IMAGES, Residual, device_of


@pytest.fixture(scope="session")
def qmodel() -> qjax.QuantizedModel:
    model = qjax.quantize(Residual(), qjax.Recipe(), IMAGES)
    model.eval()
    return model


@pytest.fixture(scope="session")
def plain(qmodel: qjax.QuantizedModel) -> IntegerGraph:
    return qjax.convert(qmodel, IMAGES)


@pytest.fixture(scope="session")
def chip() -> Backend:
    return device_of()


@pytest.fixture(scope="session")
def device(chip: Backend, qmodel: qjax.QuantizedModel) -> IntegerGraph:
    return qjax.convert(qmodel, IMAGES, target=chip)
