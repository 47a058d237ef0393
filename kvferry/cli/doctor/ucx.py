"""`python -m kvferry.cli.doctor.ucx`: have the UCX library that NIXL has loaded print what it found here.

By the C functions of `ucp/api/ucp.h` (UCX 1.x). NIXL's wheels carry no `ucx_info`, which would print the same.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

from kvferry.errors import KVFerryError
from kvferry.transport.nixl import Agent

_FIELD_FEATURES = 1 << 0  # UCP_PARAM_FIELD_FEATURES
_FEATURE_RMA = 1 << 2  # UCP_FEATURE_RMA
_PARAMS_WORDS = 64
"""More than ucp_params_t has; fields that the mask doesn't name are not read."""


def main() -> int:
    """Exit code 1 with a reason on stderr where it can't be asked."""
    try:
        agent = Agent()  # loads UCX, and keeps it
    except KVFerryError as error:
        print(error, file=sys.stderr)
        return 1
    loaded = re.findall(r"\S*/libucp[^/\s]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if not loaded:
        print("NIXL has not loaded UCX", file=sys.stderr)
        return 1
    ucp, libc = ctypes.CDLL(loaded[0]), ctypes.CDLL(None)
    version = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, version))
    print("UCX", ".".join(str(number.value) for number in version), flush=True)
    params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FIELD_FEATURES, _FEATURE_RMA)
    context = ctypes.c_void_p()
    status = ucp.ucp_init_version(version[0], version[1], params, None, ctypes.byref(context))
    if status:
        print(f"ucp_init failed with status {status}", file=sys.stderr)
        return 1
    libc.fdopen.restype = ctypes.c_void_p
    out = ctypes.c_void_p(libc.fdopen(sys.stdout.fileno(), b"w"))
    ucp.ucp_context_print_info(context, out)
    libc.fflush(out)
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
