"""Installs libibverbs, against which the transfer engine of disaggregation is linked even if the engine uses TCP."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess


def provide_ibverbs() -> str:
    """Install libibverbs if this process is root and has apt-get. Return a remark: found, installed or missing."""
    if ctypes.util.find_library("ibverbs"):
        return "there already"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "--yes", "--no-install-recommends", "libibverbs1"]
        for command in (install, ["apt-get", "update"], install):  # the lists of a container image are often empty
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            if command is install and done.returncode == 0:
                return "installed by apt-get"
    return "missing: everything works but prefill/decode disaggregation, which needs Debian's libibverbs1"
