"""A runtime in a process of its own: pickled requests on its stdin, pickled answers on its stdout.

This file has both ends. `Process` starts a Python, perhaps another one than this, and asks it; this file, run as a
script with the path of a worker, is what that Python executes (`serve`). So it imports the standard library only, and a
worker nothing of qjax. A worker is a file with two functions: `start()`, which loads the runtime and returns a
greeting, and `run(request)`, which returns an answer; both values are what pickle takes.
"""

import atexit
import os
import pickle
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Process:
    """A worker, from its start to the end of this process.

    Args:
      runtime: what errors call it.
      command: how its Python is started.
      worker: the worker's file.
      missing: the error to raise where the Python does not start or cannot import the runtime, given the reason.
      environment: variables to set beside those of this process.

    Attributes:
      greeting: what the worker's `start` returned.
    """

    def __init__(
        self,
        runtime: str,
        command: Sequence[str],
        worker: Path,
        missing: Callable[[str], ImportError],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._runtime = runtime
        try:
            self._process = subprocess.Popen(
                [*command, __file__, str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise missing(f"{command[0]} does not start ({error})") from None
        atexit.register(self.close)
        try:
            self.greeting: Any = self._read()
        except EOFError:
            self.close()
            raise missing(f"{shlex.join(command)} cannot import it") from None

    def ask(self, request: Any, op: str) -> Any:
        """The worker's answer; op: what the request computes, for errors.

        Raises:
          ValueError: raised by the worker.
          RuntimeError: any other error of the worker, with its traceback; or its process ended.
        """
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            kind, answer = self._read()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(
                f"{self._runtime}'s process ended with status {self._process.wait()} while it computed {op!r}."
            ) from None
        if kind != "answer":
            raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[kind](answer)
        return answer

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)


def serve(worker: str) -> None:
    """The other end: the greeting, then ("answer", value) or (kind of error, text) per request, until stdin ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Other output on stdout must not come between the answers.
    os.dup2(2, 1)
    # This folder has files with the names of the runtimes' packages, so it must not be on the path.
    sys.path[:] = [path for path in sys.path if not path or Path(path) != Path(__file__).parent]
    functions = runpy.run_path(worker)

    def write(answer: Any) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    write(functions["start"]())
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = ("answer", functions["run"](request))
        except ValueError as error:
            answer = ("ValueError", str(error))
        except Exception:
            answer = ("RuntimeError", traceback.format_exc())
        write(answer)


if __name__ == "__main__":
    serve(sys.argv[1])
