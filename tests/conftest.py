"""What holds for every test: strict promotion, hypothesis without deadlines, oracles only when asked for."""

import os

# Before jax is imported: the bits under test are the CPU's unless the caller names another platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

# Library code must say every cast and every broadcast.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# No persistent compilation cache: every run judges the bits that this XLA compiles on this machine.

# The first example compiles, which takes seconds: neither a deadline nor "too slow" means anything here.
_common = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("qjax", **_common)
hypothesis.settings.register_profile("qjax-ci", derandomize=True, print_blob=True, database=None, **_common)
hypothesis.settings.load_profile("qjax-ci" if os.environ.get("CI") else "qjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--oracles", action="store_true", help="run the tests marked oracle (needs torch and tflite-micro)"
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run the tests marked exhaustive too: more models",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what was not asked for: tests whose runtime the lock does not hold, and those of `make test-all`."""
    for marker, option in (("oracle", "--oracles"), ("exhaustive", "--exhaustive")):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out and not config.getoption(option):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


def pytest_ignore_collect(collection_path, config: pytest.Config) -> bool | None:
    """Leaves out, without --oracles, files named test_oracle_*.py: they import a runtime at the top."""
    if collection_path.name.startswith("test_oracle_") and not config.getoption("--oracles"):
        return True
    return None
