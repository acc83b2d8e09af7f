"""Values of stored files from their JSON, on several threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import threading
import msgspec
from coordinator.model.stored_json import converted

sys.setswitchinterval(1e-6)
for _ in range(200):
    inner = msgspec.defstruct("Inner", [(f"f{number}", "int | str") for number in range(40)])
    outer = msgspec.defstruct("Outer", [("inner", inner), *((f"f{number}", "int | str") for number in range(40))])
    of_inner = {f"f{number}": number for number in range(40)}
    begin = threading.Barrier(4)

    def use(kind, data):
        begin.wait()
        assert converted(data, kind).f39 == 39

    uses = [(inner, of_inner), (outer, {"inner": of_inner, **of_inner})] * 2
    threads = [threading.Thread(target=use, args=each) for each in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_use_a_type_for_the_first_time_at_once() -> None:
    # Its threads end the process, as those of a store actor did to which two tasks connected.
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
