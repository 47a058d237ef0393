"""Who may write where and until when: rendezvous, handshake, the request state machine, the endpoint."""

from kvferry.session.endpoint import Endpoint, Transfer
from kvferry.session.events import Report
from kvferry.session.registry import Registry, RegistryServer

__all__ = ["Endpoint", "Registry", "RegistryServer", "Report", "Transfer"]
