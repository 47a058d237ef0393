"""`kvferry doctor`: what is wrong here, with the registry, or with a peer, and what to do about it.

Each check is a function that returns findings and is given up after its time limit, so nothing that hangs can hang the
doctor.
"""

from kvferry.cli.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]
