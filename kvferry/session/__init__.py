"""Who may write where and until when: rendezvous, handshake, the request state machine, the endpoint."""

from kvferry.session.endpoint import Endpoint
from kvferry.session.events import Report
from kvferry.session.registry import Registry, RegistryServer
from kvferry.session.transfer import Transfer

__all__ = ["Endpoint", "Registry", "RegistryServer", "Report", "Transfer"]
