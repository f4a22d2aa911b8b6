"""Runs Python so that the system kills it when its parent ends, even by SIGKILL. On Linux only.

The launcher runs this file as a program, `python -I -S _tied.py PARENT WORDS`, which needs only the
standard library. It asks the system for a signal, and then becomes Python with WORDS as arguments;
the request stays. The signal comes when the thread ends that has started this process, so that must
be the launcher's main thread.
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's <sys/prctl.h>


def main(parent: int, words: list[str]) -> None:
    """Becomes Python, unless the parent has ended before the system knew of the request."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() == parent:
        os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
