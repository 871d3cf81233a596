"""`qjax.cache_compilations`: a second process compiles nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import qjax

SCRIPT = """
import sys
import jax, jax.numpy as jnp
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
events = []
jnp.zeros(3) + 1  # before the cache is set up
import qjax
assert qjax.cache_compilations(sys.argv[1]).is_dir()
x = jnp.linspace(-1.0, 1.0, 12)
q = qjax.QParams(jnp.float32(0.1), jnp.int32(0), qjax.QSpec())
print(jax.jit(qjax.fake_quant)(x, q).sum())
print(sum(name.endswith("cache_hits") for name in events), sum(name.endswith("cache_misses") for name in events))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    def run():
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        value, counts = done.stdout.splitlines()
        return value, *map(int, counts.split())

    first, hits, misses = run()
    assert misses > 0
    second, hits, misses = run()
    assert (first, misses) == (second, 0)
    assert hits > 0


def test_a_path_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="expected a folder"):
        qjax.cache_compilations(tmp_path / "file")
