"""`kvferry soak`: real processes that are paused, killed and restarted under random load."""

from kvferry.cli.soak.command import add_arguments, run

__all__ = ["add_arguments", "run"]
