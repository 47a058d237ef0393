"""`kvferry verify`: whether every byte goes to where it belongs, and nothing else, before traffic is let in."""

from kvferry.cli.verify.command import add_arguments, run

__all__ = ["add_arguments", "run"]
