"""Child processes that end with their parent, on Linux."""

import signal
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["dying_with_parent"]

_LAUNCHER: Final = """
import ctypes, os, sys
_, signum, uid, gid, *command = sys.argv
if uid:
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)
os.execvp(command[0], command)
"""
"""Becomes another user, then asks for the signal (a change of user takes it back), then becomes the program."""


def dying_with_parent(
    command: Sequence[str], signum: signal.Signals, account: tuple[int, int] | None = None
) -> list[str]:
    """`command`, run as `account` (uid, gid), to which the kernel sends `signum` should its parent die.

    A launcher of its own rather than code run in the forked child: a process with
    threads may do nothing but exec after its fork.
    """
    uid, gid = ("", "") if account is None else map(str, account)
    if sys.platform != "linux" and account is None:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(signum)), uid, gid, *command]
