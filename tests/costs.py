"""What each test file costs, in seconds and in programs that XLA compiled: `make test ARGS="--costs=costs.txt"`."""

import time
from collections import defaultdict
from pathlib import Path

import jax.monitoring
import pytest

COLUMNS = ("wall", "cpu", "programs", "compile", "trace", "lower", "tests")
_EVENTS = {
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
}


class Costs:
    """Counts in each worker, and carries the counts to the controller with every test's report."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.now: dict[str, float] = defaultdict(float)
        self.files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **_: object) -> None:
        if name := _EVENTS.get(event):
            self.now[name] += duration_secs
            self.now["programs"] += name == "compile"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        before, wall, cpu = dict(self.now), time.perf_counter(), time.process_time()
        self.began = before, wall, cpu
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        if report.when == "teardown":
            before, wall, cpu = self.began
            spent = {name: value - before.get(name, 0) for name, value in self.now.items()}
            spent |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tests": 1}
            report.user_properties.append(("costs", spent))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, spent in report.user_properties:
            if name == "costs" and isinstance(spent, dict):
                file = self.files[report.nodeid.partition("::")[0]]
                for column, value in spent.items():
                    file[column] += value

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        rows = sorted(self.files.items(), key=lambda each: -each[1]["wall"])
        total: dict[str, float] = {column: sum(row[column] for _, row in rows) for column in COLUMNS}
        lines = [("  ".join(f"{column:>9}" for column in COLUMNS))]
        for name, row in [("all", total), *rows]:
            lines.append("  ".join(f"{row[column]:9.1f}" for column in COLUMNS) + f"  {name}")
        self.path.write_text("\n".join(lines) + "\n")
