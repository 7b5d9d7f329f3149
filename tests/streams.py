"""`xmlc predict` at the end of a pipe: what it answers, and the memory it takes for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FEEDING = """
import resource, subprocess, sys, threading
lines, *command = sys.argv[1:]
process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def feed():
    for number in range(int(lines)):
        kind = number % 8
        if kind == 6:
            line = b"\\n"
        elif kind == 7:
            line = b"nowhere%d seen%d\\n" % (number, number)
        else:
            line = b"word%d word%d and %d more\\n" % (number % 90, number % 70, number)
        process.stdin.write(line)
    process.stdin.close()
threading.Thread(target=feed).start()
answers = sum(answer.startswith(b'{"labels": [{') for answer in process.stdout)
assert process.wait() == 0
assert answers == int(lines), answers
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak_bytes(run: Path, lines: int) -> int:
    """Predict for so many lines from a pipe, each answered with a label, and return the most resident memory.

    Of eight lines one is empty, and one holds words that no model knows.
    """
    predict = [sys.executable, "-P", "-m", "xmlc.cli", "predict", str(run), "-k", "1"]
    command = [sys.executable, "-P", "-c", _FEEDING, str(lines), *predict]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
