"""What holds for every test: strict promotion, hypothesis without deadlines, oracles only when asked for."""

import gc
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

# Before jax is imported: the bits under test are the CPU's unless the caller names another platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before numpy is imported: workers are as many as cores already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before keras is imported: qjax reads programs of JAX.
os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis
import jax
import pytest

from tests import in_numpy, random_bits
from tests.costs import Costs
from tests.layers import round_trip

# Library code must say every cast and every broadcast.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
random_bits.draw_flat()
in_numpy.install()
# What one worker compiled, the others load. The folder is of one run, so it is this XLA's on this machine.
_FOLDER = "QJAX_TESTS_COMPILED"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Traces make millions of small objects, and every collection also asks XLA for its garbage.
gc.set_threshold(200_000, 50, 100)
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
    parser.addoption("--compiled", action="store_true", help="compile every program with XLA instead of numpy's copy")
    parser.addoption("--costs", metavar="FILE", help="write what each test file costs, see tests/costs.py")


@pytest.fixture
def on_cpu():
    """For tests of what XLA makes of a program on the CPU, or of what other platforms have no form of."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


_MAPS = Path("/proc/self/maps")
_MANY = 40_000
"""Linux allows a process 65,530 mappings (vm.max_map_count). Beyond them LLVM crashes instead of raising an error."""


_SECONDS = 10
_last_count = time.monotonic()


@pytest.fixture(autouse=True)
def _compiled_programs_are_dropped():
    """Each program that XLA compiled keeps mappings of memory; a worker that runs thousands of tests has many.

    Whole models of others have tens of thousands in one module, so tests are counted, not modules. Counting takes
    milliseconds, so not each of them.
    """
    global _last_count
    yield
    if time.monotonic() - _last_count > _SECONDS and _MAPS.exists():
        if _MAPS.read_bytes().count(b"\n") > _MANY:
            jax.clear_caches()
            gc.collect()
        _last_count = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    round_trip.always_compiled = config.getoption("--compiled")
    if not hasattr(config, "workerinput"):
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="qjax-tests-")
    jax.config.update("jax_compilation_cache_dir", os.environ[_FOLDER])
    if path := config.getoption("--costs"):
        config.pluginmanager.register(Costs(path))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and _FOLDER in os.environ:
        shutil.rmtree(os.environ.pop(_FOLDER), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what was not asked for: tests whose runtime the lock does not hold, and those of `make test-all`."""
    left_out: list[pytest.Item] = []
    if not config.getoption("--oracles"):
        left_out += [item for item in items if item.get_closest_marker("oracle")]
    here = set(items) - set(left_out)
    for item in _beyond_the_sample([item for item in items if item in here and not _is_exhaustive(item)]):
        item.add_marker("exhaustive")
    if not config.getoption("--exhaustive"):
        left_out += [item for item in items if item in here and _is_exhaustive(item)]
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]
    # two workers end at the same time if the dear files come first
    items.sort(key=lambda item: not str(item.path).endswith(_DEAR))


def _is_exhaustive(item: pytest.Item) -> bool:
    return item.get_closest_marker("exhaustive") is not None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What `make test-all` adds to `make test`, by room."""
    if not config.getoption("--exhaustive"):
        return
    tests, seconds = Counter[str](), Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if "exhaustive" in getattr(report, "keywords", ()) and getattr(report, "when", None) == "call":
            room = report.nodeid.partition("::")[0].rpartition("/")[0]
            tests[room] += 1
            seconds[room] += report.duration
    terminalreporter.write_sep("-", f"beyond make test: {tests.total()} tests, {seconds.total():.0f} s")
    for room, cost in seconds.most_common():
        terminalreporter.write_line(f"{room}: {tests[room]} tests, {cost:.0f} s")


_DEAR = tuple(
    f"tests/{name}.py"
    for name in (
        "assign/test_retarget",
        "contrib/learned_bits/test_learned_bits",
        "contrib/post_training/test_gptq",
        "contrib/post_training/test_unrolled",
        "contrib/simd/test_c_one_bit",
        "contrib/simd/test_c_simd",
        "export/emit/test_c",
        "export/emit/test_c_loops",
        "export/emit/test_c_ops",
        "export/emit/test_c_threads",
        "export/emit/test_onnx_qdq_models",
        "graph/test_batch_shapes",
        "jaxprs/test_evaluator",
        "layers/test_public_forms",
        "lower/test_products",
        "ops/test_settings",
        "run/test_find_loops",
        "run/test_interpreter",
        "targets/test_every_target",
        "test_compiled_call",
        "test_on_cpu",
        "test_scans",
        "training/test_memory",
        "training/test_sharding",
    )
)
"""Files of more than 15 seconds: `make test ARGS="--costs=costs.txt"`."""


def _beyond_the_sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """All but n cases of every test marked sampled(n): n spread evenly over the list, its ends among them."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    rest: list[pytest.Item] = []
    for family in families.values():
        marker = family[0].get_closest_marker("sampled")
        assert marker is not None
        (n,) = marker.args
        kept = {round(i * (len(family) - 1) / max(n - 1, 1)) for i in range(n)}
        rest += [item for i, item in enumerate(family) if i not in kept]
    return rest


def pytest_ignore_collect(collection_path, config: pytest.Config) -> bool | None:
    """Leaves out, without --oracles, files named test_oracle_*.py: they import a runtime at the top."""
    if collection_path.name.startswith("test_oracle_") and not config.getoption("--oracles"):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Numpy computes unless XLA is the subject, for fixtures of modules, too; `--compiled` compiles everything."""
    compiled = item.config.getoption("--compiled") or item.get_closest_marker("compiled")
    in_numpy.Switch.on = not compiled and not _of_xla(item.path)
    try:
        return (yield)
    finally:
        in_numpy.Switch.on = False


_XLA = ("tests/numerics", "tests/run", "qjax")
"""What these folders test is XLA's: its bits and its programs."""


def _of_xla(path: Path) -> bool:
    return any(path.is_relative_to(_ROOT / folder) for folder in _XLA)


_ROOT = Path(__file__).parent.parent
